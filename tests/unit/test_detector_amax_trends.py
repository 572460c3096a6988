"""Detectors of an amax against its own history: the surge, and the projected overflow."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from monitoring.amax import TensorScaling
from monitoring.config import DetectionConfig
from monitoring.detectors import AmaxSurge, DetectorBank, LossSpike, ProjectedOverflow
from monitoring.detectors.base import Detector
from monitoring.records import Incident, StepRecord
from tests.unit.monitoring_traces import healthy_trace, with_loss

DOWN = "layers.2.mlp.down/input"
GATE_UP = "layers.2.mlp.gate_up/weight"
GRADIENT = "layers.1.mlp.down/grad_output"
TRACE = healthy_trace(140)


def with_amax(record: StepRecord, name: str, factor: float) -> StepRecord:
    stats = record.tensors[name]
    tensors = {**record.tensors, name: dataclasses.replace(stats, amax=stats.amax * factor)}
    return dataclasses.replace(record, tensors=tensors)


def changed(factor_at: Callable[[int], float], name: str = DOWN) -> list[StepRecord]:
    return [with_amax(record, name, factor_at(record.step)) for record in TRACE]


def run(detector: Detector[Any], records: Iterable[StepRecord]) -> list[Incident]:
    state, found = detector.initial(), []
    for record in records:
        state, new = detector.observe(state, record)
        found += new
    return found


def surge(records: Iterable[StepRecord], **config: Any) -> list[Incident]:
    return run(AmaxSurge(DetectionConfig(**config)), records)


def overflow(
    records: Iterable[StepRecord], scaling: TensorScaling | None = None, **config: Any
) -> list[Incident]:
    return run(ProjectedOverflow(DetectionConfig(**config), scaling), records)


def at(step: int, factor: float, length: int = 1000) -> Callable[[int], float]:
    return lambda now: factor if step <= now < step + length else 1.0


def growing(rate: float, first: int = 100) -> Callable[[int], float]:
    return lambda step: (1 + rate) ** max(0, step - first + 1)


class TestSurgeFiresWhen:
    def test_an_input_stays_eight_times_above_its_history_in_the_second_step(self) -> None:
        incident = surge(changed(at(100, 16.0)))[0]
        assert (incident.kind, incident.step, incident.onset_step) == ("amax_surge", 101, 100)
        (suspect,) = incident.suspects
        assert (suspect.layer, suspect.tensor) == ("layers.2.mlp.down", "input")
        assert suspect.evidence["surge_octaves"] == pytest.approx(4.0, abs=0.5)
        assert suspect.evidence["amax"] / suspect.evidence["usual_amax"] == pytest.approx(
            2 ** suspect.evidence["surge_octaves"]
        )
        assert "first to move was layers.2.mlp.down" in incident.message

    def test_steps_at_a_level_an_octave_higher_before_it_are_not_its_onset(self) -> None:
        factors = [1.0 if s < 100 else 2.2 if s < 130 else 20.0 for s in range(140)]
        incident = surge(changed(lambda s: factors[min(s, 139)]))[0]
        assert (incident.step, incident.onset_step) == (131, 130)
        assert incident.suspects[0].evidence["since_step"] == 100

    def test_it_leaps_by_twice_the_octaves_at_once(self) -> None:
        assert surge(changed(at(100, 100.0, length=1)))[0].step == 100

    def test_the_layer_that_moved_first_leads_whatever_moved_more(self) -> None:
        records = [with_amax(r, GATE_UP, 4.0 if r.step >= 98 else 1.0) for r in TRACE]
        records = [with_amax(r, DOWN, 64.0 if r.step >= 100 else 1.0) for r in records]
        records = [with_amax(r, GRADIENT, 1e4 if r.step >= 100 else 1.0) for r in records]
        incident = surge(records)[0]
        assert [s.layer for s in incident.suspects] == [
            "layers.2.mlp.gate_up", "layers.2.mlp.down", "layers.1.mlp.down",
        ]  # fmt: skip
        assert incident.suspects[0].evidence["since_step"] == 98

    def test_what_surges_never_enters_its_history(self) -> None:
        rises = [i.evidence["surge_octaves"] for i in surge(changed(at(100, 16.0, length=30)))]
        assert len(rises) == 29
        assert max(rises) - min(rises) < 1.0


class TestSurgeStaysSilentWhen:
    def test_a_single_batch_has_an_outlier(self) -> None:
        assert not surge(changed(at(100, 16.0, length=1)))

    def test_a_gradient_surges_alone(self) -> None:
        assert not surge(changed(at(100, 1000.0), GRADIENT))

    def test_the_layer_computes_in_bf16(self) -> None:
        away = [
            dataclasses.replace(r, high_precision_layers=("layers.2.mlp.down",))
            for r in changed(at(100, 100.0))
        ]
        assert not surge(away)

    def test_its_history_is_shorter_than_a_window(self) -> None:
        assert not surge(changed(at(40, 16.0)))

    def test_a_new_level_has_lasted_for_a_window(self) -> None:
        records = changed(at(70, 16.0))
        assert surge(records, window=32)[-1].step < 103

    @pytest.mark.parametrize("amax", [0.0, float("nan"), float("inf")])
    def test_an_amax_says_nothing(self, amax: float) -> None:
        assert not surge(changed(at(100, amax)))


class TestOverflowFiresWhen:
    @pytest.mark.parametrize("rate", [0.15, 0.25])
    def test_an_input_grows_steadily_before_it_is_out_of_range(self, rate: float) -> None:
        incident = overflow(changed(growing(rate)))[0]
        assert incident.kind == "projected_overflow"
        assert abs(incident.onset_step - 100) <= 4
        assert 0 < incident.evidence["steps_left"] <= 16
        assert incident.evidence["risen_octaves"] < 5.0
        assert [s.layer for s in incident.suspects] == ["layers.2.mlp.down"]
        assert "octaves a step" in incident.message

    def test_statistics_are_of_every_third_step(self) -> None:
        records = [
            r if r.step % 3 == 0 else dataclasses.replace(r, tensors={}) for r in healthy_trace(330)
        ]
        records = [
            with_amax(r, DOWN, growing(0.1, 240)(r.step)) if r.tensors else r for r in records
        ]
        incident = overflow(records)[0]
        assert 250 < incident.step < 285
        assert incident.evidence["octaves_a_step"] == pytest.approx(0.12, abs=0.04)

    def test_growth_too_fast_for_a_line_is_a_surge_first(self) -> None:
        records = changed(growing(0.5))
        assert surge(records)[0].step < 108 <= overflow(records)[0].step

    def test_a_weight_grows_the_input_that_follows_it_faster_is_told_beside_it(self) -> None:
        records = [with_amax(r, GATE_UP, growing(0.12)(r.step)) for r in TRACE]
        records = [with_amax(r, DOWN, growing(0.25, 102)(r.step)) for r in records]
        incident = overflow(records)[0]
        assert {s.layer for s in incident.suspects} == {"layers.2.mlp.gate_up", "layers.2.mlp.down"}

    def test_it_leads_a_loss_that_moves_when_the_range_is_used_up(self) -> None:
        """At six octaves the loss begins to rise; the issue asks for five steps before."""
        records = changed(growing(0.2))
        moves = next(r.step for r in records if growing(0.2)(r.step) >= 2**6)
        assert overflow(records)[0].step <= moves - 5


class TestOverflowStaysSilentWhen:
    def test_it_jumps_to_another_level(self) -> None:
        assert not overflow(changed(at(100, 12.0)))

    def test_growth_ends_by_itself_as_in_real_runs(self) -> None:
        """Two octaves in sixteen steps: the demo's last layer finds its level so."""
        assert not overflow(changed(lambda s: 2 ** (0.13 * min(max(0, s - 100), 16))))

    def test_the_model_is_in_its_first_window(self) -> None:
        assert not overflow(changed(lambda s: 2 ** (0.25 * min(s, 60)))[:64])

    def test_scales_are_by_block(self) -> None:
        assert not overflow(changed(growing(0.25)), TensorScaling("mxfp8", "E4M3"))
        assert overflow(changed(growing(0.25)), TensorScaling("current"))

    def test_the_layer_computes_in_bf16(self) -> None:
        assert not overflow(
            dataclasses.replace(r, high_precision_layers=("layers.2.mlp.down",))
            for r in changed(growing(0.25))
        )

    def test_a_gradient_grows(self) -> None:
        assert not overflow(changed(growing(0.25), GRADIENT))


class TestState:
    @pytest.mark.parametrize("cls", [AmaxSurge, ProjectedOverflow])
    def test_it_goes_through_json_at_every_step(self, cls: type[Detector[Any]]) -> None:
        records = changed(growing(0.25))
        detector = cls(DetectionConfig())
        state, found = detector.initial(), []
        for record in records:
            state, new = detector.observe(state, record)
            state = detector.load(json.loads(json.dumps(detector.dump(state), allow_nan=False)))
            found += new
        assert found == run(detector, records) and found

    @pytest.mark.parametrize("cls", [AmaxSurge, ProjectedOverflow])
    def test_the_order_of_the_tensors_changes_nothing(self, cls: type[Detector[Any]]) -> None:
        """As after a restart with another number of stages."""
        records = changed(growing(0.25))
        turned = [
            dataclasses.replace(r, tensors=dict(reversed(list(r.tensors.items()))))
            if r.step % 50 > 25
            else r
            for r in records
        ]
        detector = cls(DetectionConfig())
        assert run(detector, turned) == run(detector, records)


class TestSuspectsOfALossSpike:
    def spike(self, moved: int) -> Incident:
        """What the bank tells of a spike in step 100, with a weight that moves in ``moved``."""
        config = DetectionConfig()
        records = [with_amax(r, GATE_UP, 4.0 if r.step >= moved else 1.0) for r in TRACE]
        records[100] = with_loss(records[100], 2.0)
        bank = DetectorBank(config, [LossSpike(config), AmaxSurge(config)])
        (incident,) = [i for r in records[:101] for i in bank.observe(r)]
        return incident

    def test_are_the_layers_that_had_moved_before_it(self) -> None:
        (suspect,) = self.spike(moved=95).suspects
        assert (suspect.layer, suspect.tensor) == ("layers.2.mlp.gate_up", "weight")
        assert suspect.evidence["since_step"] == 95

    def test_are_none_when_tensors_moved_in_the_same_step(self) -> None:
        assert not self.spike(moved=100).suspects
