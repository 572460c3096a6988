"""A user's own model trains in FP8 through the engine, on stages, replicas and tensor ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel.config import HighPrecisionLayers, ModelConfig
from parallel.model_factory import FactoryError
from tests.ranks.engine_runs import LR, batches, build, fp8_config
from tests.ranks.launch_ranks import run_ranks

OWN = ModelConfig(
    factory="tests.ranks.toy_model:make",
    num_layers=3,
    options={"width": 64, "depth": 3, "vocabulary": 64},
)
KEPT = HighPrecisionLayers(first=1, names=("layers.2.mix",))
STEPS = 10


def train(world_size: int, degrees: dict[str, int], **options: Any) -> dict[str, Any]:
    fp8 = fp8_config("delayed", high_precision_layers=KEPT)
    engine = build(world_size, **degrees, model=OWN, fp8=fp8, **options)
    replica = degrees.get("tensor", 1) * degrees.get("pipeline", 1)
    results = [
        engine.train_step(batches(engine, world_size, replica, step), LR) for step in range(STEPS)
    ]
    before = {name: tensor.clone() for name, tensor in engine.live_tensors().items()}
    engine.faults.surge_mlp(1, 2.0)
    changed = {
        name
        for name, tensor in engine.live_tensors().items()
        if not torch.equal(tensor, before[name])
    }
    return {
        "losses": [float(result.loss) for result in results],
        "layers": engine.scope.layers,
        "fixed": engine.scope.fixed_layers,
        "names": [name for group in engine._groups for name in group.parameters],
        "changed": changed,
        "at": engine.coordinate,
    }


def runs(rank: int, world_size: int, degrees: dict[str, int]) -> dict[str, dict[str, Any]]:
    return {
        "kept": train(world_size, degrees),
        "recomputed": train(world_size, degrees, recompute="full"),
    }


LAYOUTS = {
    "PP2": (2, {"pipeline": 2}),
    "PP2xDP2": (4, {"pipeline": 2}),
    "TP2": (2, {"tensor": 2}),
}


@pytest.fixture(scope="module")
def alone() -> dict[str, dict[str, Any]]:
    return run_ranks(runs, 1, {})[0]


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_a_users_model_trains_in_fp8(alone: dict[str, dict[str, Any]], layout: str) -> None:
    world_size, degrees = LAYOUTS[layout]
    ranks = run_ranks(runs, world_size, degrees)
    expected = alone["kept"]["losses"]
    assert expected[-1] < 0.8 * expected[0]
    for rank in ranks:
        losses = rank["kept"]["losses"]
        assert losses == ranks[0]["kept"]["losses"]
        assert rank["recomputed"]["losses"] == losses
        # Initial weights are the same bits on every layout, over tensor ranks too.
        assert losses == pytest.approx(expected, rel=0.01)
        assert losses[0] == pytest.approx(expected[0], rel=1e-3)
    linears = {name for rank in ranks for name in rank["kept"]["layers"]}
    fixed = {name for rank in ranks for name in rank["kept"]["fixed"]}
    assert fixed == {f"layers.0.{n}" for n in ("mix", "mlp.gate_up", "mlp.down")} | {"layers.2.mix"}
    assert linears == {
        "layers.1.mix",
        "layers.1.mlp.gate_up",
        "layers.1.mlp.down",
        "layers.2.mlp.gate_up",
        "layers.2.mlp.down",
    }


def test_names_and_drills_are_those_of_its_layers(alone: dict[str, dict[str, Any]]) -> None:
    names = alone["kept"]["names"]
    assert names.count("ends.weight") == 1
    assert {"layers.1.mlp.down.weight", "layers.2.norm.bias", "layers.0.mix.weight"} < set(names)
    assert alone["kept"]["changed"] == {"matrices.parameters", "matrices.masters"}


def refused(rank: int, world_size: int) -> dict[str, str]:
    calls = {
        "layers": {"model": OWN.model_copy(update={"num_layers": 2})},
        "pattern": {
            "model": OWN,
            "fp8": fp8_config("delayed", high_precision_layers={"names": ["layers.1.mxi"]}),
        },
        "plain": {
            "model": OWN,
            "fp8": fp8_config("delayed", high_precision_layers={"names": ["layers.*"]}),
        },
        "factory": {"model": OWN.model_copy(update={"factory": "tests.ranks.toy_model:nothing"})},
        "plan": {"model": OWN.model_copy(update={"factory": "tests.ranks.toy_model:Ends"})},
    }
    messages = {}
    for name, options in calls.items():
        try:
            build(world_size, pipeline=2, **options)
        except (FactoryError, ValueError) as error:
            messages[name] = str(error)
    return messages


def test_what_breaks_the_contract_is_refused_alike_on_every_rank() -> None:
    first, second = run_ranks(refused, 2)
    assert first == second
    assert "made 3 layers with transformer=True, model.num_layers is 2" in first["layers"]
    assert "did you mean 'layers.1.mix'" in first["pattern"]
    assert "no linear of this model computes in FP8" in first["plain"]
    assert "has no nothing" in first["factory"]
    assert "can't be called" in first["plan"]
