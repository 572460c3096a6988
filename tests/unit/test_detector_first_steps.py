"""A loss that goes bad before there is a baseline."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest

from monitoring.config import DetectionConfig
from monitoring.detectors import DetectorBank, LossSpike
from monitoring.records import Incident
from orchestrator.recovery.detector_bank import new_bank
from orchestrator.spec.job import JobSpec
from tests.unit.monitoring_traces import healthy_trace

GUESSING = math.log(256)
TRACE = healthy_trace(200, layers=())


def found(
    loss_at: Callable[[int], float],
    steps: int = 200,
    guessing: float | None = GUESSING,
    first: int = 0,
) -> list[Incident]:
    """Incidents of the whole bank, settling windows and all."""
    bank = DetectorBank(DetectionConfig(), guessing_loss=guessing)
    records = [dataclasses.replace(r, loss=loss_at(r.step)) for r in TRACE[first:steps]]
    return [incident for record in records for incident in bank.observe(record)]


def diverging(step: int) -> float:
    """A shock of the learning rate at step 3, as in a real job."""
    return 5.5 if step < 4 else (27.0 if step == 4 else 80.0 + 80.0 * ((step * 7) % 11) / 11)


class TestFiresWhen:
    @pytest.mark.parametrize("guessing", [GUESSING, None])
    def test_a_shock_at_step_3_takes_the_loss_far_above_the_first(
        self, guessing: float | None
    ) -> None:
        incident = found(diverging, guessing=guessing)[0]
        assert (incident.kind, incident.onset_step) == ("loss_spike", 4)
        assert incident.step <= 6

    def test_it_goes_on_where_nothing_is_done(self) -> None:
        assert len(found(diverging)) > 10

    @pytest.mark.parametrize("shock", [1, 2, 3, 8, 12, 14, 15])
    @pytest.mark.parametrize("height", [2.2, 5.0, 30.0])
    def test_any_of_the_first_steps_is_the_one(self, shock: int, height: float) -> None:
        losses = [5.5 - 0.08 * min(r.step, 20) for r in TRACE]
        incidents = found(lambda s: losses[s] * (height if s >= shock else 1.0))
        assert incidents and incidents[0].onset_step == shock and incidents[0].step <= shock + 2

    def test_it_stays_above_guessing_without_a_leap(self) -> None:
        incidents = found(lambda s: 5.5 * min(1.7, 1.08 ** max(0, s - 2)), steps=40)
        assert incidents and "what guessing costs" in incidents[0].message

    def test_a_job_that_goes_on_at_2_diverges_below_guessing(self) -> None:
        incidents = found(lambda s: 2.0 if s < 6 else 5.0, guessing=math.log(50_000))
        assert incidents[0].onset_step == 6 and incidents[0].step == 8

    def test_a_rise_that_began_before_the_baseline_was_trusted_has_its_first_step(self) -> None:
        rng = np.random.default_rng(0)
        noise = np.exp(0.01 * rng.normal(size=40)).tolist()
        detector = LossSpike(DetectionConfig())
        state, incidents = detector.initial(), []
        for record in TRACE[:20]:
            loss = 5.0 * noise[record.step] * 1.18 ** max(0, record.step - 13)
            state, new = detector.observe(state, dataclasses.replace(record, loss=loss))
            incidents += new
        assert incidents and incidents[0].onset_step == 14


class TestStaysSilentWhen:
    @pytest.mark.parametrize("start", [1.0, 1.3, 3.0, 20.0])
    def test_a_fresh_model_begins_above_guessing_and_comes_down(self, start: float) -> None:
        assert not found(lambda s: 3.0 + (start * GUESSING - 3.0) * 0.9**s)

    @pytest.mark.parametrize("seed", range(8))
    @pytest.mark.parametrize("guessing", [GUESSING, None])
    def test_batches_of_one_sequence_differ_by_half(
        self, seed: int, guessing: float | None
    ) -> None:
        rng = np.random.default_rng(seed)
        losses = (2.0 * np.exp(0.5 * rng.normal(size=200))).tolist()
        assert not found(lambda s: losses[s], guessing=guessing)

    def test_warm_up_raises_the_loss_by_a_third_for_a_few_steps(self) -> None:
        assert not found(lambda s: 5.5 * (1.0 + (0.33 if 4 <= s < 9 else 0.0)) * 0.995**s)

    def test_the_first_batches_were_of_one_token(self) -> None:
        assert not found(lambda s: 0.2 if s < 2 else 5.3 * 0.99**s)

    def test_a_few_of_the_first_were(self) -> None:
        assert not found(lambda s: 0.01 if 6 <= s < 13 else 5.5 * 0.985**s)


def test_a_job_knows_what_guessing_costs_unless_its_loss_is_its_own() -> None:
    spec = JobSpec.model_validate({"name": "job", "model": {"vocab_size": 1024}})
    assert {d.guessing_loss for d in new_bank(spec).detectors} == {math.log(1024)}
    spec = JobSpec.model_validate({"name": "job", "model": {"factory": "own.model:build"}})
    assert {d.guessing_loss for d in new_bank(spec).detectors} == {None}
