"""How amax grew: over which records, of which tensors, and what is not known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from monitoring.amax_trend import HALF_LIFE, UsualAmax, growth, octaves
from monitoring.records import StepRecord
from monitoring.tensor_stats import TensorColumns, TensorStats
from tests.unit.monitoring_traces import healthy_trace


def record(step: int, amax: float, *, calibrated: bool = True, name: str = "a/input") -> StepRecord:
    blank = healthy_trace(1, layers=())[0]
    stats = TensorStats(amax, 1.0, 0.0, 0.0, 0, calibrated=calibrated)
    return replace(blank, step=step, tensors={name: stats})


def test_it_is_between_the_older_and_the_newer_half() -> None:
    told = growth([record(4, 1.0), record(5, 2.0), record(6, 4.0), record(9, 8.0)])
    assert told is not None
    assert (told.names, told.steps) == (("a/input",), 5)
    assert told.octaves.tolist() == [pytest.approx(2.0)]


def test_of_one_record_or_of_other_tensors_nothing_is_known() -> None:
    assert growth([]) is None
    assert growth([record(1, 1.0)]) is None
    assert growth([record(1, 1.0, name="b/input"), record(2, 1.0)]) is None


@pytest.mark.parametrize("amax", [0.0, math.nan, math.inf])
def test_an_amax_that_is_none_does_not_count(amax: float) -> None:
    told = growth([record(1, amax), record(2, 1.0), record(3, 2.0), record(4, 2.0)])
    assert told is not None and told.octaves.tolist() == [pytest.approx(1.0)]
    told = growth([record(1, amax), record(2, 1.0)])
    assert told is not None and math.isnan(told.octaves[0])
    assert growth([record(1, 1.0, calibrated=False), record(2, 1.0)]) is not None


def test_what_is_usual_follows_slowly_and_outlives_a_change_of_names() -> None:
    usual = UsualAmax()

    def rise(amax: float, *, counted: bool = True, name: str = "a/input") -> float:
        columns = TensorColumns.of(record(0, amax, name=name).tensors)
        return float(usual.rise(columns, np.array([counted]))[0])

    assert rise(4.0, counted=False) == 0.0, "as in BF16"
    assert rise(1.0) == 0.0, "the first is what is usual"
    assert rise(4.0) == pytest.approx(2.0)
    assert 1.9 < rise(4.0) < 2.0
    for _ in range(HALF_LIFE):
        rise(4.0)
    assert rise(4.0) == pytest.approx(1.0, abs=0.03)
    assert rise(4.0, name="b/input") == 0.0
    assert rise(math.inf, name="b/input") == math.inf
    assert rise(0.0, name="b/input") == 0.0
    assert rise(4.0, name="b/input") == 0.0


def test_no_zero_has_a_minus() -> None:
    assert [octaves(x) for x in (-0.04, 0.04, -0.06, 1.25, -math.inf)] == [
        *("+0.0", "+0.0", "-0.1", "+1.2", "-inf"),
    ]
