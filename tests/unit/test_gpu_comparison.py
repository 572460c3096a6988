"""The GPU comparison's own control flow, on the stand-in: a comparison that can't fail is none.

The stand-in's products are BF16's, so that products differ here by what FP8 costs, while scales,
histories and amax must be equal already.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.config import FP8Config
from parallel.precision.scope import PrecisionScope
from tests.gpu import test_transformer_engine_vs_native as comparison
from tests.gpu.conftest import Measurements, reason_to_skip
from tests.unit.transformer_engine_stand_in import StandIn


@pytest.fixture
def te(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    stand_in.install(monkeypatch)
    # What quantizing the operands costs, saturation after a step that was smaller included.
    monkeypatch.setattr(comparison, "PRODUCT_TOLERANCE", 0.9)
    monkeypatch.setattr(comparison, "FAST_TOLERANCE", 0.9)
    return stand_in


@pytest.mark.parametrize("label", ["delayed", "delayed, most_recent, margin 1", "current", "mxfp8"])
def test_scales_histories_and_amax_are_equal_on_the_stand_in(te, label, tmp_path: Path):
    measured = Measurements()
    config = FP8Config.model_validate(comparison.CONFIGS[label])
    comparison.compare(label, config, "cpu", measured)
    measured.write(tmp_path)
    told: Any = json.loads((tmp_path / "transformer_engine_vs_native.json").read_text())
    found = {row["what"]: row for row in told["rows"]}
    assert 0 < found["output"]["largest"] < 0.9 and found["statistics"]["equal"]
    assert ("history" in found) == (config.recipe == "delayed")
    assert f"| {label} | output |" in (tmp_path / "transformer_engine_vs_native.md").read_text()


@pytest.mark.parametrize("recipe", ["current", "block", "mxfp8"])
def test_the_reference_of_rounded_inputs_is_the_native_rounding(recipe):
    config = FP8Config(recipe=recipe)
    x, _ = comparison.operands(0, "cpu")
    scope = PrecisionScope("fp8", config, num_layers=1)
    linear = scope.linear(comparison.NAME, comparison.INPUTS, comparison.INPUTS)
    with torch.no_grad():
        # An identity of ones is exact in FP8: what comes out is what the input was rounded to.
        linear.weight.copy_(torch.eye(comparison.INPUTS))
        found = linear(x)
    wanted = comparison.rounded_rows(x, config)
    torch.testing.assert_close(found.float(), wanted.bfloat16().float(), rtol=2.0**-7, atol=0.0)


def test_other_products_fail_it(te, monkeypatch):
    monkeypatch.setattr(comparison, "PRODUCT_TOLERANCE", 2.0**-7)
    config = FP8Config.model_validate(comparison.CONFIGS["current"])
    with pytest.raises(AssertionError, match="grad_weight"):
        comparison.compare("current", config, "cpu", Measurements())


def test_other_scales_fail_it(te, monkeypatch):
    from tests.unit import transformer_engine_stand_in

    real = transformer_engine_stand_in._update

    def twice(recipe: Any, scaling: Any) -> None:
        real(recipe, scaling)
        scaling.scale *= 2

    monkeypatch.setattr(transformer_engine_stand_in, "_update", twice)
    config = FP8Config.model_validate(comparison.CONFIGS["delayed"])
    with pytest.raises(AssertionError, match="scales differ in steps"):
        comparison.compare("delayed", config, "cpu", Measurements())


def test_without_a_gpu_the_reason_to_skip_is_given(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert reason_to_skip("delayed") == "no CUDA device"
