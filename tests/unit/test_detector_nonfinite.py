import dataclasses
import math

import pytest

from monitoring.config import DetectionConfig
from monitoring.detectors import NonFinite
from monitoring.tensor_stats import TensorStats
from tests.unit.monitoring_traces import healthy_trace


def look(record):
    return NonFinite(DetectionConfig()).observe(None, record)[1]


RECORD = healthy_trace(40)[30]


class TestFiresWhen:
    @pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
    def test_the_loss_is_not_finite(self, loss):
        (incident,) = look(dataclasses.replace(RECORD, loss=loss))
        assert (incident.kind, incident.step, incident.onset_step) == ("nonfinite", 30, 30)
        assert "loss" in incident.message

    def test_the_update_was_left_out_and_it_names_the_rank_and_the_parameter(self):
        (incident,) = look(
            dataclasses.replace(
                RECORD,
                skipped=True,
                grad_norm=math.nan,
                nonfinite_ranks=(2,),
                nonfinite_parameters=("layers.1.mlp.down.weight",),
            )
        )
        assert incident.ranks == (2,)
        assert "rank 2" in incident.message
        assert "layers.1.mlp.down.weight" in incident.message
        assert "left out" in incident.message
        assert [s.layer for s in incident.suspects] == ["layers.1.mlp.down"]

    def test_a_broken_input_is_suspected_before_a_broken_gradient(self):
        tensors = dict(RECORD.tensors)
        tensors["layers.0.attn.qkv/grad_output"] = TensorStats(math.inf, 1.0, 0, 0, 5)
        tensors["layers.3.mlp.down/input"] = TensorStats(math.nan, 1.0, 0, 0, 7)
        (incident,) = look(dataclasses.replace(RECORD, skipped=True, tensors=tensors))
        assert [s.layer for s in incident.suspects] == ["layers.3.mlp.down", "layers.0.attn.qkv"]


class TestStaysSilentWhen:
    def test_everything_is_finite(self):
        assert not look(RECORD)

    def test_values_are_large_but_finite(self):
        assert not look(dataclasses.replace(RECORD, loss=1e30, grad_norm=1e38))

    def test_layer_10_is_not_taken_for_layer_1(self):
        record = healthy_trace(2, layers=("layers.1.mlp.down", "layers.10.mlp.down"))[1]
        (incident,) = look(
            dataclasses.replace(
                record, skipped=True, nonfinite_parameters=("layers.10.mlp.down.weight",)
            )
        )
        assert [s.layer for s in incident.suspects] == ["layers.10.mlp.down"]
