"""Rows of what is held against nodes: accusations and quarantines.

Promises: what an attempt shows of a node is stored once, with what comes of it, in one
transaction; rows are never deleted, so that a node that comes back is known. A quarantine is in
force until it ends, however many came after it; of those that are over only what a decision is
about is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, fields

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from launch.preflight import Failure
from orchestrator.events import EventDraft
from orchestrator.lifecycle import JobState
from orchestrator.node_slot import working
from orchestrator.placement.accusation import Accusation
from orchestrator.placement.checks import Checked
from orchestrator.placement.docket import Dismissed, Docket, Shared
from orchestrator.placement.placement import NodeCapacity
from orchestrator.placement.quarantine import Quarantine
from orchestrator.spec.config import QuarantineConfig
from orchestrator.store.engine import Reads, Writes
from orchestrator.store.rows import add_event, seats_in, stored_job
from orchestrator.store.tables import accusations, attempts, events, quarantines

BY_CONTROLLER = "the controller, for other nodes failed alike"
"""Who releases a node of whom it turned out that it is not its fault."""
AHEAD_S = 5.0
"""Seconds that the clock of who saw a fault may be ahead of ours."""
AHEAD_FOR_S = 300.0
"""Seconds that something must stay ahead before it is that clock that was wrong, and not ours."""
NOT_AT_FAULT = "the controller, for the node at the other end of its links is at fault"
"""As well."""


Judged = tuple[Accusation, Quarantine | Shared | Dismissed]
"""An accusation, and what came of it."""
MOST_MACHINES = 500
"""Of which is asked at once: a statement takes so many values."""


class NodeRecords:
    """Accusations and quarantines of a store; ``writing`` and ``reading`` are its transactions."""

    def __init__(self, writing: Writes, reading: Reads) -> None:
        self._writing = writing
        self._reading = reading
        self._ahead_since: float | None = None

    def in_force(self, now: float) -> list[Quarantine]:
        """The quarantines of this moment, oldest first."""
        with self._reading() as db:
            return _quarantines(db, _in_force(now))

    def checks(
        self, job: str, attempt: int, window_s: float, *, trains: bool = False
    ) -> list[Checked]:
        """What preflight came to in the job's attempts up to this one, oldest first, as far as it
        was told within ``window_s`` before it failed in this one; empty where it did not. An
        attempt that trained has passed. ``trains``: this one does; empty where none failed."""
        mine = (events.c.job == job, events.c.attempt <= attempt)
        ended = "state" if trains else "preflight_failed"
        failing = sa.select(sa.func.max(events.c.time)).where(
            *mine, events.c.attempt == attempt, events.c.kind == ended
        )
        found: dict[int, tuple[float, dict[str, Failure], dict[str, list[str]]]] = {}
        with self._reading() as db:
            last = db.execute(failing).scalar_one()
            if last is None:
                return []
            told = sa.select(events).where(
                *mine,
                events.c.kind.in_(("preflight", "preflight_failed", "state")),
                events.c.time > last - window_s,
                events.c.time <= last,
            )
            for row in db.execute(told.order_by(events.c.id)).mappings():
                detail = json.loads(row["detail"])
                if row["kind"] == "state" and detail["to"] != JobState.RUNNING.word:
                    continue
                failed, ends = found.get(row["attempt"], (0.0, {}, {}))[1:]
                failed |= {
                    node: Failure.from_json(why) for node, why in detail.get("failed", {}).items()
                }
                ends |= detail.get("far_ends", {})
                found[row["attempt"]] = (row["time"], failed, ends)
            if not any(failed for _, failed, _ in found.values()):
                return []
            where = sa.select(attempts.c.attempt, attempts.c.nodes).where(
                attempts.c.job == job, attempts.c.attempt.in_(found)
            )
            seats = {number: seats_in(nodes) for number, nodes in db.execute(where) if nodes}
        return [
            Checked(
                number, time, tuple(s.node_id for s in working(seats.get(number, ()))), failed, ends
            )
            for number, (time, failed, ends) in sorted(found.items())
        ]

    def accuse(
        self,
        job: str,
        cases: Sequence[Accusation],
        config: QuarantineConfig,
        nodes: Sequence[NodeCapacity],
        now: float,
        *,
        checks: Sequence[Checked] = (),
        cleared: Collection[tuple[int, str]] = (),
        tell: Callable[[Sequence[Judged]], Sequence[EventDraft]] = lambda judged: (),
    ) -> list[Judged]:
        """Store what an attempt of ``job`` shows of nodes, what comes of it, and what there is to
        ``tell`` of that: all or nothing.

        Told again it changes nothing, and nobody waits for it. The others are ``Docket``'s.
        """
        with self._reading() as db:
            if not _new(db, job, cases):
                return []
        with self._writing() as db:
            new = _new(db, job, cases)
            if not new:
                return []
            rows = [{**asdict(case), "rehearsed": int(case.rehearsed)} for case in new]
            db.execute(sa.insert(accusations), rows)
            since = min(case.time for case in new) - config.window_s
            past = _accused_since(db, since)
            entries = _that_matter(db, job, new, since)
            docket = Docket(
                job, past, entries, nodes, config, now=now, checks=checks, cleared=cleared
            )
            for entry in docket.withdrawn:
                _release(db, entry, NOT_AT_FAULT, entry.since, now)
            judged = [(case, docket.judge(case)) for case in new]
            for case, found in judged:
                if isinstance(found, Quarantine):
                    _add(db, found, case.attempt)
                elif isinstance(found, Shared):
                    _add(db, found.entry, case.attempt)
                    for entry in found.taken_back:
                        # As from its beginning: the next one is no longer for it.
                        _release(db, entry, BY_CONTROLLER, entry.since, case.time)
            for event in tell(judged):
                add_event(db, job, new[0].attempt, event)
            return judged

    def reconsider(
        self,
        job: str,
        attempt: int,
        config: QuarantineConfig,
        nodes: Sequence[NodeCapacity],
        now: float,
        *,
        checks: Sequence[Checked],
        cleared: Collection[tuple[int, str]],
    ) -> None:
        """Leave out nodes that failed before ``attempt`` of ``job`` and were let off, where what
        has passed since says that it was they; the others are ``accuse``'s."""
        with self._writing() as db:
            past = _accused_since(db, now - config.window_s)
            mine = [case for case in past if case.job == job]
            entries = _that_matter(db, job, mine, now - config.window_s) if mine else []
            docket = Docket(
                job, past, entries, nodes, config, now=now, checks=checks, cleared=cleared
            )
            for entry in docket.at_fault_after_all():
                _add(db, entry, attempt)

    def quarantine(self, entry: Quarantine, jobs: Sequence[tuple[str, int]]) -> None:
        """Store one that a person asked for; ``jobs``: (job, attempt) that are told of it."""
        with self._writing() as db:
            db.execute(sa.insert(quarantines).values(asdict(entry)))
            for job, attempt in jobs:
                add_event(db, job, attempt, _told(entry))

    def release(self, entry: Quarantine, by: str, now: float) -> None:
        """It is over by the word of ``by``; the job that showed the fault is told."""
        with self._writing() as db:
            _release(db, entry, by, now, now)

    def begin_now(self, now: float) -> None:
        """What is of a time to come was seen by a clock that has been mended since: it counts
        from now on, and a quarantine lasts as long as it was given.

        Only once that has been so for a while: a machine that boots may be behind until its time
        service has set it, and what was held against nodes would be over then.
        """
        later = now + AHEAD_S
        held = sa.and_(quarantines.c.since > later, quarantines.c.released_at.is_(None))
        seen = accusations.c.time > later
        with self._reading() as db:
            found = [
                db.execute(sa.select(c).where(which).limit(1)).first() is not None
                for c, which in ((quarantines.c.id, held), (accusations.c.id, seen))
            ]
        if not any(found):
            self._ahead_since = None
            return
        if self._ahead_since is None:
            self._ahead_since = now
        if now - self._ahead_since < AHEAD_FOR_S:
            return
        with self._writing() as db:
            until = quarantines.c.until - quarantines.c.since + now
            db.execute(sa.update(quarantines).where(held).values(since=now, until=until))
            db.execute(sa.update(accusations).where(seen).values(time=now))


def look_again(db: Connection, job: str, now: float) -> None:
    """Nodes that couldn't run ``job`` are tried at once: whoever resumes it has seen to it."""
    mine = (quarantines.c.kind == "unfit") & (quarantines.c.job == job)
    for entry in _quarantines(db, mine & _in_force(now)):
        _release(db, entry, "the job's resume", now, now)


def _add(db: Connection, entry: Quarantine, attempt: int) -> None:
    db.execute(sa.insert(quarantines).values(asdict(entry)))
    if entry.job:
        add_event(db, entry.job, attempt, _told(entry))


def _release(db: Connection, entry: Quarantine, by: str, over: float, now: float) -> None:
    """``over``: when it ends."""
    which = sa.and_(
        quarantines.c.node_id == entry.node_id,
        quarantines.c.since == entry.since,
        quarantines.c.kind == entry.kind,
        quarantines.c.job == entry.job,
        quarantines.c.released_at.is_(None),
    )
    db.execute(sa.update(quarantines).where(which).values(released_at=over))
    if entry.job:
        told = f"Node {_named(entry)} is released by {by}; it was quarantined: {entry.reason}"
        detail = {"node_id": entry.node_id, "by": by}
        attempt = stored_job(db, entry.job)["attempt"]
        add_event(db, entry.job, attempt, EventDraft("node_released", now, told, detail))


def _told(entry: Quarantine) -> EventDraft:
    where = _named(entry)
    term = "until it is released"
    if entry.until is not None:
        term = f"for {_spell(entry.until - entry.since)}"
    who = f" by {entry.by}" if entry.by else ""
    return EventDraft(
        "node_quarantined",
        entry.since,
        f"Node {where} is quarantined{who} {term}: {entry.reason}",
        {
            "node_id": entry.node_id,
            "address": entry.address,
            "kind": entry.kind,
            "until": entry.until,
            "by": entry.by,
        },
    )


def _named(entry: Quarantine) -> str:
    return f"{entry.address} ({entry.node_id[:8]})" if entry.address else entry.node_id[:8]


def _spell(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _in_force(now: float) -> sa.ColumnElement[bool]:
    """As ``Quarantine.active``."""
    lasts = quarantines.c.until.is_(None) | (quarantines.c.until > now)
    return quarantines.c.released_at.is_(None) & lasts


def _new(db: Connection, job: str, cases: Sequence[Accusation]) -> list[Accusation]:
    """Those that aren't stored, each once."""
    columns = (accusations.c.attempt, accusations.c.node_id, accusations.c.kind)
    attempts = {case.attempt for case in cases}
    query = sa.select(*columns).where(accusations.c.job == job, columns[0].in_(attempts))
    stored = {tuple(row) for row in db.execute(query)} if cases else set()
    shown = {(case.attempt, case.node_id, case.kind): case for case in reversed(cases)}
    return [case for what, case in reversed(shown.items()) if what not in stored]


def _accused_since(db: Connection, since: float) -> list[Accusation]:
    recent = sa.select(accusations).where(accusations.c.time > since)
    return [_accusation(row) for row in db.execute(recent).mappings()]


def _that_matter(
    db: Connection, job: str, cases: Sequence[Accusation], since: float
) -> list[Quarantine]:
    """What a ``Docket`` asks for, oldest first."""
    by_job = (quarantines.c.job == job) & (quarantines.c.since > since)
    found = _numbered(db, _in_force(min(case.time for case in cases)) | by_job)
    for first in range(0, len(cases), MOST_MACHINES):
        some = cases[first : first + MOST_MACHINES]
        named = sa.or_(
            quarantines.c.node_id.in_({case.node_id for case in some}),
            quarantines.c.address.in_({case.address for case in some if case.address}),
        )
        # What other jobs could not use is nothing to it.
        found |= _numbered(
            db, named & ((quarantines.c.kind != "unfit") | (quarantines.c.job == job))
        )
    return [entry for _, entry in sorted(found.items())]


def _quarantines(db: Connection, which: sa.ColumnElement[bool]) -> list[Quarantine]:
    """Oldest first."""
    return list(_numbered(db, which).values())


def _numbered(db: Connection, which: sa.ColumnElement[bool]) -> dict[int, Quarantine]:
    query = sa.select(quarantines).where(which).order_by(quarantines.c.id)
    names = [field.name for field in fields(Quarantine)]
    rows = db.execute(query).mappings()
    return {row["id"]: Quarantine(**{k: row[k] for k in names}) for row in rows}


def _accusation(row: sa.RowMapping) -> Accusation:
    values = {field.name: row[field.name] for field in fields(Accusation)}
    return Accusation(**{**values, "rehearsed": bool(row["rehearsed"])})
