"""Which nodes a job gets, and which stand in for those it lost. Pure.

Promises: every answer that is no says what is missing in numbers, and which nodes are left out
why; the seats of one job are on different nodes; a seat that is kept stays where it is, and one
that is replaced keeps its place in the order of ranks, so that tensor groups stay inside a node.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from orchestrator.node_slot import NodeSlot, working
from orchestrator.spec.completion import slots_per_node
from orchestrator.spec.job import JobSpec

Resource = Literal["CPU", "GPU"]


@dataclass(frozen=True, slots=True)
class Need:
    """What a job asks of the cluster: ``nodes`` different nodes with ``slots`` each."""

    nodes: int
    slots: int
    resource: Resource
    spares: int = 0
    """Nodes beyond these, taken where they are free."""

    def __str__(self) -> str:
        unit = "GPUs" if self.resource == "GPU" else "CPU slots"
        return f"{self.nodes} node{'s' * (self.nodes > 1)} with {self.slots} {unit}"


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """One living node, in slots of each resource."""

    node_id: str
    total: dict[str, float]
    free: dict[str, float]
    address: str = ""
    name: str = ""
    """Host name, as far as it tells more than the address."""


@dataclass(frozen=True, slots=True)
class Barred:
    """Why a node is left out."""

    reason: str
    may_stay: bool = True
    """Whether a job that is on it may go on there where no other node is free."""
    slow: bool = False
    """It is slow and nothing else: better than one node fewer."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a need can be met. ``reason`` is empty only where it can be met now."""

    now: bool
    ever: bool
    """Could be met with the nodes there are, if nothing else ran and none were left out."""
    once_free: bool
    """Could be met with those that aren't left out, if nothing else ran."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Mended:
    """A group as it is to be."""

    nodes: tuple[NodeSlot, ...]
    """In the order of ranks, spares last."""
    taken: tuple[NodeSlot, ...] = ()
    """Those that have to be taken first."""
    dropped: tuple[NodeSlot, ...] = ()
    """Those that are to be given back."""
    moved: tuple[tuple[NodeSlot, NodeSlot], ...] = ()
    """Nodes whose ranks move, and to where."""
    stayed: tuple[NodeSlot, ...] = ()
    """Nodes that should have been replaced, and are used on."""


@dataclass(frozen=True, slots=True)
class Short:
    """A group can't be made whole."""

    missing: int
    """Nodes."""
    reason: str


def need_of(spec: JobSpec) -> Need:
    """What a completed spec asks for."""
    resource: Resource = "GPU" if spec.gpus_per_node else "CPU"
    return Need(spec.num_nodes, slots_per_node(spec), resource, spec.resources.spares)


def fit(
    need: Need,
    nodes: Sequence[NodeCapacity],
    barred: Mapping[str, Barred] = {},
    least: int | None = None,
) -> Fit:
    """Whether ``need``, or what it asks on ``least`` nodes, can be met by ``nodes``, now and ever;
    of ``barred`` ones not before they are left out no more."""
    least = need.nodes if least is None else least
    able = [n for n in nodes if n.total.get(need.resource, 0) >= need.slots]
    usable = [n for n in able if n.node_id not in barred]
    needs = f"needs {need}{f', at least {least}' if least < need.nodes else ''}"
    unit = "GPUs" if need.resource == "GPU" else "CPU slots"
    if len(able) < least:
        most = max((n.total.get(need.resource, 0) for n in nodes), default=0)
        have = (
            f"the cluster has {len(able)} such of {len(nodes)}"
            if most >= need.slots
            else f"the largest of {len(nodes)} has {most:g}"
        )
        return Fit(False, False, False, f"{needs}; {have}")
    out = [n for n in able if n.node_id in barred]
    left_out = f"; {left_out_words(out, barred)}" if out else ""
    if len(usable) < least:
        # Nothing of what is free: it would be told anew whenever a job starts or ends.
        have = f"{len(usable)} of {len(able)} such can be used"
        return Fit(False, True, False, f"{needs}; {have}{left_out}")
    if len(ready_nodes(need, nodes, barred)) < least:
        free = sorted((n.free.get(need.resource, 0) for n in usable), reverse=True)
        listed = ", ".join(f"{f:g}" for f in free[:8])
        return Fit(False, True, True, f"{needs}; free now: {listed} {unit}{left_out}")
    return Fit(True, True, True)


def left_out_words(nodes: Sequence[NodeCapacity], barred: Mapping[str, Barred]) -> str:
    """``left out: 10.0.0.3 (replicas differed), and 2 more``."""
    told = ", ".join(f"{told_node(n)} ({barred[n.node_id].reason.rstrip('.')})" for n in nodes[:2])
    more = f", and {len(nodes) - 2} more" if len(nodes) > 2 else ""
    return f"left out: {told}{more}"


def told_node(node: NodeCapacity | NodeSlot) -> str:
    """A node as a person knows it: address, and the beginning of Ray's id."""
    address = node.node_ip if isinstance(node, NodeSlot) else node.address
    return f"{address} ({node.node_id[:8]})" if address else node.node_id[:8]


def ready_nodes(
    need: Need,
    nodes: Sequence[NodeCapacity],
    barred: Collection[str] = (),
    without: Collection[str] = (),
) -> list[NodeCapacity]:
    """Nodes that have room for a seat now, the fittest first: no GPU that nobody asked for, then
    the least room left over, so that large nodes stay whole."""
    found = [
        n
        for n in nodes
        if n.free.get(need.resource, 0) >= need.slots
        and n.node_id not in barred
        and n.node_id not in without
    ]

    def fitness(node: NodeCapacity) -> tuple[object, ...]:
        idle_gpus = need.resource == "CPU" and node.total.get("GPU", 0) > 0
        return (idle_gpus, node.free[need.resource], *_by_address(node.address, node.node_id))

    return sorted(found, key=fitness)


def place(
    need: Need, nodes: Sequence[NodeCapacity], barred: Collection[str] = ()
) -> tuple[NodeSlot, ...] | None:
    """The seats of a new group, spares last as far as they are free; None where it doesn't fit.

    Ranks fill nodes in the order of their addresses: neighbours talk most.
    """
    ready = ready_nodes(need, nodes, barred)
    if len(ready) < need.nodes:
        return None
    chosen = sorted(ready[: need.nodes], key=lambda n: _by_address(n.address, n.node_id))
    spares = ready[need.nodes : need.nodes + need.spares]
    return tuple(
        NodeSlot(node.node_id, node.address, bundle, need.slots, bundle >= need.nodes)
        for bundle, node in enumerate([*chosen, *spares])
    )


def mend(
    group: Sequence[NodeSlot],
    need: Need,
    nodes: Sequence[NodeCapacity],
    *,
    lost: Collection[int] = (),
    barred: Mapping[str, Barred] = {},
    unwilling: Collection[str] = (),
    waits: bool = False,
    numbered: int = -1,
) -> Mended | Short:
    """The group with every rank on a node that can be used.

    ``lost``: bundles that are gone; ``barred``: nodes not to be used, by id; ``unwilling``: nodes
    that Ray didn't grant a moment ago; ``waits``: wait for another node also where the job might
    stay on a barred one; ``numbered``: the largest number of a seat that isn't free, in the group
    or not. Ranks of a lost or barred node move to a spare, else to a free node; those that are lost
    come first. Spares that can't be used are dropped, and those that are short are not taken here
    (``fill``): nothing of a restart waits for them.
    """
    bad = {seat.bundle for seat in group if seat.bundle in lost or seat.node_id in barred}
    seated = working(group)
    spares = [seat for seat in group if seat.spare and seat.bundle not in bad]
    used = {seat.node_id for seat in group}
    others = ready_nodes(need, nodes, barred, {*used, *unwilling})
    fresh = max(numbered, *(seat.bundle for seat in group), -1) + 1
    moved: dict[int, NodeSlot] = {}
    taken: list[NodeSlot] = []
    stayed: list[NodeSlot] = []
    short = 0
    # What is lost can't wait for what may stay.
    for seat in sorted((s for s in seated if s.bundle in bad), key=lambda s: s.bundle not in lost):
        if spares:
            moved[seat.bundle] = replace(spares.pop(0), spare=False)
        elif others:
            node = others.pop(0)
            moved[seat.bundle] = NodeSlot(node.node_id, node.address, fresh, need.slots)
            taken.append(moved[seat.bundle])
            fresh += 1
        elif seat.bundle not in lost and barred[seat.node_id].may_stay and not waits:
            stayed.append(seat)
        else:
            short += 1
    if short:
        return Short(short, _shortage(short, need, nodes, barred, used))
    kept_spares = tuple(spares)
    ranks = tuple(moved.get(seat.bundle, seat) for seat in seated)
    held = {seat.bundle for seat in (*ranks, *kept_spares)}
    return Mended(
        nodes=(*ranks, *kept_spares),
        taken=tuple(taken),
        dropped=tuple(seat for seat in group if seat.bundle not in held),
        moved=tuple((seat, moved[seat.bundle]) for seat in seated if seat.bundle in moved),
        stayed=tuple(stayed),
    )


def fill(
    group: Sequence[NodeSlot],
    need: Need,
    nodes: Sequence[NodeCapacity],
    barred: Collection[str] = (),
    lost: Collection[int] = (),
    *,
    numbered: int = -1,
) -> tuple[NodeSlot, ...]:
    """Spares to take so that the group has as many as were asked for, as far as nodes are free;
    those whose numbers are ``lost`` count no more. ``numbered``: the largest number of a seat that
    the group has left and that isn't free."""
    missing = need.spares - sum(seat.spare and seat.bundle not in lost for seat in group)
    others = ready_nodes(need, nodes, barred, {seat.node_id for seat in group})
    fresh = max(numbered, *(seat.bundle for seat in group), -1) + 1
    return tuple(
        NodeSlot(node.node_id, node.address, fresh + i, need.slots, True)
        for i, node in enumerate(others[: max(missing, 0)])
    )


def wish(
    waiting: Sequence[Need],
    held: Sequence[Need],
    nodes: Sequence[NodeCapacity],
    barred: Collection[str],
    *,
    short: bool = False,
) -> list[dict[str, float]]:
    """Shapes that the autoscaler is asked to make room for; none where nobody waits.

    ``short``: one that holds nodes waits for those that stand in for lost ones.

    It compares them with what the cluster has in all, so what jobs hold (each ``Need`` as it
    stands) is part of it, and so is what barred nodes have, which counts for it and not for us.
    """
    if not waiting and not short:
        return []
    shapes: list[dict[str, float]] = [
        {need.resource: float(need.slots)} for need in (*waiting, *held) for _ in range(need.nodes)
    ]
    for node in nodes:
        if node.node_id in barred:
            shapes.append({k: node.total[k] for k in ("CPU", "GPU") if node.total.get(k)})
    return sorted(shapes, key=str)


def _shortage(
    short: int,
    need: Need,
    nodes: Sequence[NodeCapacity],
    barred: Mapping[str, Barred],
    used: Collection[str],
) -> str:
    unit = "GPUs" if need.resource == "GPU" else "CPU slots"
    wanted = f"{short} other node{'s' * (short > 1)} with {need.slots} {unit}"
    free = sorted(
        (
            n.free.get(need.resource, 0)
            for n in nodes
            if n.node_id not in used and n.node_id not in barred
        ),
        reverse=True,
    )
    have = f"free now: {', '.join(f'{f:g}' for f in free[:8])} {unit}" if free else "there is none"
    out = [n for n in nodes if n.node_id in barred]
    left_out = f"; {left_out_words(out, barred)}" if out else ""
    return f"needs {wanted} in place of what it lost; {have}{left_out}"


def _by_address(address: str, node_id: str) -> tuple[bytes, str]:
    """Order of addresses as numbers; names and unknown ones by their letters."""
    try:
        return ipaddress.ip_address(address).packed, node_id
    except ValueError:
        return address.encode(), node_id
