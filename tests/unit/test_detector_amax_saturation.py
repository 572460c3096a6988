import dataclasses
import json
import math

import numpy as np
import pytest

from monitoring.config import DetectionConfig
from monitoring.detectors import AmaxSaturation
from tests.unit.monitoring_traces import healthy_trace, surged


def run(records, config=None):
    detector = AmaxSaturation(config or DetectionConfig())
    state, found = detector.initial(), []
    for record in records:
        state, new = detector.observe(state, record)
        found += new
    return state, found


def with_tensor(record, name, **changes):
    tensors = dict(record.tensors)
    tensors[name] = dataclasses.replace(tensors[name], **changes)
    return dataclasses.replace(record, tensors=tensors)


class TestFiresWhen:
    def test_weights_grow_and_the_layer_that_grew_is_the_first_suspect(self):
        records = healthy_trace(80)
        records[60] = surged(records[60], "layers.2.mlp", octaves=6.0)
        _, (incident,) = run(records[:61])
        assert (incident.step, incident.onset_step) == (60, 60)
        assert [s.layer for s in incident.suspects[:2]] == [
            "layers.2.mlp.down",
            "layers.2.mlp.gate_up",
        ]
        assert incident.suspects[0].evidence["surge_octaves"] == pytest.approx(12, abs=0.5)
        assert {s.layer for s in incident.suspects[2:]} == {
            f"layers.{i}.{part}" for i in (0, 1) for part in ("attn.out", "mlp.down")
        }

    def test_a_tensor_moved_steps_before_it_saturated_that_is_the_onset(self):
        records = healthy_trace(80)
        name = "layers.1.attn.out/input"
        usual = records[59].tensors[name].amax
        for step, octaves, pct in ((60, 1.6, 0.2), (61, 2.5, 0.6), (62, 4.0, 9.0)):
            records[step] = with_tensor(
                records[step], name, amax=usual * 2**octaves, saturated_pct=pct
            )
        _, (incident,) = run(records[:63])
        assert (incident.step, incident.onset_step) == (62, 60)
        assert incident.suspects[0].layer == "layers.1.attn.out"
        assert "since step 60" in incident.message

    @pytest.mark.parametrize("pct", [0.0, 0.05])
    def test_it_stood_still_at_a_new_level_for_long_which_is_healthy(self, pct):
        records = healthy_trace(160)
        name = "layers.1.attn.out/input"
        high = 1.3 * max(r.tensors[name].amax for r in records[:100]) * 2
        for step in range(100, 160):
            records[step] = with_tensor(records[step], name, amax=high, saturated_pct=pct)
        for step in (150, 151):
            records[step] = with_tensor(records[step], name, saturated_pct=1.2)
        _, (incident,) = run(records[:152])
        assert (incident.step, incident.onset_step) == (151, 150)
        assert incident.suspects[0].evidence["since_step"] == 100

    def test_it_was_clamped_notably_right_before_that_is_the_onset(self):
        records = healthy_trace(80)
        for step, pct in ((57, 0.04), (58, 0.3), (59, 0.8), (60, 2.0), (61, 2.0)):
            name = "layers.0.mlp.down/input"
            records[step] = with_tensor(records[step], name, amax=50.0, saturated_pct=pct)
        _, (incident,) = run(records[:62])
        # In step 57 it leapt.
        assert (incident.step, incident.onset_step) == (61, 57)

    def test_the_one_that_moved_first_leads_though_another_moved_more(self):
        records = healthy_trace(80)
        early, late = "layers.3.mlp.down/input", "layers.0.attn.qkv/input"
        usual = {n: records[59].tensors[n].amax for n in (early, late)}
        records[60] = with_tensor(records[60], early, amax=usual[early] * 3, saturated_pct=0.5)
        records[61] = with_tensor(records[61], early, amax=usual[early] * 3, saturated_pct=2.0)
        records[61] = with_tensor(records[61], late, amax=usual[late] * 900, saturated_pct=60.0)
        _, (incident,) = run(records[:62])
        assert [s.layer for s in incident.suspects] == ["layers.3.mlp.down", "layers.0.attn.qkv"]

    def test_saturation_lasted_for_as_many_steps_as_the_patience(self):
        records = healthy_trace(80)
        for step in (60, 61, 62, 70, 71):
            records[step] = with_tensor(
                records[step], "layers.0.mlp.down/input", amax=50.0, saturated_pct=2.0
            )
        _, found = run(records, DetectionConfig(saturation_patience=3))
        assert [i.step for i in found] == [62]

    def test_a_share_far_above_the_limit_is_not_waited_for(self):
        records = healthy_trace(80)
        records[60] = with_tensor(records[60], "layers.0.mlp.down/input", saturated_pct=4.0)
        assert [i.step for i in run(records[:62])[1]] == [60]

    def test_an_amax_is_infinite(self):
        records = healthy_trace(40)
        records[30] = with_tensor(
            records[30], "layers.0.mlp.down/input", amax=math.inf, saturated_pct=50.0
        )
        _, (incident,) = run(records[:31])
        assert incident.suspects[0].evidence["surge_octaves"] == math.inf

    def test_a_tensor_clamps_whose_scale_happens_to_be_one(self):
        records = healthy_trace(40)
        name = "layers.0.mlp.down/input"
        records = [with_tensor(r, name, scale=1.0) for r in records]
        records[30] = with_tensor(records[30], name, amax=50_000.0, saturated_pct=60.0)
        _, found = run(records[:31])
        assert [i.suspects[0].layer for i in found] == ["layers.0.mlp.down"]


class TestStaysSilentWhen:
    def test_nothing_happens(self):
        assert not run(healthy_trace(200))[1]

    def test_scales_are_not_calibrated_yet_in_the_first_step(self):
        records = healthy_trace(3)
        records[0] = with_tensor(
            records[0], "layers.0.mlp.down/input", amax=9000.0, saturated_pct=90.0
        )
        assert not records[0].tensors["layers.0.mlp.down/input"].calibrated
        assert not run(records)[1]

    def test_the_first_record_with_a_scale_was_made_with_the_scale_of_none(self):
        records = [with_tensor(healthy_trace(2)[1], "layers.0.mlp.down/input", saturated_pct=90.0)]
        assert not run(records)[1]

    def test_the_layer_computes_in_bf16(self):
        records = healthy_trace(40)
        records[30] = dataclasses.replace(
            surged(records[30], "layers.0.mlp"),
            high_precision_layers=("layers.0.mlp.down", "layers.0.mlp.gate_up"),
        )
        assert not run(records)[1]

    def test_a_handful_of_values_passes_an_old_maximum(self):
        records = [
            with_tensor(r, "layers.0.mlp.down/input", saturated_pct=0.9) for r in healthy_trace(60)
        ]
        assert not run(records)[1]

    def test_an_amax_rises_far_without_saturating_as_under_current_scaling(self):
        records = healthy_trace(60)
        records[40] = with_tensor(records[40], "layers.0.mlp.down/input", amax=4000.0)
        assert not run(records)[1]

    def test_a_new_level_has_lasted_for_a_window_it_is_no_suspect_any_more(self):
        config = DetectionConfig(window=16)
        name, other = "layers.0.mlp.down/input", "layers.3.mlp.down/input"
        records = [
            with_tensor(r, name, amax=40.0) if r.step >= 30 else r for r in healthy_trace(80)
        ]
        records[70] = with_tensor(records[70], other, amax=100.0, saturated_pct=20.0)
        _, (incident,) = run(records, config)
        assert [s.layer for s in incident.suspects] == ["layers.3.mlp.down"]
        assert incident.evidence["surge_octaves"] < 6


class TestState:
    def test_it_goes_through_json_exactly(self):
        detector = AmaxSaturation(DetectionConfig())
        records = healthy_trace(50)
        records[45] = surged(records[45])
        state, _ = run(records[:46])
        restored = detector.load(json.loads(json.dumps(detector.dump(state), allow_nan=False)))
        assert restored.names == state.names
        for field in (
            "reference",
            "calibrated",
            "run",
            "moved_since",
            "before",
            "worse_since",
        ):
            np.testing.assert_array_equal(getattr(restored, field), getattr(state, field))

    def test_a_record_never_changes_the_state_it_was_observed_with(self):
        detector = AmaxSaturation(DetectionConfig())
        state, _ = run(healthy_trace(30))
        before = detector.dump(state)
        detector.observe(state, surged(healthy_trace(31)[30]))
        assert detector.dump(state) == before

    def test_tensors_that_appear_later_start_without_history(self):
        few, all_of_them = healthy_trace(30, layers=("layers.0.mlp.down",)), healthy_trace(40)
        records = few + all_of_them[30:]
        records[30] = with_tensor(records[30], "layers.3.mlp.down/input", saturated_pct=90.0)
        records[33] = with_tensor(records[33], "layers.3.mlp.down/input", saturated_pct=90.0)
        state, found = run(records)
        assert [i.step for i in found] == [33]
        assert len(state.names) == 48
