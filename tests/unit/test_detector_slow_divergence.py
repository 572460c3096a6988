"""The detector of losses that go the wrong way slowly, or stay above their best."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from monitoring.config import DetectionConfig
from monitoring.detectors import LossSpike, SlowDivergence
from monitoring.detectors.base import Detector
from monitoring.records import Incident, StepRecord
from tests.unit.monitoring_traces import healthy_trace

TRACE = healthy_trace(500, layers=())
LONG = healthy_trace(2500, layers=())
NOISE = np.exp(0.02 * np.random.default_rng(3).normal(size=2500)).tolist()


def run(records: Iterable[StepRecord], cls: type[Detector[Any]] = SlowDivergence) -> list[Incident]:
    detector = cls(DetectionConfig())
    state, found = detector.initial(), []
    for record in records:
        state, new = detector.observe(state, record)
        if record.step % 50 == 49:
            state = detector.load(json.loads(json.dumps(detector.dump(state))))
        found += new
    return found


def scaled(factor_at: Callable[[int], float], trace: list[StepRecord] = TRACE) -> list[StepRecord]:
    return [dataclasses.replace(r, loss=r.loss * factor_at(r.step)) for r in trace]


def noisy(seed: int, sigma: float) -> list[StepRecord]:
    return healthy_trace(500, seed=seed, noise=sigma, layers=())


class TestFiresWhen:
    def test_the_loss_rises_so_slowly_that_no_step_is_a_spike(self) -> None:
        records = scaled(lambda step: 1.004 ** max(0, step - 300))
        assert not run(records, LossSpike)
        incident = run(records)[0]
        assert incident.kind == "slow_divergence"
        assert 320 < incident.step < 350 and 285 <= incident.onset_step < incident.step
        assert incident.evidence["fast"] > 1.1 * incident.evidence["slow"]
        assert "has risen by" in incident.message

    def test_it_stays_above_its_best_once(self) -> None:
        (incident,) = run(scaled(lambda step: 1.4 if step >= 300 else 1.0))
        assert 300 + 48 <= incident.step <= 300 + 48 + 12
        assert abs(incident.onset_step - 300) <= 8
        assert "% above the best it was" in incident.message

    def test_it_drifts_so_slowly_that_the_best_is_forgotten(self) -> None:
        records = [
            dataclasses.replace(r, loss=2.0 * 1.0005**r.step * f)
            for r, f in zip(LONG, NOISE, strict=True)
        ]
        incidents = run(records)
        assert incidents and incidents[0].step < 1300
        assert incidents[0].evidence["lowest"] == pytest.approx(2.0, rel=0.05)
        assert "% above the lowest it was" in incidents[0].message
        assert "best" not in incidents[0].evidence, "no plateau, which other data could explain"
        assert incidents[0].evidence["fast"] > 3.2

    def test_the_learning_rate_rises_too_but_the_loss_by_twice_as_much(self) -> None:
        def rising(record: StepRecord) -> StepRecord:
            return dataclasses.replace(record, lr=3e-4 * 1.01 ** max(0, record.step - 250))

        grown = [rising(r) for r in scaled(lambda step: 1.004 ** max(0, step - 300))]
        assert run(grown)[0].step > run(scaled(lambda s: 1.004 ** max(0, s - 300)))[0].step + 10


class TestStaysSilentWhen:
    @pytest.mark.parametrize("harder", [1.2, 1.35])
    @pytest.mark.parametrize("over", [600, 2000])
    def test_the_data_is_in_an_order_of_rising_difficulty(self, harder: float, over: int) -> None:
        assert not run(
            dataclasses.replace(r, loss=2.0 * (1 + (harder - 1) * min(1.0, r.step / over)) * f)
            for r, f in zip(LONG, NOISE, strict=True)
        )

    @pytest.mark.parametrize("length", [9, 16, 31])
    @pytest.mark.parametrize("easy", [0.3, 0.7])
    def test_a_stretch_of_easy_batches_ends(self, length: int, easy: float) -> None:
        assert not run(scaled(lambda step: easy if 300 <= step < 300 + length else 1.0))

    def test_the_loss_falls(self) -> None:
        assert not run(TRACE)

    @settings(max_examples=4, deadline=None)
    @given(st.integers(0, 2**31), st.sampled_from([0.02, 0.05, 0.1]))
    def test_it_is_noisy(self, seed: int, sigma: float) -> None:
        assert not run(noisy(seed, sigma))

    @settings(max_examples=4, deadline=None)
    @given(st.integers(0, 2**31), st.floats(1.0, 1.2), st.integers(250, 320))
    @example(907, 1.125, 269)
    def test_the_data_is_of_a_harder_domain(self, seed: int, harder: float, first: int) -> None:
        trace = noisy(seed, 0.04)
        assert not run(scaled(lambda step: harder if step >= first else 1.0, trace))

    def test_a_new_cycle_of_the_schedule_raises_it_for_a_while(self) -> None:
        def rise(step: int) -> float:
            since = max(0, step - 300)
            return 1 + 0.12 * (1 - math.exp(-since / 15)) * math.exp(-since / 150)

        records = [
            dataclasses.replace(r, lr=3e-5 if r.step < 300 else 3e-4 * min(1, (r.step - 299) / 20))
            for r in scaled(rise)
        ]
        assert not run(records)

    def test_single_steps_are_far_out(self) -> None:
        rng = np.random.default_rng(0)
        wild = set(rng.choice(500, 25, replace=False).tolist())
        assert not run(scaled(lambda step: 5.0 if step in wild else 1.0))

    @settings(max_examples=10, deadline=None)
    @given(st.lists(st.sampled_from([0.0, 1e-300, -1e308, 1e308, 2.0, -2.0]), min_size=80))
    def test_no_losses_whatever_break_it(self, losses: list[float]) -> None:
        run(dataclasses.replace(r, loss=x) for r, x in zip(TRACE, losses, strict=False))

    @pytest.mark.parametrize("loss", [math.nan, math.inf, 0.0])
    def test_a_loss_says_nothing(self, loss: float) -> None:
        assert not run(dataclasses.replace(r, loss=loss) if r.step > 100 else r for r in TRACE)
