"""What a job says of the nodes that it ran on. Pure.

Promises: accused is who alone can have done it, by what became of its ranks, or whom preflight's
failures are laid to; a machine is known again by its address where that is its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from launch.preflight import Check
from monitoring.records import Incident
from orchestrator.node_slot import NodeSlot, homes
from orchestrator.placement.checks import Laid
from orchestrator.placement.placement import NodeCapacity

AccusationKind = Literal["ranks_lost", "corruption", "slow", "preflight", "unfit"]
"""``unfit``: it can't run this job, and others perhaps."""


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
    check: Check = "unknown"
    """Of preflight, that it failed."""


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
    home = homes(nodes)
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


def failed_checks(laid: Laid, addresses: Mapping[str, str], job: str) -> list[Accusation]:
    """What preflight says of nodes; ``addresses`` as of ``accused``."""
    return [
        Accusation(
            node_id=node_id,
            address=addresses.get(node_id, ""),
            job=job,
            attempt=laid.attempt,
            kind="unfit" if failure.for_this_job else "preflight",
            message=failure.reason,
            time=laid.time,
            check=failure.check,
        )
        for node_id, failure in laid.failed.items()
    ]


def machine_addresses(nodes: Sequence[NodeCapacity]) -> dict[str, str]:
    """Addresses by node id, where an address is that of one node alone: there it is a machine's."""
    count = Counter(node.address for node in nodes)
    return {n.node_id: n.address for n in nodes if n.address and count[n.address] == 1}
