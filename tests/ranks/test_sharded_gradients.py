"""ZeRO 2: DeepSpeed's buckets are averaged by the exchange, in every micro-batch."""

from __future__ import annotations

from typing import Any

import pytest

from parallel.config import GradientExchangeConfig
from tests.ranks.engine_runs import build
from tests.ranks.launch_ranks import run_ranks
from tests.ranks.test_sharded_optimizer import train

CUT = {"zero_optimization": {"reduce_bucket_size": 10_000}}
"""Several buckets a micro-batch, none of which ends where a partition does."""
ZERO_2: dict[str, Any] = {
    "zero_stage": 2,
    "gradient_exchange": GradientExchangeConfig(min_size=1024),
}
TOLERANCE = 0.03
"""Relative difference of the last losses allowed to the rounding of every micro-batch."""


def runs(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    exact = {"communication_data_type": "fp32"}
    return {
        "zero 0": train(world_size, zero_stage=0),
        "one bucket": train(world_size, **ZERO_2),
        "cut": train(world_size, **ZERO_2, deepspeed=CUT),
        "bf16": train(world_size, 2, **ZERO_2, communication_data_type="bf16"),
        "fp32": train(world_size, 2, **ZERO_2, **exact, deepspeed=CUT),
        "zero 0 fp32": train(world_size, 2, zero_stage=0, **exact),
    }


Ranks = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module", params=[2, 3], ids=["DP2", "DP3"])
def ranks(request: pytest.FixtureRequest) -> Ranks:
    return run_ranks(runs, request.param, timeout_s=240.0)


def test_replicas_hold_the_same_parameters_to_the_bit_after_50_steps(ranks: Ranks) -> None:
    for run in ranks[0]:
        assert len({rank[run]["digest"] for rank in ranks}) == 1
        assert len({tuple(rank[run]["losses"]) for rank in ranks}) == 1
        assert len({tuple(rank[run]["norms"]) for rank in ranks}) == 1


def test_it_learns_as_zero_0(ranks: Ranks) -> None:
    def last(run: str) -> float:
        return sum(ranks[0][run]["losses"][-10:]) / 10

    assert last("zero 0") < 0.6 * ranks[0]["zero 0"]["losses"][0], "nothing was learnt"
    for run in ("one bucket", "cut"):
        assert last(run) == pytest.approx(last("zero 0"), rel=TOLERANCE)


def test_the_norm_is_that_of_zero_0(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["fp32"]["norms"] == pytest.approx(rank["zero 0 fp32"]["norms"], rel=1e-3)
        assert rank["cut"]["norms"][0] == pytest.approx(rank["fp32"]["norms"][0], rel=0.01)


def test_every_micro_batch_is_sent_in_half_of_bf16s_bytes(ranks: Ranks) -> None:
    for rank in ranks:
        fp8, bf16, once = (rank[run]["comm"] for run in ("one bucket", "bf16", "zero 0"))
        assert 0 < fp8["bytes"] / 50 < 0.54 * bf16["bytes"] / 2
        # Two micro-batches, and of each the half in which parts come to their owners.
        assert fp8["bytes"] == pytest.approx(once["bytes"], rel=0.05)
        assert 0.01 < fp8["relative_error"] < 0.05
        # A bucket that one replica owns goes as a whole.
        assert 1.3 * fp8["bytes"] < rank["cut"]["comm"]["bytes"] < 2.1 * fp8["bytes"]


BF16: dict[str, Any] = {"data_types": {"grad_accum_dtype": "bf16"}}
SMALL: dict[str, Any] = {"zero_optimization": {"reduce_bucket_size": 1_000}}
"""Less than the head has, whose gradient comes first: DeepSpeed then reduces an empty bucket."""


def large_first(rank: int, world_size: int) -> list[tuple[list[float], list[float]]]:
    def losses(stage: int, deepspeed: dict[str, Any]) -> list[float]:
        exact = {"communication_data_type": "fp32", "zero_stage": stage}
        return train(world_size, 3, deepspeed=deepspeed, **exact)["losses"]

    cases: tuple[tuple[int, dict[str, Any]], ...] = ((2, {}), (1, BF16))
    return [(losses(stage, kind), losses(stage, kind | SMALL)) for stage, kind in cases]


def test_parameters_larger_than_a_bucket_are_averaged_too() -> None:
    for losses in run_ranks(large_first, 2):
        for whole, small in losses:
            assert small == pytest.approx(whole, rel=1e-3)


def refused(rank: int, world_size: int) -> None:
    for options in ({"pipeline": 2}, {"tensor": 2}):
        with pytest.raises(ValueError, match="make it 1"):
            build(world_size, **(ZERO_2 | options))
    with pytest.raises(ValueError, match="only 0, 1 and 2"):
        build(world_size, zero_stage=3)


def test_what_it_does_not_go_with_is_refused() -> None:
    run_ranks(refused, 2)
