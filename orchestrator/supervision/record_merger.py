"""What ranks reported of one step → one StepRecord. Pure: no clock, no I/O.

Promises: a record comes out when every rank is in, in order of steps, whether each came alone or
some of them already merged; reports of another attempt or timeline are refused, and so is what was
in already; what is held is bounded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from launch.commands import RankReport
from launch.step_part import (
    MOST_PARAMETERS,
    Exchanged,
    Names,
    ReplicaSums,
    StepPart,
    in_order,
    merged,
    part_of,
    worst,
)
from monitoring.records import ReplicaComparison, StepRecord
from monitoring.replicas import RankSums, compare
from monitoring.tensor_sums import columns_of

logger = logging.getLogger(__name__)


class _Open:
    """A step that some ranks have reported."""

    def __init__(self, world_size: int) -> None:
        self._reports: dict[int, RankReport] = {}
        """Of ranks that came alone."""
        self._parts: list[StepPart] = []
        self._here = bytearray(world_size)
        self._left = world_size

    def add(self, sent: RankReport | StepPart) -> bool:
        """Take it in, unless its ranks are here; whether all ranks are."""
        if isinstance(sent, StepPart):
            return self._add_part(sent)
        if not self._here[sent.rank]:
            self._here[sent.rank] = 1
            self._left -= 1
            self._reports[sent.rank] = sent
        return not self._left

    def _add_part(self, part: StepPart) -> bool:
        ranks = part.ranks.tolist()
        known = sum(self._here[rank] for rank in ranks)
        if known == len(ranks):
            return False
        if known:
            # Some of its ranks came by another way before: the part has them too.
            inside = [p for p in self._parts if np.isin(p.ranks, part.ranks).any()]
            if not all(np.isin(p.ranks, part.ranks).all() for p in inside):
                logger.error("step %d: parts of the ranks overlap; the later is refused", part.step)
                return False
            self._parts = [p for p in self._parts if not any(p is one for one in inside)]
            for rank in ranks:
                self._reports.pop(rank, None)
        self._parts.append(part)
        for rank in ranks:
            self._here[rank] = 1
        self._left -= len(ranks) - known
        return not self._left

    def whole(self) -> StepPart:
        """All that came."""
        alone = [part_of(*self._reports.values())] if self._reports else []
        return merged([*alone, *self._parts])

    def missing(self) -> tuple[int, ...]:
        """Ranks that have not come."""
        return tuple(rank for rank, here in enumerate(self._here) if not here)


class RecordMerger:
    """The steps of one attempt that some rank has reported and others not yet."""

    def __init__(self, attempt: int, timeline: int, world_size: int, *, limit: int = 1024) -> None:
        """``limit``: steps held at most; beyond it the oldest are given up."""
        self.attempt = attempt
        self.timeline = timeline
        self.world_size = world_size
        self._limit = limit
        self._steps: dict[int, _Open] = {}
        self._done = -1
        """Newest step that was complete on this timeline."""

    def begin(self, timeline: int) -> None:
        """From now on only reports of ``timeline`` count."""
        self.timeline = timeline
        self._steps.clear()
        self._done = -1

    def add(self, report: RankReport | StepPart) -> StepPart | None:
        """All ranks of the step, if those of this report were the last ones missing."""
        place = (report.attempt, report.timeline)
        if place != (self.attempt, self.timeline) or report.step <= self._done:
            return None
        step = self._steps.get(report.step)
        if step is None:
            step = self._steps[report.step] = _Open(self.world_size)
        if step.add(report):
            del self._steps[report.step]
            self._done = report.step
            return step.whole()
        if len(self._steps) > self._limit:
            given_up = min(self._steps)
            logger.error("step %d was reported by some ranks only; given up", given_up)
            del self._steps[given_up]
        return None

    def waiting_for(self) -> tuple[int, ...]:
        """Ranks that have not reported the oldest step held; () when nothing is held."""
        if not self._steps:
            return ()
        return self._steps[min(self._steps)].missing()


def merge_reports(reports: Sequence[RankReport]) -> StepRecord:
    """One record of all ranks' reports of one step."""
    return record_of(part_of(*reports))


def record_of(part: StepPart) -> StepRecord:
    """The record of a step that all ranks are in.

    Loss and gradient norm are global already; the last rank's are taken. A step's time and its
    exchange's rounding error are the worst rank's, the rest of the exchange the mean a rank.
    """
    if len(part.batches) > 1:
        logger.error("step %d: ranks used different batches %s", part.step, sorted(part.batches))
    return StepRecord(
        attempt=part.attempt,
        timeline=part.timeline,
        step=part.step,
        time=part.time,
        batch=part.batch,
        loss=part.loss,
        grad_norm=part.grad_norm,
        lr=part.lr,
        tokens=part.tokens,
        step_time_s=part.step_time_s,
        skipped=part.skipped,
        nonfinite_ranks=part.nonfinite_ranks,
        nonfinite_parameters=in_order(part.nonfinite_parameters)[:MOST_PARAMETERS],
        comm=_exchanged(part.comm),
        tensors=columns_of(part.tensors),
        high_precision_layers=in_order(part.high_precision_layers),
        drills=tuple(sorted(part.drills)),
        replicas=_compared(part.replicas),
    )


def _exchanged(groups: Mapping[Names, Exchanged]) -> dict[str, float]:
    """``StepRecord.comm`` of the ranks that measured it."""
    keys = in_order({names: one.first_rank for names, one in groups.items()})
    found: dict[str, float] = {}
    for key in keys:
        mine = [(one, names.index(key)) for names, one in groups.items() if key in names]
        if key == "relative_error":
            found[key] = worst(one.worst[i] for one, i in mine)
            continue
        total = mine[0][0].sums[mine[0][1]]
        for one, i in mine[1:]:
            total = total.add(one.sums[i])
        found[key] = total.value / sum(one.count for one, _ in mine)
    return found


def _compared(replicas: ReplicaSums) -> ReplicaComparison | None:
    reports = [
        RankSums(rank, group, names, sums)
        for group, said in replicas.items()
        for (names, sums), ranks in said.items()
        for rank in ranks
    ]
    return compare(sorted(reports, key=lambda report: report.rank))
