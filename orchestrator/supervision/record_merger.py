"""Reports of all ranks of one step → one StepRecord. Pure: no clock, no I/O.

Promises: a record comes out when every rank has reported its step, in order of steps;
reports of another attempt or timeline are refused; what is held is bounded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from launch.commands import RankReport
from monitoring.amax import merge
from monitoring.records import StepRecord
from monitoring.replicas import RankSums, compare

logger = logging.getLogger(__name__)

MOST_PARAMETERS = 64
"""Names of non-finite parameters kept in a record."""


class RecordMerger:
    """The steps of one attempt that some rank has reported and others not yet."""

    def __init__(self, attempt: int, timeline: int, world_size: int, *, limit: int = 1024) -> None:
        """``limit``: steps held at most; beyond it the oldest are given up."""
        self.attempt = attempt
        self.timeline = timeline
        self.world_size = world_size
        self._limit = limit
        self._steps: dict[int, dict[int, RankReport]] = {}

    def begin(self, timeline: int) -> None:
        """From now on only reports of ``timeline`` count."""
        self.timeline = timeline
        self._steps.clear()

    def add(self, report: RankReport) -> StepRecord | None:
        """The step's record if this report was the last one missing."""
        if (report.attempt, report.timeline) != (self.attempt, self.timeline):
            return None
        reports = self._steps.setdefault(report.step, {})
        reports[report.rank] = report
        if len(reports) == self.world_size:
            del self._steps[report.step]
            return merge_reports([reports[rank] for rank in sorted(reports)])
        if len(self._steps) > self._limit:
            given_up = min(self._steps)
            logger.error("step %d was reported by some ranks only; given up", given_up)
            del self._steps[given_up]
        return None

    def waiting_for(self) -> tuple[int, ...]:
        """Ranks that have not reported the oldest step held; () when nothing is held."""
        if not self._steps:
            return ()
        reported = self._steps[min(self._steps)]
        return tuple(rank for rank in range(self.world_size) if rank not in reported)


def merge_reports(reports: Sequence[RankReport]) -> StepRecord:
    """One record of all ranks' reports of one step, in order of ranks.

    Loss and gradient norm are global already; the last rank's are taken, because it is on
    the last pipeline stage, where the loss is made. A step's time and its exchange's rounding
    error are the worst rank's, the rest of the exchange the mean a rank.
    """
    first, last = reports[0], reports[-1]
    batches = {report.batch for report in reports}
    if len(batches) > 1:
        logger.error("step %d: ranks used different batches %s", first.step, sorted(batches))
    nonfinite = [r for r in reports if r.nonfinite_loss or r.nonfinite_parameters]
    return StepRecord(
        attempt=first.attempt,
        timeline=first.timeline,
        step=first.step,
        time=max(report.time for report in reports),
        batch=first.batch,
        loss=last.loss,
        grad_norm=last.grad_norm,
        lr=first.lr,
        tokens=max(report.tokens for report in reports),
        step_time_s=max(report.step_time_s for report in reports),
        skipped=any(report.skipped for report in reports),
        nonfinite_ranks=tuple(report.rank for report in nonfinite),
        nonfinite_parameters=_union(r.nonfinite_parameters for r in nonfinite)[:MOST_PARAMETERS],
        comm=_exchanged([report.comm for report in reports]),
        tensors=merge((report.stats_names, report.stats) for report in reports),
        high_precision_layers=_union(report.high_precision_layers for report in reports),
        drills=tuple(sorted({drill for report in reports for drill in report.drills})),
        replicas=compare(
            RankSums(report.rank, report.replicas, report.checksum_names, report.checksums)
            for report in reports
        ),
    )


def _union(names: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """All names once, in order of first appearance."""
    return tuple(dict.fromkeys(name for some in names for name in some))


def _exchanged(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """``StepRecord.comm`` of the ranks that measured it."""
    keys = _union(tuple(row) for row in rows)
    values = {key: [row[key] for row in rows if key in row] for key in keys}
    return {
        key: max(found) if key == "relative_error" else sum(found) / len(found)
        for key, found in values.items()
    }
