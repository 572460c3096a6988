"""Ranks that are slow, from the time that each spends outside of communication. Pure.

A step takes as long on every rank, so its time names nobody. Each rank's own time is compared
with its peers': the ranks of its pipeline stage, which do the same work. A stage that has one rank
is compared with itself: its time over what it was at the attempt's start, against the same ratio
of the others. Promises: a rank is told once, until it is as fast as the others again; one slow
step, or some, tells nothing; what is slow and costs the step nothing is left alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from launch.config import RunConfig
from launch.step_part import StepPart
from monitoring.config import DetectionConfig
from monitoring.records import Incident
from orchestrator.node_slot import NodeSlot, homes
from orchestrator.supervision.attempt import ranks_told

PERSISTENCE = 0.8
"""Part of the last steps in which a rank must have been slow."""
LEAST_SHARE = 0.1
"""Of a step's time, that a rank must cost it to be worth telling."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Slow:
    """A rank that is slow."""

    rank: int
    ratio: float
    """Median of its time over its peers'."""
    seconds: float
    """Median of its own time a step."""
    reference: float
    """Median of what it was compared with, in seconds."""
    steps: int
    """In how many of the last ``of`` steps."""
    of: int


class Stragglers:
    """Of one attempt."""

    def __init__(self, run: RunConfig, limits: DetectionConfig, world_size: int) -> None:
        degrees = run.parallelism
        self._of_stage = max(1, world_size // degrees.pipeline)
        self._limits = limits
        self._world_size = world_size
        window = limits.slow_rank_steps
        self._starts: list[Floats] = []
        """Each rank's seconds [ranks], of the attempt's first steps."""
        self._usual: Floats | None = None
        """Their medians."""
        # Of each rank's last steps [steps, ranks], written round and round.
        self._ratio = np.zeros((window, world_size))
        self._own = np.zeros((window, world_size))
        self._reference = np.zeros((window, world_size))
        self._was_slow = np.zeros((window, world_size), np.bool_)
        self._seen = np.zeros(world_size, np.int64)
        """Steps written of each."""
        self._slow: dict[int, Slow] = {}

    def add(self, step: StepPart) -> tuple[Slow, ...]:
        """All ranks that are slow, when this step, with all ranks in it, shows another one; else
        ()."""
        own = step.compute_s
        if self._world_size == 1:
            return ()
        reference = self._references(own)
        if reference is None:
            return ()
        at = np.flatnonzero(reference > 0)
        row = self._seen[at] % len(self._ratio)
        costs = own - reference > LEAST_SHARE * step.step_time_s
        slow = costs & (own > self._limits.slow_rank * reference)
        with np.errstate(divide="ignore", invalid="ignore"):
            self._ratio[row, at] = (own / reference)[at]
        self._own[row, at], self._reference[row, at] = own[at], reference[at]
        self._was_slow[row, at] = slow[at]
        self._seen[at] += 1
        return self._news()

    def _references(self, seconds: Floats) -> Floats | None:
        """What each rank's time is compared with [ranks]; None while there is nothing yet."""
        if self._of_stage > 1:
            # The lower median: of two, the faster one shows how fast it can be.
            stages = seconds.reshape(-1, self._of_stage)
            middle = (self._of_stage - 1) // 2
            return np.repeat(np.partition(stages, middle, axis=1)[:, middle], self._of_stage)
        if self._usual is None:
            self._starts.append(seconds)
            if len(self._starts) < self._limits.slow_rank_steps:
                return None
            self._usual = np.median(self._starts, axis=0)
            self._starts = []
        grown = seconds / np.maximum(self._usual, 1e-9)
        # The lower median of the others: one further where the rank itself is below it.
        order = np.argsort(grown, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        middle = (self._world_size - 2) // 2
        others = np.where(place <= middle, grown[order[middle + 1]], grown[order[middle]])
        return self._usual * others

    def _news(self) -> tuple[Slow, ...]:
        window = len(self._ratio)
        held = np.minimum(self._seen, window)
        steps = self._was_slow.sum(axis=0)
        for rank in [r for r in self._slow if steps[r] < (1 - PERSISTENCE) * held[r]]:
            del self._slow[rank]
        often = (held == window) & (steps >= PERSISTENCE * held)
        new = [rank for rank in np.flatnonzero(often).tolist() if rank not in self._slow]
        for rank in new:
            ratio, own, reference = (
                float(np.median(of[:, rank])) for of in (self._ratio, self._own, self._reference)
            )
            self._slow[rank] = Slow(rank, ratio, own, reference, int(steps[rank]), window)
        return tuple(self._slow[rank] for rank in sorted(self._slow)) if new else ()


def incident_of(
    slow: Sequence[Slow], nodes: Sequence[NodeSlot], step: StepPart, now: float
) -> Incident:
    """The incident of the ranks that are slow as of ``step``."""
    home = homes(nodes)
    worst = max(slow, key=lambda found: found.ratio)
    ranks = [found.rank for found in slow]
    on = Counter(home[rank].node_ip for rank in ranks if rank in home)
    where = ", ".join(sorted(on))
    return Incident(
        kind="slow_rank",
        detector="supervisor",
        attempt=step.attempt,
        timeline=step.timeline,
        step=step.step,
        onset_step=max(0, step.step + 1 - worst.of),
        time=float(now),
        message=(
            f"{ranks_told(ranks).capitalize()} on {where} "
            f"{'is' if len(ranks) == 1 else 'are'} slow: {worst.seconds:.3g} s a step outside of "
            f"communication, {worst.ratio:.1f} times the {worst.reference:.3g} s of its peers, in "
            f"{worst.steps} of the last {worst.of} steps."
        ),
        evidence={
            "ratio": worst.ratio,
            "seconds": worst.seconds,
            "peers_seconds": worst.reference,
            "steps": float(worst.steps),
        },
        ranks=tuple(ranks),
    )


def slow_nodes(slow: Sequence[Slow], nodes: Sequence[NodeSlot]) -> tuple[str, ...]:
    """Ids of nodes most of whose ranks are slow, where not all nodes are."""
    home = homes(nodes)
    found = Counter(home[one.rank].node_id for one in slow if one.rank in home)
    slots: Mapping[str, int] = {seat.node_id: seat.slots for seat in home.values()}
    mostly = tuple(node for node, count in found.items() if 2 * count > slots[node])
    return mostly if len(mostly) < len(slots) else ()
