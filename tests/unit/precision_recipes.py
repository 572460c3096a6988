"""The recipes that tests of the native layers run through, each with its options."""

from __future__ import annotations

import pytest

from parallel.config import FP8Config

RECIPES: dict[str, dict[str, object]] = {
    "delayed": {"recipe": "delayed", "amax_history_len": 4},
    "current": {"recipe": "current"},
    "block": {"recipe": "block"},
    "mxfp8": {"recipe": "mxfp8"},
}
VARIANTS: dict[str, dict[str, object]] = {
    **RECIPES,
    "delayed-E4M3": {**RECIPES["delayed"], "format": "E4M3"},
    "delayed-ema": {**RECIPES["delayed"], "amax_compute_algo": "ema", "margin": 1},
    "current-E4M3": {**RECIPES["current"], "format": "E4M3"},
    "current-power-of-2": {**RECIPES["current"], "use_power_2_scales": True},
    "block-HYBRID": {**RECIPES["block"], "format": "HYBRID"},
    "block-f32": {**RECIPES["block"], "use_f32_scales": True},
    "mxfp8-HYBRID": {**RECIPES["mxfp8"], "format": "HYBRID"},
}


def fp8_config(recipe: str = "delayed", **options: object) -> FP8Config:
    """The section of a recipe or variant by its name, with options on top."""
    return FP8Config.model_validate({**VARIANTS[recipe], **options})


every_recipe = pytest.mark.parametrize("recipe", RECIPES)
every_variant = pytest.mark.parametrize("recipe", VARIANTS)
both_ways = pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "plain"])
