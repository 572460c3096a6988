"""Names of the metrics we publish, in one place, and their values for one step.

``train/step`` is the axis of all others: W&B's own step counts log calls and starts anew
with each process. Names are stable; a dashboard may rely on them.
"""

from __future__ import annotations

import math

import numpy as np

from monitoring.amax import are_of_layers, headrooms, worst_by_headroom
from monitoring.exchange import exchange_numbers
from monitoring.records import StepRecord
from monitoring.summary import Tally
from monitoring.tensor_stats import TensorColumns
from monitoring.utilization import mfu_pct

STEP = "train/step"
LOSS = "train/loss"
GRAD_NORM = "train/grad_norm"
LR = "train/lr"
TOKENS_PER_SEC = "train/tokens_per_sec"
STEP_TIME_S = "train/step_time_s"
MFU_PCT = "train/mfu_pct"
"""Only where the planner knows the model's size and ``resources.device`` names what it runs on."""
SKIPPED = "train/skipped"

COMM = "comm/"
"""Before the names of ``monitoring.exchange``, as ``comm/bytes``."""

WORST_HEADROOM = "fp8/worst/headroom_octaves"
WORST_RISE = "fp8/worst/amax_rise_octaves"
"""How far above its usual the amax is that is furthest: what comes before trouble, where headroom
under a scale that follows amax is next to none in every healthy step."""
WORST_SATURATED = "fp8/worst/overflows_pct"
WORST_UNDERFLOW = "fp8/worst/underflows_pct"
WORST_SQNR = "fp8/worst/sqnr_db"

HEAT_MAP = "fp8/all/heat_map"
"""Layers × steps, as a page."""
HISTOGRAMS = {
    "fp8/all/headroom_octaves": (-4.0, 12.0),
    "fp8/all/log2_amax": (-32.0, 16.0),
    "fp8/all/log10_underflows_pct": (-4.0, 2.0),
}
"""Distributions over all tensors of a step, each with the range of its bins."""
BINS = 32

ATTEMPT = "recovery/attempt"
TIMELINE = "recovery/timeline"
ROLLBACKS = "recovery/rollbacks"
STEPS_LOST = "recovery/steps_lost"
TIME_TO_RECOVER_S = "recovery/time_to_recover_s"
HIGH_PRECISION_LAYERS = "recovery/high_precision_layers"
INCIDENTS_TABLE = "recovery/incidents"
ACTIONS_TABLE = "recovery/actions"
SKIP_LEDGER_TABLE = "recovery/skip_ledger"

ETTR = "goodput/ettr"

PREFIXES = ("train/*", "fp8/*", "comm/*", "recovery/*", "goodput/*")
"""Glob of each family, all drawn over ``train/step``."""


def tensor_metric(name: str, what: str) -> str:
    """``fp8/{layer}/{tensor}/{what}`` of a tensor named ``"{layer}/{tensor}"``."""
    return f"fp8/{name}/{what}"


def step_metrics(
    record: StepRecord, worst: int, fp8_format: str, peak_tokens_per_s: float | None = None
) -> dict[str, float]:
    """Everything measured in one step; scalars of single tensors only for the ``worst`` ones.

    ``peak_tokens_per_s``: of all ranks at an MFU of 100 %; None: unknown, as MFU is then.
    """
    values: dict[str, float] = {
        STEP: record.step,
        LOSS: record.loss,
        GRAD_NORM: record.grad_norm,
        LR: record.lr,
        STEP_TIME_S: record.step_time_s,
        SKIPPED: float(record.skipped),
        ATTEMPT: record.attempt,
        TIMELINE: record.timeline,
        HIGH_PRECISION_LAYERS: len(record.high_precision_layers),
    }
    if record.step_time_s > 0:
        values[TOKENS_PER_SEC] = record.tokens / record.step_time_s
    if (mfu := mfu_pct(record, peak_tokens_per_s)) is not None:
        values[MFU_PCT] = mfu
    values |= {f"{COMM}{name}": number for name, number in exchange_numbers(record.comm).items()}
    values.update(_tensor_metrics(record, worst, fp8_format))
    return values


def histograms(record: StepRecord, fp8_format: str) -> dict[str, tuple[list[int], list[float]]]:
    """(counts [BINS], edges [BINS + 1]) of each of ``HISTOGRAMS``; what lies beyond the range
    counts into its last bins. Of the tensors that computed in FP8 with a scale made from data."""
    columns = TensorColumns.of(record.tensors)
    away = are_of_layers(columns.names, tuple(record.high_precision_layers))
    counted = columns.calibrated & ~away
    if not counted.any():
        return {}
    with np.errstate(divide="ignore", invalid="ignore"):
        lost = np.log10(columns.underflow_pct)
        values = (headrooms(columns, fp8_format), np.log2(columns.amax), lost)
    told = {}
    for (name, (low, high)), of_all in zip(HISTOGRAMS.items(), values, strict=True):
        known = of_all[counted & ~np.isnan(of_all)]
        counts, edges = np.histogram(np.clip(known, low, high), bins=BINS, range=(low, high))
        told[name] = (counts.tolist(), edges.tolist())
    return told


def _tensor_metrics(record: StepRecord, worst: int, fp8_format: str) -> dict[str, float]:
    columns = TensorColumns.of(record.tensors)
    rated = worst_by_headroom(columns, worst, fp8_format, record.high_precision_layers)
    if not rated:
        return {}
    values = {
        WORST_HEADROOM: rated[0][1],
        WORST_SATURATED: max(columns[name].saturated_pct for name, _ in rated),
        WORST_UNDERFLOW: float(np.fmax.reduce(columns.underflow_pct)),
    }
    for name, room in rated:
        stats = columns[name]
        values[tensor_metric(name, "amax")] = stats.amax
        values[tensor_metric(name, "scale_inv")] = 1.0 / stats.scale if stats.scale else 0.0
        values[tensor_metric(name, "overflows_pct")] = stats.saturated_pct
        values[tensor_metric(name, "underflows_pct")] = stats.underflow_pct
        values[tensor_metric(name, "headroom_octaves")] = room
        if stats.sqnr_db is not None:
            values[tensor_metric(name, "sqnr_db")] = stats.sqnr_db
    least = float(np.fmin.reduce(columns.sqnr_db))
    if not math.isnan(least):
        values[WORST_SQNR] = least
    return values


def tally_metrics(totals: Tally) -> dict[str, float]:
    """The running totals of recovery and goodput."""
    values: dict[str, float] = {
        ROLLBACKS: totals.rollbacks,
        STEPS_LOST: totals.steps_lost,
    }
    if totals.time_to_recover_s is not None:
        values[TIME_TO_RECOVER_S] = totals.time_to_recover_s
    if totals.ettr is not None:
        values[ETTR] = totals.ettr
    return values
