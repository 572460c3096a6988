"""Non-finite gradients, weight surges, wrong orders: what the engine does about them."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import pytest
import torch

from parallel.config import (
    FP8Config,
    GradientExchangeConfig,
    HighPrecisionLayers,
    ParallelismConfig,
)
from parallel.engine import Engine
from tests.ranks.engine_runs import LR, MODEL, batches, build
from tests.ranks.launch_ranks import run_ranks

POISONED_RANK = {4: 3, 2: 0}
"""By world size, the rank that gets the NaN."""


def state(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.live_tensors().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that differ."""
    return [name for name in left if not torch.equal(left[name], right[name])]


def poisoned_run(rank: int, world_size: int, pipeline: int) -> dict[str, Any]:
    """Six steps with a NaN in step 3, against the five others alone."""

    def run(poison: bool) -> tuple[list[str], dict[str, Any]]:
        # Error feedback is state too: the left-out gradient's rounding must not come back.
        feedback = GradientExchangeConfig(min_size=1024, error_feedback=True)
        engine = build(world_size, pipeline=pipeline, gradient_exchange=feedback)
        assert any(name.startswith("exchange.matrices.") for name in engine.live_tensors())
        losses, seen = [], {}
        for step in range(6):
            if step == 3 and not poison:
                continue
            before = state(engine)
            if step == 3 and rank == POISONED_RANK[world_size]:
                engine.faults.poison_gradient()
            result = engine.train_step(batches(engine, world_size, pipeline, step), LR)
            if step == 3:
                seen = {
                    "skipped": result.skipped,
                    "names": result.nonfinite_parameters,
                    "norm": result.grad_norm,
                    "loss": bool(result.nonfinite_loss),
                    "changed": same(before, state(engine)),
                }
            else:
                assert not result.skipped
                assert result.nonfinite_parameters == ()
                assert same(before, state(engine))
                losses.append(float(result.loss).hex())
        return losses, seen

    losses, seen = run(poison=True)
    expected, _ = run(poison=False)
    return {**seen, "losses": losses, "expected": expected}


@pytest.fixture(scope="module", params=[(4, 2), (2, 1)], ids=["PP2xDP2", "PP1xDP2"])
def poisoned(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    world_size, pipeline = request.param
    return run_ranks(poisoned_run, world_size, pipeline)


class TestNaNInOneGradientOfOneRank:
    def test_skips_the_update_on_every_rank(self, poisoned: list[dict[str, Any]]) -> None:
        assert [rank["skipped"] for rank in poisoned] == [True] * len(poisoned)
        assert {rank["norm"] for rank in poisoned} == {float("inf")}

    def test_is_named_on_that_rank_alone(self, poisoned: list[dict[str, Any]]) -> None:
        names = [rank["names"] for rank in poisoned]
        guilty = names.pop(POISONED_RANK[len(poisoned)])
        # The first matrix that the rank holds.
        assert guilty == (("embedding.weight",) if len(poisoned) == 2 else guilty[:1])
        assert guilty[0].endswith(".weight")
        assert set(names) == {()}

    def test_changes_no_bit_of_the_state(self, poisoned: list[dict[str, Any]]) -> None:
        assert [rank["changed"] for rank in poisoned] == [[]] * len(poisoned)

    def test_is_not_taken_for_a_non_finite_loss(self, poisoned: list[dict[str, Any]]) -> None:
        assert not any(rank["loss"] for rank in poisoned)

    def test_leaves_no_trace_in_later_steps(self, poisoned: list[dict[str, Any]]) -> None:
        for rank in poisoned:
            assert rank["losses"] == rank["expected"]


def surged_run(rank: int, world_size: int, factor: float, precision: str) -> dict[str, Any]:
    engine = build(world_size, pipeline=2, precision=precision)
    for step in range(8):
        before = engine.train_step(batches(engine, world_size, 2, step), LR)
        names, calm = engine.scope.statistics()
    engine.faults.surge_mlp(1, factor)
    result = engine.train_step(batches(engine, world_size, 2, 8), LR)
    names, surged = engine.scope.statistics()
    # Saturation at the old scale softens the first step; the next one has the new scale.
    later = engine.train_step(batches(engine, world_size, 2, 9), LR)
    return {
        "before": float(before.loss),
        "after": float(later.loss),
        "nonfinite_loss": bool(result.nonfinite_loss),
        "skipped": result.skipped,
        "stage": engine.coordinate.pipe,
        "calm": dict(zip(names, calm[:, 2].tolist(), strict=True)),
        "surged": dict(zip(names, surged[:, 2].tolist(), strict=True)),
    }


class TestWeightSurge:
    def test_raises_the_loss_and_saturates_the_layers_delayed_scales(self) -> None:
        saturated = set()
        for rank in run_ranks(surged_run, 4, 32.0, "fp8"):
            assert rank["after"] > 1.05 * rank["before"]
            assert not rank["skipped"]
            saturated |= {
                name
                for name, count in rank["surged"].items()
                if count > 10 * (1 + rank["calm"][name])
            }
        assert {"layers.1.mlp.gate_up/weight", "layers.1.mlp.down/input"} <= saturated
        assert not any(name.startswith("layers.0.") and "grad" not in name for name in saturated)

    def test_past_the_largest_bf16_makes_the_loss_non_finite_on_every_rank(self) -> None:
        for rank in run_ranks(surged_run, 2, 1e38, "bf16"):
            assert rank["nonfinite_loss"]
            assert rank["skipped"]


def refusals(rank: int, world_size: int) -> dict[str, str]:
    """Messages of what is refused, the same call on every rank."""
    kept = FP8Config(high_precision_layers=HighPrecisionLayers(first=1))
    engine = build(world_size, pipeline=2, fp8=kept)
    calls = {
        "unknown": lambda: engine.set_precision({"layers.9.mlp.down": "bf16"}),
        "fixed": lambda: engine.set_precision({"layers.0.mlp.down": "fp8"}),
        "surge": lambda: engine.faults.surge_mlp(3, 2.0),
        "tensor": lambda: build(
            world_size, tensor=2, model=MODEL.model_copy(update={"num_kv_heads": 1})
        ),
        "zero": lambda: build(world_size, zero_stage=3),
        "world": lambda: build(world_size, parallelism=ParallelismConfig(pipeline=3)),
        "deepspeed": lambda: build(world_size, deepspeed={"fp16": {"enabled": True}}),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            messages[name] = str(error)
    # A layer of one stage alone: no other rank minds.
    engine.set_precision({"layers.1.mlp.down": "bf16", "layers.2.mlp.down": "bf16"})
    messages["now"] = ",".join(n for n, p in engine.scope.precision().items() if p == "bf16")
    return messages


def test_wrong_orders_and_configurations_are_refused_alike_on_every_rank() -> None:
    first, second = run_ranks(refusals, 2)
    assert sorted((first.pop("now") + "," + second.pop("now")).strip(",").split(",")) == [
        "layers.1.mlp.down",
        "layers.2.mlp.down",
    ]
    assert first == second
    for name, word in {
        "unknown": "layers.9.mlp.down",
        "fixed": "layers.0.mlp.down",
        "surge": "layer 3",
        "tensor": "num_kv_heads 1 must be divisible by 2 tensor ranks",
        "zero": "ZeRO stage 3",
        "world": "2 ranks",
        "deepspeed": "fp16",
    }.items():
        assert word in first[name]


def noise(rank: int, world_size: int) -> str:
    """All that building and running an engine writes to the standard streams."""
    import deepspeed

    before = {name: vars(deepspeed)[name] for name in ("PipelineEngine", "DeepSpeedEngine")}
    kept = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile() as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        try:
            engine = build(world_size, pipeline=2)
            for step in range(3):
                engine.train_step(batches(engine, world_size, 2, step), LR)
        finally:
            os.dup2(kept[0], 1)
            os.dup2(kept[1], 2)
        stream.seek(0)
        written = stream.read().decode()
    assert before == {name: vars(deepspeed)[name] for name in before}
    assert "__compatible_ops__" not in vars(deepspeed.ops)
    assert engine._engine.__class__ is not deepspeed.PipelineEngine
    return written


def test_deepspeed_prints_nothing_and_is_left_as_it_was() -> None:
    assert run_ranks(noise, 4) == [""] * 4
