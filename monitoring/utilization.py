"""MFU of a step: what it trained against what its devices could (``train/mfu_pct``). Pure.

What one rank's device could is told by who knows devices and models (the planner), as tokens a
second at an MFU of 100 %. Promises: where that isn't known, MFU isn't either: None, and never 0.
"""

from __future__ import annotations

import math

from monitoring.job_view import JobView, Row
from monitoring.records import StepRecord

RANK_PEAK = "rank_peak_tokens_per_s"
"""Key under which a view's ``extra``, the API and W&B's configuration have it."""


def mfu_pct(record: StepRecord, peak_tokens_per_s: float | None) -> float | None:
    """Percent; ``peak_tokens_per_s``: of all ranks."""
    if not peak_tokens_per_s or record.step_time_s <= 0:
        return None
    return 100.0 * record.tokens / record.step_time_s / peak_tokens_per_s


def peaks_of(view: JobView) -> dict[int, float]:
    """Attempt → tokens a second of its ranks at 100 %; empty where it isn't known."""
    peak = view.extra.get(RANK_PEAK)
    if not peak:
        return {}
    started = [(e.get("detail") or {}) for e in view.events if e["kind"] == "attempt_started"]
    # An attempt may have more ranks than the one before it, or fewer.
    ranks = {int(d["attempt"]): int(d["ranks"]) for d in started if "ranks" in d}
    usual = ranks_of(view.section("parallelism"))
    attempts = {record.attempt for record in view.steps}
    return {a: peak * ranks.get(a, usual) for a in attempts if ranks.get(a, usual)}


def ranks_of(degrees: Row | None) -> int:
    """Of a completed spec's ``parallelism``; 0 where it doesn't say."""
    if not degrees:
        return 0
    return math.prod(int(degrees.get(name) or 1) for name in ("pipeline", "tensor", "data"))
