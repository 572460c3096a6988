"""Losses near 0, as in fine-tuning, and losses of the user's own that are negative."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monitoring.config import DetectionConfig
from monitoring.detectors import DetectorBank, LossSpike, SlowDivergence
from monitoring.detectors.base import Detector
from monitoring.detectors.loss_scale import relative_rise, scaled, signed_from_log, unscaled
from monitoring.records import Incident
from tests.unit.monitoring_traces import healthy_trace

TRACE = healthy_trace(600, layers=())


def run(losses: Iterable[float]) -> list[Incident]:
    """Incidents of the whole bank, which is stored and loaded now and then."""
    bank = DetectorBank(DetectionConfig())
    found = []
    for record, loss in zip(TRACE, losses, strict=False):
        found += bank.observe(dataclasses.replace(record, loss=loss))
        if record.step % 41 == 40:
            row = json.loads(json.dumps(bank.state_dict(), allow_nan=False))
            bank.load_state_dict(row)
    return found


def noisy(level: float, sigma: float, seed: int) -> list[float]:
    return (level * np.exp(sigma * np.random.default_rng(seed).normal(size=600))).tolist()


class TestNearZero:
    def test_a_loss_of_0_05_over_a_trend_of_0_034_is_nothing(self) -> None:
        losses = noisy(0.034, 0.02, 0)
        losses[300:302] = [0.050, 0.051]
        losses[400:460] = [0.048] * 60
        assert not run(losses)

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("level", [1e-3, 1e-2])
    def test_heavy_noise_of_a_fine_tuning_is_silent(self, level: float, seed: int) -> None:
        assert not run(noisy(level, 0.6, seed))

    def test_so_is_a_rise_from_next_to_nothing_to_little(self) -> None:
        assert not run([2e-3 * 1.01 ** min(r.step, 300) for r in TRACE])

    @pytest.mark.parametrize("sigma", [0.05, 0.3])
    def test_a_leap_to_1_is_seen_at_once(self, sigma: float) -> None:
        losses = noisy(0.01, sigma, 0)
        losses[300] = 1.0
        (incident,) = run(losses)
        assert (incident.kind, incident.step, incident.onset_step) == ("loss_spike", 300, 300)


class TestNegative:
    @pytest.mark.parametrize("level", [-0.2, -3.0, -2000.0, 0.0])
    def test_noise_and_a_slow_fall_are_silent(self, level: float) -> None:
        rng = np.random.default_rng(1)
        unit = max(1.0, abs(level))
        noise = (0.02 * unit * rng.normal(size=600)).tolist()
        assert not run(level - 0.0005 * unit * r.step + noise[r.step] for r in TRACE)

    @pytest.mark.parametrize("level", [-0.2, -3.0, -2000.0, 0.0])
    def test_a_leap_is_seen_at_once(self, level: float) -> None:
        rng = np.random.default_rng(1)
        unit = max(1.0, abs(level))
        losses = (level + 0.02 * unit * rng.normal(size=600)).tolist()
        losses[300] += unit
        assert [(i.kind, i.step) for i in run(losses)] == [("loss_spike", 300)]

    def test_so_is_one_right_after_the_loss_fell_below_zero(self) -> None:
        rng = np.random.default_rng(1)
        losses = (3.0 - 0.02 * np.arange(600) + 0.02 * rng.normal(size=600)).tolist()
        assert losses[145] > 0.0 > losses[151]
        assert not run(losses)
        losses[153] += 1.0
        assert [(i.kind, i.step) for i in run(losses)] == [("loss_spike", 153)]

    def test_a_slow_rise_is_a_divergence(self) -> None:
        rng = np.random.default_rng(1)
        losses = [-3.0 + 0.02 * float(rng.normal()) + 0.015 * max(0, r.step - 300) for r in TRACE]
        assert "slow_divergence" in {i.kind for i in run(losses)}

    @pytest.mark.parametrize(
        "detector", [LossSpike(DetectionConfig()), SlowDivergence(DetectionConfig())]
    )
    def test_the_scale_of_what_was_seen_is_changed_once(self, detector: Detector[Any]) -> None:
        state = detector.initial()
        for record in TRACE[:100]:
            state, _ = detector.observe(state, record)
        state, _ = detector.observe(state, dataclasses.replace(TRACE[100], loss=-0.1))
        assert state.signed
        assert detector.load(json.loads(json.dumps(detector.dump(state)))) == state


class TestScale:
    @settings(max_examples=100, deadline=None)
    @given(st.floats(-1e300, 1e300))
    def test_it_can_be_undone(self, loss: float) -> None:
        assert unscaled(scaled(loss, True), True) == pytest.approx(loss, rel=1e-9, abs=1e-300)
        if loss > 1e-300:
            assert unscaled(scaled(loss, False), False) == pytest.approx(loss, rel=1e-9)
            assert signed_from_log(scaled(loss, False)) == pytest.approx(scaled(loss, True))

    def test_it_never_raises(self) -> None:
        assert unscaled(1e6, True) == float("inf") and unscaled(-1e6, True) == float("-inf")

    def test_a_rise_is_told_by_the_size_of_what_is_usual(self) -> None:
        assert relative_rise(-2.0, -4.0) == 0.5 and relative_rise(3.0, 2.0) == 0.5
        assert relative_rise(1.0, 0.0) == float("inf") and relative_rise(0.0, 0.0) == 0.0
