"""Ranks that are slow, from the time that each spends outside of communication. Pure.

A step takes as long on every rank, so its time names nobody. Each rank's own time is compared
with its peers': the ranks of its pipeline stage, which do the same work. A stage that has one rank
is compared with itself: its time over what it was at the attempt's start, against the same ratio
of the others. Promises: a rank is told once, until it is as fast as the others again; one slow
step, or some, tells nothing; what is slow and costs the step nothing is left alone.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launch.commands import RankReport
from launch.config import RunConfig
from monitoring.config import DetectionConfig
from monitoring.records import Incident
from orchestrator.node_slot import NodeSlot
from orchestrator.supervision.attempt import ranks_told

PERSISTENCE = 0.8
"""Part of the last steps in which a rank must have been slow."""
LEAST_SHARE = 0.1
"""Of a step's time, that a rank must cost it to be worth telling."""
MOST_OPEN = 64
"""Steps of which some ranks' reports are missing."""


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
        self._open: dict[tuple[int, int], dict[int, RankReport]] = {}
        self._starts: list[list[float]] = [[] for _ in range(world_size)]
        self._recent: list[deque[tuple[float, float, float, bool]]] = [
            deque(maxlen=limits.slow_rank_steps) for _ in range(world_size)
        ]
        """Ratio, own seconds, reference, and whether it was slow, of the last steps."""
        self._slow: dict[int, Slow] = {}

    def add(self, report: RankReport) -> tuple[Slow, ...]:
        """All ranks that are slow, when the last report of a step shows another one; else ()."""
        key = (report.timeline, report.step)
        reports = self._open.setdefault(key, {})
        reports[report.rank] = report
        while len(self._open) > MOST_OPEN:
            del self._open[min(self._open)]
        if len(reports) < self._world_size:
            return ()
        self._open = {k: v for k, v in self._open.items() if k > key}
        self._compare([reports[rank] for rank in range(self._world_size)])
        return self._news()

    def _compare(self, reports: Sequence[RankReport]) -> None:
        step_s = max(report.step_time_s for report in reports)
        seconds = [report.compute_s for report in reports]
        references = self._references(seconds)
        for rank, (own, reference) in enumerate(zip(seconds, references, strict=True)):
            if reference is None or reference <= 0:
                continue
            costs = own - reference > LEAST_SHARE * step_s
            slow = costs and own > self._limits.slow_rank * reference
            self._recent[rank].append((own / reference, own, reference, slow))

    def _references(self, seconds: Sequence[float]) -> list[float | None]:
        """What each rank's time is compared with; None while there is nothing yet."""
        if self._of_stage > 1:
            # The lower median: of two, the faster one shows how fast it can be.
            stages = [
                statistics.median_low(seconds[first : first + self._of_stage])
                for first in range(0, self._world_size, self._of_stage)
            ]
            return [stages[rank // self._of_stage] for rank in range(self._world_size)]
        needed = self._limits.slow_rank_steps
        for start, own in zip(self._starts, seconds, strict=True):
            if len(start) < needed:
                start.append(own)
        if len(self._starts[0]) < needed or self._world_size == 1:
            return [None] * self._world_size
        usual = [statistics.median(start) for start in self._starts]
        grown = [own / max(was, 1e-9) for own, was in zip(seconds, usual, strict=True)]
        return [
            usual[rank] * statistics.median_low(grown[:rank] + grown[rank + 1 :])
            for rank in range(self._world_size)
        ]

    def _news(self) -> tuple[Slow, ...]:
        news = False
        for rank, recent in enumerate(self._recent):
            steps = sum(slow for *_, slow in recent)
            if rank in self._slow and steps < (1 - PERSISTENCE) * len(recent):
                del self._slow[rank]
            full = len(recent) == recent.maxlen
            if rank not in self._slow and full and steps >= PERSISTENCE * len(recent):
                ratio, own, reference = (
                    statistics.median(row[i] for row in recent) for i in range(3)
                )
                self._slow[rank] = Slow(rank, ratio, own, reference, steps, len(recent))
                news = True
        return tuple(self._slow[rank] for rank in sorted(self._slow)) if news else ()


def incident_of(
    slow: Sequence[Slow], nodes: Sequence[NodeSlot], report: RankReport, now: float
) -> Incident:
    """The incident of the ranks that are slow as of ``report``."""
    homes = _homes(nodes)
    worst = max(slow, key=lambda found: found.ratio)
    ranks = [found.rank for found in slow]
    on = Counter(homes[rank].node_ip for rank in ranks if rank in homes)
    where = ", ".join(sorted(on))
    return Incident(
        kind="slow_rank",
        detector="supervisor",
        attempt=report.attempt,
        timeline=report.timeline,
        step=report.step,
        onset_step=max(0, report.step + 1 - worst.of),
        time=now,
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
    homes = _homes(nodes)
    found = Counter(homes[one.rank].node_id for one in slow if one.rank in homes)
    slots: Mapping[str, int] = {seat.node_id: seat.slots for seat in homes.values()}
    mostly = tuple(node for node, count in found.items() if 2 * count > slots[node])
    return mostly if len(mostly) < len(slots) else ()


def _homes(nodes: Sequence[NodeSlot]) -> dict[int, NodeSlot]:
    seats = [seat for seat in nodes if not seat.spare for _ in range(seat.slots)]
    return dict(enumerate(seats))
