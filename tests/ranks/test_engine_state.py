"""Rolling an engine back in place, and restoring it into a new one, is exact to the bit."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import torch

from parallel.engine import Engine
from tests.ranks.engine_runs import LR, batches, build, model_for
from tests.ranks.launch_ranks import run_ranks

POLICIES = [*itertools.product((0, 1), ("delayed", "current")), (1, "block"), (1, "mxfp8")]
FAMILIES = ("parameters", "masters", "exp_avg", "exp_avg_sq", "step", "scale", "amax_history")
"""Last parts of the names of the live tensors."""


def steps(engine: Engine, world_size: int, pipeline: int, numbers: range) -> list[tuple[str, str]]:
    """Loss and gradient norm of each step, all digits."""
    results = (
        engine.train_step(batches(engine, world_size, pipeline, step), LR * (1 + step))
        for step in numbers
    )
    return [(float(r.loss).hex(), r.grad_norm.hex()) for r in results]


def copy_out(engine: Engine) -> tuple[dict[str, torch.Tensor], str]:
    tensors = {name: tensor.clone() for name, tensor in engine.live_tensors().items()}
    return tensors, json.dumps(engine.meta())


def copy_in(engine: Engine, state: tuple[dict[str, torch.Tensor], str], leave: str = "") -> None:
    """Restore; tensors of the family ``leave`` stay as they are."""
    tensors, meta = state
    live = engine.live_tensors()
    assert live.keys() == tensors.keys()
    for name, tensor in live.items():
        if name.rpartition(".")[2] != leave:
            tensor.copy_(tensors[name])
    engine.load_meta(json.loads(meta))


def equal(left: tuple[dict[str, torch.Tensor], str], right: tuple[Any, str]) -> bool:
    return left[1] == right[1] and all(
        torch.equal(tensor, right[0][name]) for name, tensor in left[0].items()
    )


def replays(rank: int, world_size: int, pipeline: int) -> dict[tuple[int, str], dict[str, Any]]:
    """For each (ZeRO stage, recipe): what a run and its replays came to, on this rank."""
    return {
        (zero_stage, recipe): replay(world_size, pipeline, zero_stage, recipe)
        for zero_stage, recipe in POLICIES
    }


def replay(world_size: int, pipeline: int, zero_stage: int, recipe: str) -> dict[str, Any]:
    options = {
        "pipeline": pipeline,
        "zero_stage": zero_stage,
        "recipe": recipe,
        "model": model_for(recipe),
    }
    engine = build(world_size, **options)

    def run(numbers: range) -> list[tuple[str, str]]:
        return steps(engine, world_size, pipeline, numbers)

    start = copy_out(engine)
    first = run(range(3))
    middle = copy_out(engine)
    second = run(range(3, 7))
    end = copy_out(engine)

    # Into the same engine, after it went astray: weights, a layer's precision, a skipped step.
    engine.set_precision({"layers.0.mlp.down": "bf16"})
    engine.faults.surge_mlp(1, 8.0)
    run(range(20, 22))
    if engine.coordinate.data == 0:
        engine.faults.poison_gradient()
    astray = run(range(22, 24))
    copy_in(engine, middle)
    found: dict[str, Any] = {"astray": astray, "second": second}
    found["rolled back"] = run(range(3, 7))
    found["end equals"] = equal(copy_out(engine), end)

    copy_in(engine, start)
    found["first"], found["from the start"] = first, run(range(3))
    found["middle equals"] = equal(copy_out(engine), middle)

    # Which tensors are needed: leave one family out, and something must differ.
    found["left out"] = {}
    for family in FAMILIES:
        copy_in(engine, end)
        copy_in(engine, middle, leave=family)
        again = run(range(3, 7))
        found["left out"][family] = again == second and equal(copy_out(engine), end)

    engine = build(world_size, **options)
    copy_in(engine, middle)
    found["restarted"] = run(range(3, 7))
    found["restarted equals"] = equal(copy_out(engine), end)
    return found


@pytest.fixture(scope="module", params=[(4, 2), (2, 1)], ids=["PP2xDP2", "PP1xDP2"])
def replayed(request: pytest.FixtureRequest) -> list[dict[tuple[int, str], dict[str, Any]]]:
    world_size, pipeline = request.param
    return run_ranks(replays, world_size, pipeline)


@pytest.mark.parametrize(("zero_stage", "recipe"), POLICIES)
class TestReplay:
    def test_after_a_rollback_in_place_gives_the_same_bits(
        self, replayed: list[dict[tuple[int, str], dict[str, Any]]], zero_stage: int, recipe: str
    ) -> None:
        for rank in replayed:
            found = rank[zero_stage, recipe]
            assert found["rolled back"] == found["second"]
            assert found["end equals"]
            assert found["astray"][0][1] == float("inf").hex(), "the poisoned step was not skipped"
            assert found["second"][0] not in found["astray"]

    def test_from_before_the_first_step_gives_the_same_bits(
        self, replayed: list[dict[tuple[int, str], dict[str, Any]]], zero_stage: int, recipe: str
    ) -> None:
        for rank in replayed:
            found = rank[zero_stage, recipe]
            assert found["from the start"] == found["first"]
            assert found["middle equals"]

    def test_in_a_new_engine_gives_the_same_bits(
        self, replayed: list[dict[tuple[int, str], dict[str, Any]]], zero_stage: int, recipe: str
    ) -> None:
        for rank in replayed:
            found = rank[zero_stage, recipe]
            assert found["restarted"] == found["second"]
            assert found["restarted equals"]

    def test_needs_every_family_of_tensors(
        self, replayed: list[dict[tuple[int, str], dict[str, Any]]], zero_stage: int, recipe: str
    ) -> None:
        families = set(FAMILIES) - (set() if recipe == "delayed" else {"scale", "amax_history"})
        for rank in replayed:
            unchanged = rank[zero_stage, recipe]["left out"]
            assert {family for family in families if unchanged[family]} == set()


def test_all_ranks_see_the_same_losses_and_norms(
    replayed: list[dict[tuple[int, str], dict[str, Any]]],
) -> None:
    for policy in POLICIES:
        assert len({json.dumps(rank[policy]["second"]) for rank in replayed}) == 1
