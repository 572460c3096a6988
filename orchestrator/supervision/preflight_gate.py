"""Whether the nodes of an attempt may be trained on: checked once each, before the ranks start.

Promises: a node is checked when it comes to the job, for the first time or again, and when the job
gets a new supervisor; the others are checked with it where ranks didn't meet, which a link between
nodes that have passed may be to blame for; it never blocks;
what was found is an event, and a failing node is named in it, which is what the controller
quarantines it for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from launch.preflight import Demand, Limits, Verdict
from launch.rank_group import Seat
from orchestrator.events import Notice
from orchestrator.node_slot import NodeSlot
from orchestrator.planning.memory import job_memory
from orchestrator.protocol import ResumeState
from orchestrator.spec.completion import slots_per_node
from orchestrator.spec.job import JobSpec
from orchestrator.supervision.attempt import seats


class Checks(Protocol):
    """A preflight under way."""

    def verdict(self, now: float) -> Verdict | None:
        """What it came to; None while it is under way."""


Begin = Callable[[Sequence[Seat], set[str], Demand, Limits, float, float], Checks]
"""(seats, newcomers, demand, limits, now, timeout_s) → the checks, begun."""


@dataclass(frozen=True, slots=True)
class Look:
    """Where a preflight stands."""

    passed: bool
    notice: Notice | None = None
    """What it came to, when it has just ended; with ``passed`` False nodes have failed."""


class PreflightGate:
    """The preflight of one job, for one supervisor's life."""

    def __init__(self, spec: JobSpec, begin: Begin) -> None:
        self._config = spec.preflight
        self._spec = spec
        self._begin = begin
        self._passed: set[str] = set()
        self._running: Checks | None = None
        self._attempt = 0
        self._again = False

    def look_again(self) -> None:
        """Check all nodes of the next attempt, those that have passed included."""
        self._again = True

    def keep_to(self, nodes: Sequence[NodeSlot]) -> None:
        """The next attempt has these nodes, spares included. One that was away may have been for a
        reason, and may not be what it was when it comes back."""
        self._passed &= {node.node_id for node in nodes}

    def look(self, resume: ResumeState, now: float) -> Look:
        """Whether the attempt's ranks may start; what was found comes once."""
        here = seats(resume)
        newcomers = {seat.node_id for seat in here}
        if not self._again:
            newcomers -= self._passed
        if not self._config.enabled or not newcomers:
            return Look(True)
        if self._running is None or resume.attempt != self._attempt:
            self._attempt = resume.attempt
            config = self._config
            limits = Limits(config.max_clock_skew_s, config.min_bandwidth_mbit_s)
            held_by = frozenset(self._passed)
            trained = resume.step >= 0
            demand = demand_of(self._spec, resume.job_dir, held_by, trained=trained)
            self._running = self._begin(here, newcomers, demand, limits, now, config.timeout_s)
        verdict = self._running.verdict(now)
        if verdict is None:
            return Look(False)
        self._running = None
        if not verdict.failed:
            self._passed |= newcomers
            self._again = False
        addresses = {seat.node_id: seat.node_ip for seat in here}
        return Look(not verdict.failed, told(verdict, addresses))


def told(verdict: Verdict, addresses: Mapping[str, str]) -> Notice:
    """The event of a preflight."""
    detail: dict[str, Any] = verdict.detail()
    if verdict.failed:
        each = "; ".join(
            f"{addresses.get(node, '')} ({node[:8]}): {failure.reason}"
            for node, failure in verdict.failed.items()
        )
        return Notice("preflight_failed", f"Preflight failed on {each}.", detail)
    nodes = f"{verdict.nodes} node{'s' * (verdict.nodes != 1)}"
    links = ""
    if verdict.slowest_mbit_s is not None:
        links = f", slowest link {verdict.slowest_mbit_s:.0f} Mbit/s"
    message = f"Preflight passed on {nodes} in {verdict.seconds:.1f} s ({verdict.device}{links})."
    return Notice("preflight", message, detail)


def demand_of(
    spec: JobSpec, folder: str, holders: frozenset[str] = frozenset(), *, trained: bool = False
) -> Demand:
    """What a completed job asks of each of its nodes, as far as its spec tells: a factory's model
    has a size that only its ranks know.

    Of memory only what is certain: weights, masters, moments and gradients. On CPU the mean of its
    nodes, where stages differ. ``holders``: nodes that the job had before, which hold copies of its
    snapshots. Any other one joins them, and needs room for them too, or all ranks would refuse to
    start; without holders, on the job's first nodes, they do so with what to change. ``trained``:
    there are steps to lose; a full disk is told, then, and the job goes on from memory, as it does
    while it trains.
    """
    degrees, on_gpu = spec.parallelism, spec.gpus_per_node is not None
    memory, disk, snapshots = 0, 0, 0
    if spec.model.factory is None:
        foretold = job_memory(spec)
        states = [rank.state for rank in foretold.stages]
        of_stage = degrees.tensor * (degrees.data or 1)
        memory = max(states) if on_gpu else sum(states) * of_stage // spec.num_nodes
        disk = 0 if trained else foretold.checkpoint
        snapshots = foretold.host_least if holders else 0
    return Demand(
        ranks=slots_per_node(spec),
        memory_bytes=memory,
        disk_bytes=disk,
        folder=folder,
        on_gpu=on_gpu,
        transformer_engine=spec.fp8.backend == "transformer_engine" and spec.precision == "fp8",
        snapshot_bytes=snapshots,
        holders=holders,
    )
