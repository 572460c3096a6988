"""Detectors of scales that don't fit: underflow, and scales that don't follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from monitoring.amax import TensorScaling
from monitoring.config import DetectionConfig
from monitoring.detectors import FrozenScale, Underflow
from monitoring.detectors.base import Detector
from monitoring.records import Incident, StepRecord
from tests.unit.healthy_runs import HISTORY, SCALING, healthy_run
from tests.unit.monitoring_traces import healthy_trace

NAME = "layers.0.mlp.down/input"
OTHER = "layers.1.attn.qkv/input"
TRACE = list(healthy_run("warm_up", 160, seed=3))
"""Scales by the rule of delayed scaling, with a history of 16 steps."""


def run(detector: Detector[Any], records: Iterable[StepRecord]) -> list[Incident]:
    state, found = detector.initial(), []
    for record in records:
        state, new = detector.observe(state, record)
        if record.step % 20 == 19:
            state = detector.load(detector.dump(state))
        found += new
    return found


def with_stats(record: StepRecord, name: str, **values: float) -> StepRecord:
    stats = dataclasses.replace(record.tensors[name], **values)  # type: ignore[arg-type]
    return dataclasses.replace(record, tensors={**record.tensors, name: stats})


def frozen(
    records: Iterable[StepRecord], scaling: TensorScaling = SCALING, **config: Any
) -> list[Incident]:
    return run(FrozenScale(DetectionConfig(**config), scaling), records)


def standing(first: int, growth: float, length: int = 1000) -> list[StepRecord]:
    """The scale of one input stands still from step ``first`` on while its amax grows."""
    scale = TRACE[first].tensors[NAME].scale
    return [
        with_stats(r, NAME, scale=scale, amax=r.tensors[NAME].amax * growth ** (r.step - first + 1))
        if first <= r.step < first + length
        else r
        for r in TRACE
    ]


class TestFrozenScaleFiresWhen:
    def test_a_scale_has_not_followed_three_amaxs(self) -> None:
        incident = frozen(standing(60, 1.5))[0]
        assert incident.kind == "frozen_scale"
        assert 62 <= incident.step <= 64 and 61 <= incident.onset_step <= incident.step
        assert [(s.layer, s.tensor) for s in incident.suspects] == [("layers.0.mlp.down", "input")]
        assert "has not followed 3 amaxs" in incident.message

    def test_it_says_so_again_after_a_window_only(self) -> None:
        steps = [i.step for i in frozen(standing(60, 1.2), window=20)]
        assert len(steps) > 2 and min(b - a for a, b in pairwise(steps)) == 20

    def test_no_amax_of_two_histories_called_for_a_scale(self) -> None:
        records = [with_stats(r, NAME, amax=0.01) if r.step >= 60 else r for r in standing(60, 1.0)]
        scale = records[60].tensors[NAME].scale
        changed = next(r.step for r in records if r.tensors[NAME].scale == scale)
        incident = frozen(records)[0]
        assert incident.evidence["stale"] == 1
        assert changed + 2 * HISTORY < incident.step <= 60 + 2 * HISTORY + 1
        assert incident.onset_step == incident.step
        assert "(32 steps) called for" in incident.message

    def test_statistics_are_of_every_second_step(self) -> None:
        records = [
            r if r.step % 2 else dataclasses.replace(r, tensors={}) for r in standing(60, 1.5)
        ]
        assert 62 <= frozen(records)[0].step <= 75


class TestFrozenScaleStaysSilentWhen:
    def test_scales_follow(self) -> None:
        assert not frozen(TRACE)

    def test_a_scale_stands_still_and_its_amax_below_what_it_allows_for(self) -> None:
        assert not frozen(
            with_stats(r, NAME, amax=5.0, scale=448.0 / 5.0) if r.step > 20 else r for r in TRACE
        )

    def test_the_recipe_keeps_no_history(self) -> None:
        for recipe in ("current", "block", "mxfp8"):
            assert not frozen(standing(60, 1.5), TensorScaling(recipe, "E4M3"))

    def test_the_layer_computes_in_bf16_and_returns(self) -> None:
        away = [
            dataclasses.replace(r, high_precision_layers=("layers.0.mlp.down",))
            if 60 <= r.step < 80
            else r
            for r in standing(60, 1.5, length=20)
        ]
        assert not frozen(away)

    def test_updates_were_left_out_which_update_no_scale(self) -> None:
        assert not frozen(
            dataclasses.replace(r, skipped=60 <= r.step < 80) for r in standing(60, 1.5, length=20)
        )

    def test_an_infinite_amax_holds_it_for_a_while(self) -> None:
        assert not frozen(
            with_stats(r, NAME, amax=float("inf")) if 60 <= r.step < 70 else r
            for r in standing(60, 1.0, length=10)
        )


HEALTHY = healthy_trace(80)
INPUT = "layers.0.mlp.down/input"


def losing(first: int, pct: float, length: int = 1000, name: str = INPUT) -> list[StepRecord]:
    return [
        with_stats(r, name, underflow_pct=pct) if first <= r.step < first + length else r
        for r in HEALTHY
    ]


def underflow(records: Iterable[StepRecord], **config: Any) -> list[Incident]:
    return run(Underflow(DetectionConfig(**config)), records)


class TestUnderflowFiresWhen:
    def test_a_fifth_of_a_tensor_is_lost_for_eight_steps(self) -> None:
        incident = underflow(losing(40, 25.0))[0]
        assert (incident.kind, incident.step, incident.onset_step) == ("underflow", 47, 40)
        assert [s.layer for s in incident.suspects] == ["layers.0.mlp.down"]
        assert incident.suspects[0].evidence["underflow_pct"] == 25.0
        assert incident.evidence["usual_pct"] < 1.0
        assert "25.0 % of its values" in incident.message

    def test_the_history_keeps_its_own_while_it_lasts(self) -> None:
        assert underflow(losing(40, 90.0))[-1].evidence["usual_pct"] < 1.0


class TestUnderflowStaysSilentWhen:
    def test_it_passes(self) -> None:
        assert not underflow(losing(40, 90.0, length=7))

    def test_a_tensor_has_always_lost_as_much(self) -> None:
        assert not underflow(losing(0, 60.0))

    def test_no_scale_was_made_from_data_yet(self) -> None:
        uncalibrated = [
            with_stats(r, INPUT, calibrated=False) if r.step >= 40 else r for r in losing(40, 99.7)
        ]
        assert not underflow(uncalibrated)

    def test_the_layer_computes_in_bf16(self) -> None:
        assert not underflow(
            dataclasses.replace(r, high_precision_layers=("layers.0.mlp.down",))
            for r in losing(40, 90.0)
        )
