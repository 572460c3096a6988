"""How often to take snapshots and checkpoints: what each interval costs, and which costs least.

Effective training time (ETTR) is the share of the wall time that went into steps that were kept,
at the speed that they have without copies. For a job whose faults all start again from its last
copy it is known in closed form (Daly, "A higher order estimate of the optimum checkpoint interval",
2006, whose first order is Young's square root):

    ETTR = k·t / (M · e^(R/M) · (e^((k·t + d)/M) − 1))

for a copy of ``d`` seconds each ``k`` steps of ``t`` seconds, a fault each ``M`` and ``R`` until
training goes on. Two terms are added: a copy counts only once it is where the fault can't reach it,
and rare faults take memory along, which a checkpoint answers. ``tests/benchmarks/bench_goodput.py``
simulates the same with the recovery policy itself; a unit test holds the two together.

Pure. Promises: the best interval is the one that is best of all whole numbers of steps from the
first that the copies can keep up with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from orchestrator.planning.estimate import Estimate
from orchestrator.spec.completion import slots_per_node
from orchestrator.spec.job import JobSpec

PUBLISHED_MTTF_S = ((128, 7.9 * 3600.0), (2048, 1.8 * 3600.0))
"""Nodes of 8 GPUs → seconds between faults of a job on them: 7.9 h at 1,024 GPUs, 1.8 h at 16,384
(Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research Clusters",
arXiv 2410.21680). Its 47.7 days at 8 GPUs are what 128 nodes' come to at one."""
COPY_RATE_GPU = 20e9
"""Bytes a second from a device to pinned memory: a third of PCIe 5.0 ×16. Not tried."""
COPY_RATE_CPU = 4e9
"""The same within a CPU's memory, one thread (``tests/benchmarks/bench_snapshots.py``)."""
DISK_RATE = 1e9
"""Bytes a second of shared storage for each node: Llama 3's 2 TB/s for 2,000 nodes
(arXiv 2407.21783, section 3.3.1)."""
WRITING_SLOWS = 0.02
"""Share of a step that the writing of a checkpoint beside it costs. An assumption."""
NETWORK_SHARE = 0.2
"""Of the network's rate, what copies to partners may take beside the gradients. An assumption."""
MOST_MEANS = 500.0
"""Times between faults that a stretch of work may take for the formula to hold in a float."""
MOST_STEPS = 20_000
"""Longest interval that is looked at."""


@dataclass(frozen=True, slots=True)
class RecoveryTimes:
    """Seconds from a fault to the next new step, without the steps that are done again; defaults
    are README's, measured on three hosts."""

    rank_s: float = 1.71
    """A process is lost, its node is not: a standby worker, the node's own copy."""
    node_s: float = 4.06
    """A node is lost: a spare, the partner's copy."""
    start_s: float = 13.5
    """A start from nothing: placement, imports, engine; state from disk comes on top."""
    hang_s: float = 60.0
    """Until a silence counts as a hang: ``recovery.step_timeout_s``, 60 s at least."""


@dataclass(frozen=True, slots=True)
class FaultShares:
    """Of all faults, what each takes along; they add up to 1.

    Defaults: Llama 3 405B's 419 unexpected interruptions (``tests/benchmarks/fault_trace.py``).
    """

    process: float = 0.148
    """A process, or what it held; its node goes on."""
    node: float = 0.737
    """A node with all that its memory held."""
    hang: float = 0.10
    """Nothing but the time until it is noticed."""
    both: float = 0.015
    """A node and its partner, so that only the disk is left: one node fault in fifty. An
    assumption; racks and switches fail whole."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What the intervals are chosen for. Seconds."""

    step_s: float
    mttf_s: float
    snapshot_s: float
    """That a snapshot stops training for."""
    ship_s: float
    """From then until a partner has it."""
    checkpoint_s: float
    """That writing a checkpoint costs training in all, beside the copy in memory."""
    write_s: float
    """From then until it is on disk."""
    load_s: float
    """State from disk, at a start."""
    times: RecoveryTimes = field(default_factory=RecoveryTimes)
    shares: FaultShares = field(default_factory=FaultShares)
    partners: bool = True
    """Whether another node holds copies."""

    @property
    def disk_share(self) -> float:
        """Of all faults, those that only a checkpoint answers."""
        return self.shares.both + (0.0 if self.partners else self.shares.node)

    @property
    def memory_s(self) -> float:
        """Mean time from a fault to the next step where memory answers it."""
        times, shares = self.times, self.shares
        nodes = shares.node if self.partners else 0.0
        total = shares.process + shares.hang + nodes
        own = shares.process * times.rank_s + shares.hang * (times.hang_s + times.rank_s)
        return (own + nodes * times.node_s) / total if total else 0.0

    @property
    def disk_s(self) -> float:
        """The same where the disk does."""
        return self.times.start_s + self.load_s


@dataclass(frozen=True, slots=True)
class Advice:
    """The intervals that cost least, beside those of a spec; steps."""

    setting: Setting
    snapshots: int
    checkpoints: int
    ettr: float
    now_snapshots: int
    now_checkpoints: int
    """0: never."""
    now_ettr: float

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "disk_share": self.setting.disk_share}


def published_mttf_s(nodes: int) -> float:
    """Seconds between faults of a job on ``nodes``: by the published figures, in proportion to the
    nodes outside of them and along a straight line on logarithmic paper between."""
    (few, long), (many, short) = PUBLISHED_MTTF_S
    if nodes <= few:
        return long * few / max(nodes, 1)
    if nodes >= many:
        return short * many / nodes
    along = math.log(nodes / few) / math.log(many / few)
    return long * math.exp(along * math.log(short / long))


def ettr(setting: Setting, snapshots: int, checkpoints: int) -> float:
    """Share of the wall time for a snapshot each ``snapshots`` steps and a checkpoint each
    ``checkpoints``; 0: none of it."""
    return max(0.0, _worth(setting, snapshots, checkpoints))


def _worth(setting: Setting, snapshots: int, checkpoints: int) -> float:
    """``ettr``, and below 0 the worse the interval, so that a search finds its way."""
    disk = setting.disk_share
    if not snapshots:
        # A checkpoint is written from a copy in memory, too.
        stall = setting.snapshot_s + setting.checkpoint_s
        return _daly(setting, checkpoints, stall, setting.disk_s, setting.write_s)
    stall = setting.snapshot_s
    if checkpoints:
        stall += setting.checkpoint_s * snapshots / checkpoints
    found = _daly(setting, snapshots, stall, setting.memory_s, setting.ship_s)
    redone = checkpoints * setting.step_s / 2 + setting.write_s if checkpoints else math.inf
    more = redone + setting.disk_s - (snapshots * setting.step_s / 2 + setting.memory_s)
    if disk and math.isinf(more):
        return -1.0
    return found - (disk * more / setting.mttf_s if disk else 0.0)


def _daly(setting: Setting, every: int, stall_s: float, restart_s: float, lag_s: float) -> float:
    """The formula of the module; ``lag_s``: until a copy counts."""
    if every <= 0:
        return -1.0
    work, mean = every * setting.step_s, setting.mttf_s
    if work + stall_s > MOST_MEANS * mean:
        return -(work + stall_s) / mean
    wall = mean * math.exp(min(restart_s / mean, 500.0)) * math.expm1((work + stall_s) / mean)
    return work / wall - lag_s / mean


def best_snapshots(setting: Setting, checkpoints: int) -> int:
    """Steps between snapshots that give the largest ETTR: no more than between checkpoints, and
    than are done between faults."""
    least = max(1, math.ceil(setting.ship_s / setting.step_s))
    most = min(checkpoints or MOST_STEPS, int(setting.mttf_s / setting.step_s), MOST_STEPS)
    return _best(least, most, lambda every: _worth(setting, every, checkpoints))


def best_checkpoints(setting: Setting, snapshots: int) -> int:
    """Steps between checkpoints that give the largest ETTR: at each, the last is on disk."""
    least = max(1, math.ceil(setting.write_s / setting.step_s))
    if snapshots:
        # A step that has a snapshot anyway.
        least = snapshots * math.ceil(least / snapshots)
    stride = snapshots or 1
    return _best(least, MOST_STEPS, lambda every: _worth(setting, snapshots, every), stride)


def _best(least: int, most: int, value: Callable[[int], float], stride: int = 1) -> int:
    """Of ``least``, ``least + stride``, … ``most`` the one of the largest value, which has one
    peak."""
    low, high = 0, max(0, (most - least) // stride)
    while high - low > 2:
        third = (high - low) // 3
        a, b = low + third, high - third
        if value(least + a * stride) < value(least + b * stride):
            low = a + 1
        else:
            high = b
    return max((least + i * stride for i in range(low, high + 1)), key=value)


def advice(setting: Setting, snapshots: int, checkpoints: int) -> Advice:
    """The best intervals, beside those of a spec."""
    now = ettr(setting, snapshots, checkpoints)
    every = best_snapshots(setting, checkpoints)
    seldom = best_checkpoints(setting, every)
    # The one hardly moves the other: a second look is enough.
    every = best_snapshots(setting, seldom)
    seldom = best_checkpoints(setting, every)
    best = ettr(setting, every, seldom)
    return Advice(setting, every, seldom, best, snapshots, checkpoints, now)


def setting_of(spec: JobSpec, found: Estimate, times: RecoveryTimes | None = None) -> Setting:
    """What a plan knows of a job, for the faults that are published of as many nodes."""
    on_gpu = found.hardware.device.gpu
    largest = max(found.memory.snapshots)
    copied = largest / (COPY_RATE_GPU if on_gpu else COPY_RATE_CPU)
    network = found.hardware.network
    ranks = slots_per_node(spec)
    share = NETWORK_SHARE * network.rate / (ranks if network.shared else 1)
    written = found.memory.checkpoint / spec.num_nodes / DISK_RATE
    timeout = spec.recovery.step_timeout_s
    times = times or RecoveryTimes()
    if timeout is None:
        timeout = max(times.hang_s, 20 * found.step.total)
    replicas = spec.snapshots.replicas or 0
    return Setting(
        step_s=found.step.total,
        mttf_s=published_mttf_s(spec.num_nodes),
        snapshot_s=copied,
        ship_s=largest / share if replicas else copied,
        checkpoint_s=WRITING_SLOWS * written,
        write_s=written,
        load_s=written,
        times=replace(times, hang_s=timeout),
        partners=replicas > 0 and spec.num_nodes > 1,
    )
