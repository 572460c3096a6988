"""However the ranks are laid out, the same model is trained."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch

from parallel.engine import Engine
from tests.ranks.engine_runs import LR, batches, build
from tests.ranks.launch_ranks import run_ranks

STEPS = 10
TOLERANCE = 0.01
"""Relative difference of losses allowed to layouts, and to the exchange's FP8 rounding.

Measured: up to 0.0023. Gradients are summed in another order, and the clipping factor's last
bits differ; ten steps at a high learning rate multiply that.
"""


def digest(engine: Engine) -> str:
    """Of the parameters that this rank computes with."""
    found = hashlib.blake2b()
    for name, tensor in engine.live_tensors().items():
        if name.endswith(".parameters"):
            found.update(tensor.view(dtype=torch.uint8).numpy().tobytes())
    return found.hexdigest()


def train(world_size: int, pipeline: int, **options: Any) -> dict[str, Any]:
    alone = options.pop("alone", False)
    engine = build(world_size, pipeline=pipeline, **options)
    engine._hooks._exchanging = engine._hooks._exchanging and not alone
    losses = [
        float(engine.train_step(batches(engine, world_size, pipeline, step), LR).loss)
        for step in range(STEPS)
    ]
    return {
        "losses": losses,
        "stage": engine.coordinate.pipe,
        "digest": digest(engine),
        "comm": engine.take_exchange_statistics(),
        "layers": engine.scope.layers,
    }


def runs(rank: int, world_size: int, pipeline: int) -> dict[str, dict[str, Any]]:
    found = {
        "fp8": train(world_size, pipeline),
        "zero 0": train(world_size, pipeline, zero_stage=0),
        "fp32 exchange": train(world_size, pipeline, communication_data_type="fp32"),
        "bf16": train(world_size, pipeline, precision="bf16", communication_data_type="bf16"),
    }
    if world_size > pipeline:
        # The control: what the tolerance must tell from training together.
        found["alone"] = train(world_size, pipeline, alone=True)
    return found


Ranks = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def layouts() -> dict[str, Ranks]:
    """By layout, each rank's runs."""
    return {
        "PP1xDP1": run_ranks(runs, 1, 1),
        "PP2xDP1": run_ranks(runs, 2, 2),
        "PP1xDP2": run_ranks(runs, 2, 1),
        "PP2xDP2": run_ranks(runs, 4, 2),
    }


def furthest(left: list[float], right: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("layout", ["PP2xDP1", "PP1xDP2", "PP2xDP2"])
@pytest.mark.parametrize("run", ["fp8", "zero 0", "fp32 exchange", "bf16"])
def test_losses_are_those_of_one_rank_within_the_tolerance(
    layouts: dict[str, Ranks], layout: str, run: str
) -> None:
    expected = layouts["PP1xDP1"][0][run]["losses"]
    assert expected[-1] < 0.8 * expected[0], "nothing was learnt"
    for rank in layouts[layout]:
        assert furthest(rank[run]["losses"], expected) < TOLERANCE


@pytest.mark.parametrize("layout", ["PP1xDP2", "PP2xDP2"])
def test_the_tolerance_tells_replicas_that_do_not_exchange(
    layouts: dict[str, Ranks], layout: str
) -> None:
    expected = layouts["PP1xDP1"][0]["fp8"]["losses"]
    assert furthest(layouts[layout][0]["alone"]["losses"], expected) > 2 * TOLERANCE


@pytest.mark.parametrize("layout", ["PP2xDP1", "PP1xDP2", "PP2xDP2"])
@pytest.mark.parametrize("run", ["fp8", "bf16"])
def test_every_rank_is_told_the_same_loss(layouts: dict[str, Ranks], layout: str, run: str) -> None:
    told = {tuple(rank[run]["losses"]) for rank in layouts[layout]}
    assert len(told) == 1


@pytest.mark.parametrize("layout", ["PP1xDP2", "PP2xDP2"])
@pytest.mark.parametrize("run", ["fp8", "zero 0", "bf16"])
def test_replicas_hold_the_same_parameters_to_the_bit(
    layouts: dict[str, Ranks], layout: str, run: str
) -> None:
    digests: dict[int, set[str]] = {}
    for rank in layouts[layout]:
        digests.setdefault(rank[run]["stage"], set()).add(rank[run]["digest"])
    assert all(len(stage) == 1 for stage in digests.values())
    assert len({next(iter(stage)) for stage in digests.values()}) == len(digests)


@pytest.mark.parametrize("layout", ["PP1xDP2", "PP2xDP2"])
def test_zero_1_receives_one_rounding_less_than_zero_0(
    layouts: dict[str, Ranks], layout: str
) -> None:
    for rank in layouts[layout]:
        sharded, whole = rank["fp8"], rank["zero 0"]
        assert furthest(sharded["losses"], whole["losses"]) < TOLERANCE
        assert sharded["digest"] != whole["digest"]
        assert sharded["comm"]["bytes"] < 0.6 * whole["comm"]["bytes"]


def test_every_stage_has_its_own_linears(layouts: dict[str, Ranks]) -> None:
    first, _, last, _ = (rank["fp8"]["layers"] for rank in layouts["PP2xDP2"])
    assert first
    assert last
    assert (*first, *last) == layouts["PP1xDP1"][0]["fp8"]["layers"]
    assert layouts["PP2xDP2"][0]["bf16"]["layers"] == ()


@pytest.mark.parametrize("layout", ["PP1xDP2", "PP2xDP2"])
def test_fp8_crosses_the_network_in_about_half_the_bytes(
    layouts: dict[str, Ranks], layout: str
) -> None:
    for rank in layouts[layout]:
        compressed, half = rank["fp8"]["comm"], rank["bf16"]["comm"]
        assert 0 < compressed["bytes"] < 0.6 * half["bytes"]
        assert 0 < compressed["relative_error"] < 0.05


def test_one_replica_sends_nothing(layouts: dict[str, Ranks]) -> None:
    assert layouts["PP2xDP1"][0]["fp8"]["comm"]["bytes"] == 0
