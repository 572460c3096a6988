"""Which nodes are not to be used for a while, and why. Pure.

A node is accused by what its ranks did (``accused``), or by preflight; what is stored of that
decides (``judge``). Promises: every quarantine has a reason; one that the controller decided has
an end, and a longer one each time it comes back; a job can't cost a cluster its nodes: where
ranks of a job die on node after node, it is the job; the only node that a job could run on is
left in use, for then nothing would be won.
"""

from __future__ import annotations

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
                if before is None or before.may_stay:
                    # What makes it unusable counts, whatever else is held against it.
                    found[node.node_id] = Barred(entry.reason, may_stay=not unusable)
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
) -> Quarantine | Dismissed:
    """What comes of an accusation. ``past``: all of those within the window, this one included;
    ``quarantines``: all there ever were; ``others``: nodes that could take the seat."""
    mine = [q for q in quarantines if _same_machine(q, case)]
    if any(q.active(case.time) and q.kind == case.kind for q in mine):
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
            if q.kind == case.kind and q.job == case.job and q.since > since and q not in mine
        ]
        if elsewhere:
            why = "ranks of this job died on another node as often: it is the job"
            return Dismissed(why, news=True)
        told = f"ranks on it were lost {len(attempts)} times; the last time: {told}"
    before = sum(q.kind == case.kind for q in mine)
    seconds = min(_term(case, config) * 2.0**before, config.longest_s)
    if case.rehearsed:
        told, seconds = f"rehearsed by a drill: {told}", config.rehearsed_s
    return Quarantine(
        node_id=case.node_id,
        address=case.address,
        kind=case.kind,
        reason=f"{told[0].upper()}{told[1:]}.",
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


def _term(case: Accusation, config: QuarantineConfig) -> float:
    terms: dict[AccusationKind, float] = {
        "ranks_lost": config.ranks_lost_s,
        "corruption": config.corruption_s,
        "slow": config.slow_s,
        "preflight": config.preflight_s,
        "unfit": config.unfit_s,
    }
    return terms[case.kind]
