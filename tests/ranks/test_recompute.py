"""Activations computed again in the backward change no bit, on any layout, in any recipe."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks.engine_runs import LR, RECIPES, batches, build, model_for
from tests.ranks.launch_ranks import run_ranks

LAYOUTS = {"PP2": {"pipeline": 2}, "TP2": {"tensor": 2}, "DP2": {}}


def train(world_size: int, degrees: dict[str, int], **options: Any) -> dict[str, Any]:
    engine = build(world_size, **degrees, **options)
    replica = degrees.get("tensor", 1) * degrees.get("pipeline", 1)
    losses, statistics = [], []
    for step in range(4):
        if step == 2 and options.get("precision") != "bf16":
            engine.set_precision({"layers.0.mlp.down": "bf16", "layers.1.attn.qkv": "bf16"})
        result = engine.train_step(batches(engine, world_size, replica, step), LR)
        losses.append((float(result.loss).hex(), result.grad_norm.hex()))
        statistics.append(engine.scope.statistics())
    return {"losses": losses, "statistics": statistics}


def runs(rank: int, world_size: int, degrees: dict[str, int]) -> dict[str, list[dict[str, Any]]]:
    """By recipe: without recompute, and with it."""
    modes = ("none", "full")
    found = {
        recipe: [
            train(world_size, degrees, recipe=recipe, model=model_for(recipe), recompute=mode)
            for mode in modes
        ]
        for recipe in RECIPES
    }
    found["bf16"] = [train(world_size, degrees, precision="bf16", recompute=mode) for mode in modes]
    found["smooth"] = [
        train(
            world_size,
            degrees,
            model=model_for("delayed").model_copy(update={"smooth_swiglu": True}),
            recompute=mode,
        )
        for mode in modes
    ]
    return found


@pytest.fixture(scope="module", params=list(LAYOUTS))
def both(request: pytest.FixtureRequest) -> list[dict[str, list[dict[str, Any]]]]:
    return run_ranks(runs, 2, LAYOUTS[request.param])


@pytest.mark.parametrize("run", [*RECIPES, "bf16", "smooth"])
class TestRecompute:
    def test_gives_the_same_losses_and_norms_to_the_bit(self, both: Any, run: str) -> None:
        for rank in both:
            kept, again = rank[run]
            assert again["losses"] == kept["losses"]
            assert len(set(kept["losses"])) == 4

    def test_gives_the_same_statistics(self, both: Any, run: str) -> None:
        for rank in both:
            kept, again = rank[run]
            for (names, before), (same, after) in zip(
                kept["statistics"], again["statistics"], strict=True
            ):
                assert names == same
                torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)
            if run != "bf16":
                assert float(kept["statistics"][0][1][:, 5].min()) > 0
