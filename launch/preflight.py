"""Whether nodes can do what a job needs of them: probed on the nodes, judged here.

Probes run in workers that have done their imports (``launch.preflight_probes``), so a job waits
for no process that it wouldn't have started anyway. Promises: ``judge`` and ``blame`` are pure; a
node that fails is named with what was measured, what was needed and what to do; where a link
fails, the node is named that has no part in links that work, or else the newcomer; a probe that
doesn't come back in time is a failure of its node.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

SPEC_FILE = "spec.yaml"
"""What the controller writes into a job's folder before it takes a node: seen by a node on which
that folder is the same."""
MOST_ROUNDS = 32
"""Rounds of pairs at most: each node then meets so many others."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a job asks of each of its nodes."""

    ranks: int
    """On this node."""
    memory_bytes: int
    """Of the node's memory, or of each device's on GPU; 0: unknown."""
    disk_bytes: int
    """For the next checkpoint; 0: unknown."""
    folder: str
    """The job's directory."""
    on_gpu: bool
    transformer_engine: bool
    snapshot_bytes: int = 0
    """Of the node's memory, for its ranks' snapshots and the copies of others'; 0: unknown."""
    holders: frozenset[str] = frozenset()
    """Nodes, by Ray's ids, that hold those already."""

    def of(self, node_id: str) -> Demand:
        """What this node is asked for."""
        return replace(self, snapshot_bytes=0) if node_id in self.holders else self


@dataclass(frozen=True, slots=True)
class Limits:
    """What is taken as a fault."""

    max_clock_skew_s: float
    min_bandwidth_mbit_s: float | None


@dataclass(frozen=True, slots=True)
class Probe:
    """What was found on one node. Errors are one line, empty where there is none."""

    clock: float
    """Seconds since the epoch, on the node."""
    port: int
    """One that nobody listens on."""
    memory_bytes: int
    """Free; on GPU that of the device that has least."""
    disk_bytes: int
    devices: int
    device: str
    """``cpu``, or the device's name and its driver's version."""
    device_error: str = ""
    folder_error: str = ""
    backend_error: str = ""
    matmul_error: str = ""
    cast_error: str = ""
    seconds: float = 0.0
    host_bytes: int = 0
    """Free memory of the node itself, on GPU too."""


@dataclass(frozen=True, slots=True)
class Link:
    """A collective between two nodes, as one of them saw it."""

    one: int
    """Who tells it; places in the order of nodes."""
    other: int
    mbit_s: float
    error: str = ""


Check = Literal[
    "unknown",  # of a record that an older Octavo made
    "device",
    "matmul",
    "cast",
    # Nodes on both sides of it agree with each other no more than with the controller.
    "clock_ahead",
    "clock_behind",
    "devices",
    "engine",
    "folder",
    "disk",
    "memory",
    "snapshot_memory",
    "probe",
    "answer",
    "links",
    "meeting",
]
"""What is tried on nodes; what a ``Failure`` is of, however much was measured."""
OF_THE_MACHINE: frozenset[Check] = frozenset({"device", "matmul", "cast"})
"""Those that no job and no other machine has a part in."""
OF_LINKS: frozenset[Check] = frozenset({"links", "meeting"})
"""Those of what is between nodes, tried once every node has passed alone."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a node can't be used."""

    reason: str
    for_this_job: bool
    """Another job might run there."""
    check: Check = "unknown"

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Failure:
        """As ``dataclasses.asdict`` has written it, of this Octavo or an older one."""
        check: Any = row.get("check")
        known = check in get_args(Check)
        return cls(row["reason"], row["for_this_job"], check if known else "unknown")


@dataclass(frozen=True, slots=True)
class Answer:
    """A node's probe with the times, here, at which it was asked and answered."""

    probe: Probe
    asked: float
    answered: float


def judge(answer: Answer, demand: Demand, limits: Limits) -> Failure | None:
    """What is wrong with a node; faults of the machine before what only this job needs."""
    probe = answer.probe
    if probe.device_error:
        return Failure(f"device: {probe.device_error}", False, "device")
    if probe.matmul_error:
        return Failure(f"matmul gave a wrong result: {probe.matmul_error}", False, "matmul")
    if probe.cast_error:
        return Failure(f"FP8 cast gave a wrong result: {probe.cast_error}", False, "cast")
    skew = clock_skew_s(answer)
    if abs(skew) > limits.max_clock_skew_s:
        return Failure(
            f"its clock is {skew:+.1f} s off the controller's, and preflight.max_clock_skew_s is "
            f"{limits.max_clock_skew_s:g}: see to its NTP",
            False,
            "clock_ahead" if skew > 0 else "clock_behind",
        )
    if demand.on_gpu and probe.devices < demand.ranks:
        return Failure(f"{probe.devices} devices for {demand.ranks} ranks", True, "devices")
    if probe.backend_error:
        return Failure(f"Transformer Engine: {probe.backend_error}", True, "engine")
    if probe.folder_error:
        return Failure(f"{demand.folder} can't be written: {probe.folder_error}", True, "folder")
    if probe.disk_bytes < demand.disk_bytes:
        return Failure(
            f"{_gb(probe.disk_bytes)} free for {demand.folder}, and a checkpoint takes "
            f"{_gb(demand.disk_bytes)}: make room, or name another checkpoint.storage_path",
            True,
            "disk",
        )
    if probe.memory_bytes < demand.memory_bytes:
        return Failure(
            f"{_gb(probe.memory_bytes)} of memory free, and its ranks' state alone takes "
            f"{_gb(demand.memory_bytes)}",
            True,
            "memory",
        )
    beside = 0 if demand.on_gpu else demand.memory_bytes
    if demand.snapshot_bytes and probe.host_bytes < demand.snapshot_bytes + beside:
        return Failure(
            f"{_gb(probe.host_bytes)} of memory free, and beside its ranks' state their snapshots "
            f"take {_gb(demand.snapshot_bytes)} there (snapshots.keep, snapshots.replicas)",
            True,
            "snapshot_memory",
        )
    return None


def clock_skew_s(answer: Answer) -> float:
    """How far the node's clock is certainly off ours: it may be read anywhere on the way there and
    back.

    That is as the probe begins; what it takes from there on is no part of the way. Our own clock
    may be set meanwhile: then any time between the two is on the way.
    """
    ways_end = float(answer.answered) - answer.probe.seconds
    earliest, latest = sorted((float(answer.asked), ways_end))
    return max(0.0, answer.probe.clock - latest) + min(0.0, answer.probe.clock - earliest)


def rounds(nodes: int) -> list[list[tuple[int, int]]]:
    """Pairs of places, every node in one pair a round at most, each pair once: a tournament."""
    places: list[int | None] = [*range(nodes)]
    if nodes % 2:
        places.append(None)
    found: list[list[tuple[int, int]]] = []
    for _ in range(max(len(places) - 1, 0)):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        met = [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        found.append(met)
        places = [places[0], places[-1], *places[1:-1]]
    return [met for met in found if met][:MOST_ROUNDS]


def apart(pairs: Collection[tuple[int, int]], most: int) -> list[list[tuple[int, int]]]:
    """At most ``most`` rounds of these pairs, every place in one pair a round at most; what doesn't
    go in is left out."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(most)]
    for pair in sorted(pairs):
        for met in found:
            if all(set(pair).isdisjoint(other) for other in met):
                met.append(pair)
                break
    return [met for met in found if met]


def blame(links: Sequence[Link], newcomers: Collection[int], limits: Limits) -> dict[int, Failure]:
    """Places of the nodes that failing links are to be laid to.

    Those of which no link works first, then the one with most failing links, as long as any is
    left. Of equal ones a newcomer, for the others have worked together; then the last.
    """
    bad = _failing(links, limits)
    # Those that aren't new have worked together, though nobody has tried it now.
    work = {
        place
        for link in links
        for place in (link.one, link.other)
        if place not in newcomers or frozenset((link.one, link.other)) not in bad
    }
    found: dict[int, Failure] = {}
    while bad:
        counts: dict[int, int] = {}
        for pair in bad:
            for place in pair:
                counts[place] = counts.get(place, 0) + 1
        worst = max(counts, key=lambda p: (p not in work, counts[p], p in newcomers, p))
        told = next(why for pair, why in bad.items() if worst in pair)
        of = sum(worst in (link.one, link.other) for link in links if link.one < link.other) or 1
        many = f"{min(counts[worst], of)} of its {of} links"
        found[worst] = Failure(f"{many} failed: {told}", False, "links")
        bad = {pair: why for pair, why in bad.items() if worst not in pair}
    return found


def far_ends(
    links: Sequence[Link], named: Collection[int], limits: Limits
) -> dict[int, tuple[int, ...]]:
    """Of nodes that are ``named`` for a few of their links: the other ends of those, where nobody
    is named for them. It is such an end that is at fault where it is that of node after node,
    which one preflight can't see."""
    tried: dict[int, set[int]] = {}
    for link in links:
        tried.setdefault(link.one, set()).add(link.other)
        tried.setdefault(link.other, set()).add(link.one)
    ends: dict[int, set[int]] = {}
    for pair in _failing(links, limits):
        for place in pair:
            ends.setdefault(place, set()).update(pair - {place})
    return {
        place: tuple(sorted(ends[place]))
        for place in sorted(ends.keys() & set(named))
        if ends[place].isdisjoint(named) and 2 * len(ends[place]) <= max(2, len(tried[place]))
    }


def _failing(links: Sequence[Link], limits: Limits) -> dict[frozenset[int], str]:
    """Pairs whose link fails or is too slow, and why."""
    bad: dict[frozenset[int], str] = {}
    for link in links:
        slow = limits.min_bandwidth_mbit_s
        if link.error:
            bad[frozenset((link.one, link.other))] = link.error
        elif slow is not None and link.mbit_s < slow:
            told = f"{link.mbit_s:.0f} Mbit/s, and preflight.min_bandwidth_mbit_s is {slow:g}"
            bad.setdefault(frozenset((link.one, link.other)), told)
    return bad


@dataclass(frozen=True, slots=True)
class Verdict:
    """What preflight came to."""

    failed: Mapping[str, Failure]
    """By Ray's id of the node."""
    seconds: float
    nodes: int
    slowest_mbit_s: float | None = None
    """Of the links; None for one node."""
    device: str = ""
    far_ends: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """As of ``far_ends``, by Ray's ids."""

    def detail(self) -> dict[str, Any]:
        """Of its event."""
        return {
            "failed": {node: asdict(failure) for node, failure in self.failed.items()},
            "seconds": self.seconds,
            "nodes": self.nodes,
            "slowest_mbit_s": self.slowest_mbit_s,
            "device": self.device,
            "far_ends": {node: list(ends) for node, ends in self.far_ends.items()},
        }


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g} GB"
