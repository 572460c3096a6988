"""Which nodes are not to be used for a while, and why. Pure.

A node is accused by what its ranks did (``accused``), or by preflight; what is stored of that
decides (``judge``). Promises: every quarantine has a reason; one that the controller decided has
an end, and a longer one each time it comes back; a job can't cost a cluster its nodes, nor can
the controller's own machine: where ranks of a job die on node after node, it is the job; what
preflight says of most nodes alike is told of what they have in common, and costs that job alone
its nodes; the only node that a job could run on is left in use, at least for other jobs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from monitoring.records import Incident
from orchestrator.node_slot import NodeSlot
from orchestrator.placement.placement import Barred, NodeCapacity
from orchestrator.spec.config import QuarantineConfig

AccusationKind = Literal["ranks_lost", "corruption", "slow", "preflight", "unfit"]
"""``unfit``: it can't run this job, and others perhaps."""
QuarantineKind = Literal["ranks_lost", "corruption", "slow", "preflight", "unfit", "by_hand"]


@dataclass(frozen=True, slots=True)
class Accusation:
    """What a job saw of a node."""

    node_id: str
    address: str
    """Of the machine, so that it is known again under another id; empty where nodes share one."""
    job: str
    attempt: int
    kind: AccusationKind
    message: str
    time: float
    rehearsed: bool = False
    """A drill did it."""


@dataclass(frozen=True, slots=True)
class Quarantine:
    """A node that is left out."""

    node_id: str
    address: str
    kind: QuarantineKind
    reason: str
    """One sentence for a person."""
    by: str
    """Who asked for it; empty: the controller."""
    job: str
    """Whose ranks showed it; empty where none did."""
    since: float
    until: float | None
    """None: until somebody releases it."""
    released_at: float | None = None

    @property
    def taken_back(self) -> bool:
        """Whether it turned out to be no fault of the node's: as if it had never been."""
        return self.released_at == self.since

    def active(self, now: float) -> bool:
        """Whether it is in force."""
        return self.released_at is None and (self.until is None or now < self.until)

    def concerns(self, node: NodeCapacity | NodeSlot) -> bool:
        """Whether this is the machine: by Ray's id, or by its address after a restart."""
        address = node.node_ip if isinstance(node, NodeSlot) else node.address
        return node.node_id == self.node_id or (bool(self.address) and address == self.address)


@dataclass(frozen=True, slots=True)
class Dismissed:
    """An accusation that changes nothing (yet)."""

    why: str
    news: bool = False
    """Whether it would have counted, which people should know."""


@dataclass(frozen=True, slots=True)
class Shared:
    """An accusation that holds of so many nodes that it is what they have in common, not they."""

    entry: Quarantine
    """For the job alone."""
    nodes: int
    """Of which the same is said."""
    look_at: str
    """What a person has to look at."""
    taken_back: tuple[Quarantine, ...]
    """Those decided before it was known."""


_COMMON: tuple[tuple[str, str], ...] = (
    (r"\bclock\b", "the clock of the controller's machine"),
    (
        r"\blinks\b",
        "the network between the job's nodes, and a node that is part of every link which failed",
    ),
    (
        r"\bno answer\b|\bprobe failed\b",
        "the job's storage, and the network between the controller's machine and the nodes",
    ),
    (r"", "what the job brings to its nodes, and what was installed on all of them of late"),
)
"""What a check's failures on many nodes have in common, the first pattern that is found in it."""


_OF_THE_MACHINE = ("device", "matmul gave a wrong result", "FP8 cast gave a wrong result")
"""Checks that no job and no other machine has a part in: two nodes may well fail them by chance."""


def barring(
    quarantines: Sequence[Quarantine],
    nodes: Iterable[NodeCapacity | NodeSlot],
    job: str,
    now: float,
) -> dict[str, Barred]:
    """Nodes that ``job`` can't be given now, by id."""
    found: dict[str, Barred] = {}
    for node in nodes:
        for entry in quarantines:
            mine = entry.kind != "unfit" or entry.job == job
            if mine and entry.active(now) and entry.concerns(node):
                unusable = entry.kind in ("unfit", "preflight")
                before = found.get(node.node_id)
                slow = entry.kind == "slow"
                if before is None or before.slow or (before.may_stay and not slow):
                    # What makes it unusable counts, whatever else is held against it.
                    found[node.node_id] = Barred(entry.reason, not unusable, slow)
    return found


def accused(
    incidents: Sequence[Incident],
    nodes: Sequence[NodeSlot],
    rehearsed: Collection[int],
    addresses: Mapping[str, str],
    job: str,
) -> list[Accusation]:
    """What the incidents of an attempt on ``nodes`` say of them, once a node and kind.

    Accused is who alone can have done it: the nodes whose parameters were outvoted; the one
    node whose ranks died, or hung, while those of others lived. An error that a rank raised is
    the job's. ``rehearsed``: ranks that a drill struck; ``addresses``: of machines, by node id.
    """
    home = _homes(nodes)
    found: dict[tuple[str, AccusationKind], Accusation] = {}
    for incident in incidents:
        where = list(dict.fromkeys(home[r] for r in incident.ranks if r in home))
        kind: AccusationKind
        if incident.kind == "replica_disagreement" and incident.evidence.get("outvoted"):
            kind = "corruption"
        elif incident.kind == "slow_rank":
            kind = "slow"
        elif incident.kind in ("rank_died", "rank_hung") and not incident.evidence.get("raised"):
            kind = "ranks_lost"
            if len(where) != 1:
                continue
        else:
            continue
        if len(where) == len(set(home.values())) > 1:
            continue
        for seat in where:
            mine = [r for r in incident.ranks if home.get(r) == seat]
            found[seat.node_id, kind] = Accusation(
                node_id=seat.node_id,
                address=addresses.get(seat.node_id, ""),
                job=job,
                attempt=incident.attempt,
                kind=kind,
                message=incident.message,
                time=incident.time,
                rehearsed=all(r in rehearsed for r in mine),
            )
    return list(found.values())


def judge(
    case: Accusation,
    past: Sequence[Accusation],
    quarantines: Sequence[Quarantine],
    config: QuarantineConfig,
    *,
    others: int,
    passed: int = 0,
    nodes: int = 0,
) -> Quarantine | Shared | Dismissed:
    """What comes of an accusation.

    ``past``: all of those within the window, this one and all of its attempt's included;
    ``quarantines``: those in force, those that the machine ever had, and those that the job has
    cost within the window; ``others``: nodes that could take the seat; ``passed``:
    nodes of the attempt that preflight found nothing against; ``nodes``: those of the cluster
    that are large enough, 0 where that isn't known.
    """
    machines = [q for q in quarantines if _same_machine(q, case)]
    if any(q.active(case.time) and _holds(q, case.kind, case.job) for q in machines):
        return Dismissed("it is quarantined for that already")
    told = case.message.rstrip(". ")
    if case.kind in ("ranks_lost", "corruption", "slow") and not others:
        why = f"no other node has room for its ranks, so it stays in use ({told})"
        return Dismissed(why, news=case.kind == "corruption")
    if case.kind == "ranks_lost":
        since = case.time - config.window_s
        seen = [a for a in past if a.kind == case.kind and _same_machine(a, case)]
        attempts = {(a.job, a.attempt) for a in seen if since < a.time <= case.time}
        if len(attempts) < config.ranks_lost:
            return Dismissed(f"{len(attempts)} of quarantine.ranks_lost = {config.ranks_lost}")
        elsewhere = [
            q
            for q in quarantines
            if q.kind == case.kind and q.job == case.job and q.since > since and q not in machines
        ]
        if elsewhere:
            why = "ranks of this job died on another node as often: it is the job"
            return Dismissed(why, news=True)
        told = f"ranks on it were lost {len(attempts)} times; the last time: {told}"
    if case.kind == "preflight":
        alike = _alike(case, past, passed, nodes)
        if alike:
            return _shared(case, alike, quarantines, machines, config)
        if not others:
            why = f"{told}; no other node has room for {case.job}, and it is left out for it alone"
            return _left_out(case, "unfit", why, machines, config)
    return _left_out(case, case.kind, told, machines, config)


def check_of(message: str) -> str:
    """Which check of preflight a failure's reason tells of, without what it measured."""
    return re.sub(r"[\w.:/]*\d[\w.:/]*", "#", message.partition(": ")[0])


def _alike(
    case: Accusation, past: Sequence[Accusation], passed: int, nodes: int
) -> list[Accusation]:
    """The accusations that say of most nodes what ``case`` says of its own: of those that the job
    had, or of the cluster's; none where it is alone with it, or they are few."""
    check = check_of(case.message)
    alike = [a for a in past if a.kind == case.kind and check_of(a.message) == check]
    mine = [a for a in alike if a.job == case.job]
    of_itself = check.startswith(_OF_THE_MACHINE)
    if nodes and _machines(alike) > max(2 if of_itself else 1, nodes / 2):
        return alike
    if of_itself:
        return []
    return mine if _machines(mine) > max(1, passed) else []


def _shared(
    case: Accusation,
    alike: Sequence[Accusation],
    quarantines: Sequence[Quarantine],
    machines: Sequence[Quarantine],
    config: QuarantineConfig,
) -> Shared:
    """``alike``: the accusations that say the same; ``machines``: as for ``_left_out``."""
    look_at = next(what for pattern, what in _COMMON if re.search(pattern, check_of(case.message)))
    count = _machines(alike)
    why = (
        f"{case.message.rstrip('. ')}; {count} nodes failed alike, so it is left out for "
        f"{case.job} alone: look at {look_at}"
    )
    by_these = [
        q
        for q in quarantines
        if q.kind == case.kind
        and q.active(case.time)
        and any(a.job == q.job and a.time == q.since and _same_machine(q, a) for a in alike)
    ]
    entry = _left_out(case, "unfit", why, machines, config)
    return Shared(entry, count, look_at, tuple(by_these))


def _left_out(
    case: Accusation,
    kind: AccusationKind,
    why: str,
    machines: Sequence[Quarantine],
    config: QuarantineConfig,
) -> Quarantine:
    """``machines``: the quarantines that the machine ever had."""
    before = sum(_holds(q, kind, case.job) and not q.taken_back for q in machines)
    longest_s = config.unfit_longest_s if kind == "unfit" else config.longest_s
    seconds = min(_term(kind, config) * 2.0**before, longest_s)
    if case.rehearsed:
        why, seconds = f"rehearsed by a drill: {why}", config.rehearsed_s
    return Quarantine(
        node_id=case.node_id,
        address=case.address,
        kind=kind,
        reason=f"{why[0].upper()}{why[1:]}.",
        by="",
        job=case.job,
        since=case.time,
        until=case.time + seconds,
    )


def machine_addresses(nodes: Sequence[NodeCapacity]) -> dict[str, str]:
    """Addresses by node id, where an address is that of one node alone: there it is a machine's."""
    every = [node.address for node in nodes]
    return {n.node_id: n.address for n in nodes if n.address and every.count(n.address) == 1}


def _homes(nodes: Sequence[NodeSlot]) -> dict[int, NodeSlot]:
    """Rank → the seat it has; ranks fill nodes in order."""
    seats = [seat for seat in nodes if not seat.spare for _ in range(seat.slots)]
    return dict(enumerate(seats))


def _same_machine(entry: Quarantine | Accusation, case: Accusation) -> bool:
    same_address = bool(entry.address) and entry.address == case.address
    return entry.node_id == case.node_id or same_address


def _holds(entry: Quarantine, kind: AccusationKind, job: str) -> bool:
    """Whether it is of this kind, and concerns the job."""
    return entry.kind == kind and (kind != "unfit" or entry.job == job)


def _machines(cases: Sequence[Accusation]) -> int:
    """How many there are of them; Ray's id changes, and an address isn't always known."""
    at = {case.node_id: case.address for case in cases if case.address}
    return len({at.get(case.node_id, case.node_id) for case in cases})


def _term(kind: AccusationKind, config: QuarantineConfig) -> float:
    terms: dict[AccusationKind, float] = {
        "ranks_lost": config.ranks_lost_s,
        "corruption": config.corruption_s,
        "slow": config.slow_s,
        "preflight": config.preflight_s,
        "unfit": config.unfit_s,
    }
    return terms[kind]
