"""The engine on the Transformer Engine scope, several ranks, on the stand-in without a GPU.

The stand-in rounds nothing, so that whatever is not its business must come out as it does in
the native BF16 layers, to the bit: initial weights, shards, recompute, gradients, updates.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel.precision.choice import BackendChoice
from tests.ranks.engine_runs import LR, batches, build
from tests.ranks.launch_ranks import run_ranks
from tests.unit.transformer_engine_stand_in import StandIn

STEPS = 3
LAYOUTS = {
    "1": (1, {}),
    "DP2": (2, {}),
    "PP2": (2, {"pipeline": 2}),
    "TP2": (2, {"tensor": 2}),
    "PP2xTP2": (4, {"pipeline": 2, "tensor": 2}),
}
"""Ranks, and degrees other than replicas."""


def train(world_size: int, degrees: dict[str, int], **options: Any) -> dict[str, Any]:
    engine = build(world_size, communication_data_type="fp32", **degrees, **options)
    replica = degrees.get("tensor", 1) * degrees.get("pipeline", 1)
    losses = [
        float(engine.train_step(batches(engine, world_size, replica, step), LR).loss)
        for step in range(STEPS)
    ]
    scaling = engine.scope.state_tensors()
    return {
        "losses": losses,
        "scales": {n: t.clone() for n, t in scaling.items() if n.endswith("scale")},
        "weights": engine.live_tensors()["matrices.masters"].clone(),
        "switchable": engine.scope.layers,
        "coordinate": engine.coordinate,
    }


def runs(rank: int, world_size: int, degrees: dict[str, int]) -> dict[str, Any]:
    StandIn().install()
    chosen = BackendChoice("transformer_engine", "a test")
    return {
        "native": train(world_size, degrees, precision="bf16"),
        "adapter": train(world_size, degrees, backend=chosen),
        "recomputed": train(world_size, degrees, backend=chosen, recompute="full"),
    }


@pytest.fixture(scope="module", params=list(LAYOUTS))
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    world_size, degrees = LAYOUTS[request.param]
    return run_ranks(runs, world_size, degrees, timeout_s=250)


class TestEveryLayout:
    @pytest.mark.parametrize("run", ["adapter", "recomputed"])
    def test_trains_as_the_native_bf16_layers_to_the_bit(self, ranks, run):
        for rank in ranks:
            assert rank[run]["losses"] == rank["native"]["losses"]
            assert torch.equal(rank[run]["weights"], rank["native"]["weights"])
            assert rank[run]["switchable"] and not rank["native"]["switchable"]

    @pytest.mark.parametrize("run", ["adapter", "recomputed"])
    def test_shares_scales_among_the_ranks_of_a_stage(self, ranks, run):
        for rank in ranks:
            stage = rank[run]["coordinate"].pipe
            first = next(r[run] for r in ranks if r[run]["coordinate"].pipe == stage)
            assert rank[run]["scales"].keys() == first["scales"].keys()
            for name, scale in rank[run]["scales"].items():
                assert torch.equal(scale, first["scales"][name]), name
                assert (scale[0] != 1.0).all(), name

    def test_recompute_makes_the_same_scales(self, ranks):
        for rank in ranks:
            for name, scale in rank["adapter"]["scales"].items():
                assert torch.equal(rank["recomputed"]["scales"][name], scale), name
