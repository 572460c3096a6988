"""A layer's return to FP8 over tensor ranks: one scale for all shards, and nothing saturates."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from parallel.config import FP8Config
from parallel.precision.scope import PrecisionScope
from parallel.tensor import TensorGroup
from tests.ranks.launch_ranks import run_ranks

WORLD, WIDTH = 2, 64
NAMES = ("layers.0.attn.qkv", "layers.0.attn.out")


def _body(rank: int, world_size: int) -> dict[str, list[float]]:
    group = dist.group.WORLD
    assert group is not None
    shared = TensorGroup(group, rank, world_size)
    scope = PrecisionScope("fp8", FP8Config(), num_layers=1, tensor=shared)
    torch.manual_seed(rank)
    column = scope.linear(NAMES[0], WIDTH, WIDTH, shard="column")
    row = scope.linear(NAMES[1], WIDTH, WIDTH, shard="row")

    def step(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(8, WIDTH, generator=generator).bfloat16().requires_grad_()
        row(column(x)).backward(torch.randn(8, WIDTH, generator=generator).bfloat16())
        scope.reduce_amax(group)
        scope.finish_step(applied=True)

    step(0), step(1)
    scope.set_precision(dict.fromkeys(NAMES, "bf16"))
    step(2)
    with torch.no_grad():
        # One shard outgrows the other while nobody looks.
        column.weight.mul_(10 if rank == 1 else 1)
    scope.statistics()
    scope.set_precision(dict.fromkeys(NAMES, "fp8"))
    scales = scope.state_tensors()["scale"].tolist()
    step(2)
    _, statistics = scope.statistics()
    return {"scales": scales, "weights": statistics[1::3, 2].tolist()}


@pytest.fixture(scope="module")
def returned() -> list[dict[str, list[float]]]:
    return run_ranks(_body, WORLD)


def test_a_return_gives_all_shards_of_a_matrix_one_scale(returned) -> None:
    first, second = returned
    assert first["scales"] == second["scales"]
    assert 1.0 not in first["scales"]


def test_a_shard_that_outgrew_the_others_does_not_saturate_on_return(returned) -> None:
    assert [rank["weights"] for rank in returned] == [[0, 0], [0, 0]]
