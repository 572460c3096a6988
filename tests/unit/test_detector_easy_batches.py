"""Stretches of easy or broken batches: what is far below must not make the rest a spike."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from monitoring.config import DetectionConfig
from monitoring.detectors import DetectorBank, GradNormSpike, LossSpike
from monitoring.detectors.base import Detector
from monitoring.records import Incident, StepRecord
from tests.unit.monitoring_traces import healthy_trace


def run(records: list[StepRecord]) -> list[Incident]:
    bank = DetectorBank(DetectionConfig(), guessing_loss=math.log(256))
    found = []
    for record in records:
        found += bank.observe(record)
        if record.step % 31 == 30:
            row = json.loads(json.dumps(bank.state_dict(), allow_nan=False))
            bank.load_state_dict(row)
    return found


def eased(
    factor: Callable[[int], float], first: int, length: int, seed: int, after: int = 130
) -> list[StepRecord]:
    """Losses and gradient norms times ``factor`` of the steps since ``first``."""
    return [
        dataclasses.replace(
            r,
            loss=r.loss * factor(r.step - first),
            grad_norm=r.grad_norm * factor(r.step - first),
        )
        if first <= r.step < first + length
        else r
        for r in healthy_trace(first + length + after, seed=seed, layers=())
    ]


class TestStaysSilentWhen:
    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize(
        ("first", "lengths"), [(12, (1, 6, 8, 20)), (40, (6, 8, 20)), (150, (1, 6, 8, 20, 31))]
    )
    def test_easy_batches_end(self, seed: int, first: int, lengths: tuple[int, ...]) -> None:
        for length in lengths:
            assert not run(eased(lambda since: 0.7, first, length, seed))

    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("length", [3, 9, 16, 31])
    def test_batches_of_one_token_end(self, seed: int, length: int) -> None:
        assert not run(eased(lambda since: max(1e-3, 0.08**since), 150, length, seed))

    def test_every_third_batch_is_easy(self) -> None:
        assert not run(eased(lambda since: 1.0 if since % 3 else 0.4, 150, 100, seed=0))

    @pytest.mark.parametrize("level", [0.4, 0.7])
    def test_the_loss_falls_for_good_within_a_step_and_stays(self, level: float) -> None:
        assert not run(eased(lambda since: level, 150, 300, seed=0, after=0))


class TestFiresWhen:
    def test_the_loss_leaps_from_a_level_that_has_become_the_usual_one(self) -> None:
        records = eased(lambda since: 0.5, 150, 60, seed=0, after=0)
        records[190] = dataclasses.replace(records[190], loss=records[190].loss * 1.6)
        assert [(i.kind, i.step) for i in run(records)] == [("loss_spike", 190)]

    def test_easy_batches_end_with_a_loss_above_what_it_was(self) -> None:
        records = eased(lambda since: 0.1, 150, 8, seed=0)
        records[158] = dataclasses.replace(records[158], loss=records[158].loss * 1.6)
        assert [(i.kind, i.step) for i in run(records)] == [("loss_spike", 158)]


@pytest.mark.parametrize(
    "detector", [LossSpike(DetectionConfig()), GradNormSpike(DetectionConfig())]
)
def test_the_state_goes_through_json_within_such_a_stretch(detector: Detector[Any]) -> None:
    state = detector.initial()
    for record in eased(lambda since: 0.1, 100, 10, seed=0)[:105]:
        state, _ = detector.observe(state, record)
    assert len(state.baseline.lower) == 5
    assert detector.load(json.loads(json.dumps(detector.dump(state)))) == state
