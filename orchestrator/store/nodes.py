"""Rows of what is held against nodes: accusations and quarantines.

Promises: what an attempt shows of a node is stored once, with what comes of it, in one
transaction; rows are never deleted, so that a node that comes back is known. A quarantine is in
force until it ends, however many came after it; of those that are over only what a decision is
about is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from orchestrator.events import EventDraft
from orchestrator.placement.quarantine import (
    Accusation,
    Dismissed,
    Quarantine,
    Shared,
    judge,
)
from orchestrator.spec.config import QuarantineConfig
from orchestrator.store.engine import Reads, Writes
from orchestrator.store.rows import add_event, stored_job
from orchestrator.store.tables import accusations, quarantines

BY_CONTROLLER = "the controller, for other nodes failed alike"
"""Who releases a node of whom it turned out that it is not its fault."""
AHEAD_S = 5.0
"""Seconds that the clock of who saw a fault may be ahead of ours."""


class NodeRecords:
    """Accusations and quarantines of a store; ``writing`` and ``reading`` are its transactions."""

    def __init__(self, writing: Writes, reading: Reads) -> None:
        self._writing = writing
        self._reading = reading

    def in_force(self, now: float) -> list[Quarantine]:
        """The quarantines of this moment, oldest first."""
        with self._reading() as db:
            return _quarantines(db, _in_force(now))

    def accuse(
        self,
        case: Accusation,
        config: QuarantineConfig,
        others: int,
        *,
        beside: Sequence[Accusation] = (),
        passed: int = 0,
        nodes: int = 0,
    ) -> Quarantine | Shared | Dismissed:
        """Store what an attempt shows of a node, and what comes of it with its event.

        Told again it changes nothing. ``beside``: what the attempt shows besides, stored or not;
        the numbers are those of ``judge``.
        """
        same = (
            accusations.c.job == case.job,
            accusations.c.attempt == case.attempt,
            accusations.c.node_id == case.node_id,
            accusations.c.kind == case.kind,
        )
        with self._writing() as db:
            if db.execute(sa.select(accusations.c.id).where(*same)).first() is not None:
                return Dismissed("it is stored already")
            row = {**asdict(case), "rehearsed": int(case.rehearsed)}
            db.execute(sa.insert(accusations).values(row))
            since = case.time - config.window_s
            recent = sa.select(accusations).where(accusations.c.time > since)
            past = [_accusation(row) for row in db.execute(recent).mappings()]
            known = {_shown(one) for one in past}
            past += [one for one in beside if _shown(one) not in known]
            entries = _quarantines(db, _that_matters(case, since))
            found = judge(case, past, entries, config, others=others, passed=passed, nodes=nodes)
            if isinstance(found, Quarantine):
                _add(db, found, case.attempt)
            elif isinstance(found, Shared):
                _add(db, found.entry, case.attempt)
                for entry in found.taken_back:
                    # As from its beginning: the next one is no longer for it.
                    _release(db, entry, BY_CONTROLLER, entry.since, case.time)
            return found

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
        from now on, and a quarantine lasts as long as it was given."""
        later = now + AHEAD_S
        held = sa.and_(quarantines.c.since > later, quarantines.c.released_at.is_(None))
        seen = accusations.c.time > later
        with self._reading() as db:
            found = [
                db.execute(sa.select(c).where(which).limit(1)).first() is not None
                for c, which in ((quarantines.c.id, held), (accusations.c.id, seen))
            ]
        if not any(found):
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


def _that_matters(case: Accusation, since: float) -> sa.ColumnElement[bool]:
    """What ``judge`` asks for: those in force, those that its machine ever had, and those that its
    job has cost lately."""
    machine = quarantines.c.node_id == case.node_id
    if case.address:
        machine |= quarantines.c.address == case.address
    by_job = (quarantines.c.job == case.job) & (quarantines.c.since > since)
    return _in_force(case.time) | machine | by_job


def _quarantines(db: Connection, which: sa.ColumnElement[bool]) -> list[Quarantine]:
    query = sa.select(quarantines).where(which).order_by(quarantines.c.id)
    names = [field.name for field in fields(Quarantine)]
    return [Quarantine(**{k: row[k] for k in names}) for row in db.execute(query).mappings()]


def _shown(case: Accusation) -> tuple[str, int, str, str]:
    """What is stored once."""
    return case.job, case.attempt, case.node_id, case.kind


def _accusation(row: sa.RowMapping) -> Accusation:
    values = {field.name: row[field.name] for field in fields(Accusation)}
    return Accusation(**{**values, "rehearsed": bool(row["rehearsed"])})
