"""What the spec calls a model's parameters is what the model calls them."""

from __future__ import annotations

import pytest
import torch

from parallel.config import FP8Config, ModelConfig
from parallel.model_plan import parameter_name
from parallel.parameter_names import built_in_names, is_matched, unmatched
from parallel.precision.scope import PrecisionScope
from parallel.transformer import layer_plans


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("smooth", [False, True])
def test_names_are_those_of_the_built_model(tied: bool, smooth: bool) -> None:
    model = ModelConfig(num_layers=2, tie_embeddings=tied, smooth_swiglu=smooth)
    scope = PrecisionScope("fp8", FP8Config(), num_layers=2, device="meta", compiled=False)
    plans = layer_plans(model, seq_len=8, seed=0, scope=scope, tensor=None)
    found = []
    with torch.device("meta"):
        for i, plan in enumerate(plans):
            if plan.tied is None or plan.tied not in [p.tied for p in plans[:i]]:
                module = plan.build()
                found += [parameter_name(f"{i}.{n}", plans) for n, _ in module.named_parameters()]
    assert set(built_in_names(model)) == set(found)


def test_a_pattern_means_names_as_a_whole_and_a_star_crosses_dots() -> None:
    assert is_matched("layers.3.mlp.down.weight", ["head.*", "layers.3.*"])
    assert not is_matched("layers.3.mlp.down.weight", ["layers.3", "mlp", "layers.?.mlp.down"])


def test_the_nearest_name_is_offered_for_a_pattern_that_means_nothing() -> None:
    names = built_in_names(ModelConfig(num_layers=2))
    (found,) = unmatched(["*.weight", "layers.1.mlp.gate.weight"], names)
    assert (found.index, found.nearest) == (1, "layers.1.mlp.gate_up.weight")
