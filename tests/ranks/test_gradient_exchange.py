"""The gradient exchange between real ranks: same bits everywhere, near the exact mean."""

from __future__ import annotations

import functools
import gc
import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel.config import FP8Config, GradientExchangeConfig
from parallel.gradients import GradientExchange
from parallel.precision.scope import PrecisionScope
from tests.ranks.launch_ranks import run_ranks

SIZES = (1, 15, 128, 1000, 4099)
CASES = ("uneven", "zeros", "subnormal", "outlier", "nan", "inf", "bf16")


def gradient(case: str, size: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + size)
    x = torch.randn(size, generator=generator) * 10 ** (
        4 * torch.rand(size, generator=generator) - 4
    )
    if case == "zeros":
        x.zero_()
    if case == "subnormal":
        x *= 2.0**-135
    if case == "outlier" and rank == 0:
        x[size // 2] = 1e30
    if case in ("nan", "inf") and rank == 0:
        x[size // 2] = float(case)
    return x.bfloat16() if case == "bf16" else x


def exchange(
    dtype: str = "fp8", compiled: bool = True, scattered: bool = False, **config: object
) -> GradientExchange:
    config = GradientExchangeConfig(**{"min_size": 0, "block": 64} | config)
    return GradientExchange(dtype, config, dist.group.WORLD, compiled=compiled, scattered=scattered)


def means(rank: int, world_size: int) -> dict[tuple, Tensor]:
    """What every way of exchanging leaves on this rank."""
    results = {}
    for way, options in {
        "compiled": {},
        "plain": {"compiled": False},
        "buckets": {"bucket": 200},
        "e5m2": {"format": "e5m2"},
        "sent bf16": {"dtype": "bf16"},
        "sent fp32": {"dtype": "fp32"},
    }.items():
        for case in CASES:
            for size in SIZES:
                flat = gradient(case, size, rank)
                exchange(**options).mean_(flat)
                results[way, case, size] = flat
    return results


@functools.cache
def means_of(world_size: int) -> list[dict[tuple, Tensor]]:
    return run_ranks(means, world_size)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


by_world_size = pytest.mark.parametrize("world_size", [2, 3])


@by_world_size
def test_every_rank_ends_with_the_same_bits(world_size):
    first, *others = means_of(world_size)
    for other in others:
        for key, mine in first.items():
            assert torch.equal(bits(mine), bits(other[key])), key


@by_world_size
@pytest.mark.parametrize(
    ("way", "error"), [("compiled", 0.06), ("e5m2", 0.12), ("sent bf16", 0.01), ("sent fp32", 1e-6)]
)
@pytest.mark.parametrize("case", ["uneven", "outlier", "bf16"])
def test_the_mean_is_near_the_exact_one(world_size, way, error, case):
    for size in SIZES:
        mean = means_of(world_size)[0][way, case, size].double()
        exact = sum(gradient(case, size, rank).double() for rank in range(world_size)) / world_size
        # An outlier is all of its norm: its two roundings don't average out.
        bound = error * 2.2 if case == "outlier" else error
        bound += 2.0**-8 if case == "bf16" else 0.0
        assert (mean - exact).norm() <= bound * exact.norm()


@by_world_size
def test_zeros_stay_zeros(world_size):
    for (_, case, _), mean in means_of(world_size)[0].items():
        if case == "zeros":
            assert mean.count_nonzero() == 0


@by_world_size
def test_gradients_of_subnormals_alone_do_no_harm(world_size):
    for (way, case, size), mean in means_of(world_size)[0].items():
        if case == "subnormal":
            exact = sum(gradient(case, size, rank) for rank in range(world_size)) / world_size
            assert (mean - exact).abs().max() <= 2.0**-128, way


@by_world_size
@pytest.mark.parametrize("case", ["nan", "inf"])
def test_a_nonfinite_block_is_nan_on_every_rank_and_the_others_are_finite(world_size, case):
    for results in means_of(world_size):
        for way in ("compiled", "plain", "e5m2"):
            for size in SIZES:
                mean, bad = results[way, case, size], size // 2 // 64 * 64
                assert mean[bad : bad + 64].isnan().all()
                assert mean[:bad].isfinite().all()
                assert mean[bad + 64 :].isfinite().all()


@by_world_size
def test_both_ways_of_casting_give_the_same_bits(world_size):
    results = means_of(world_size)[0]
    for case in CASES:
        for size in SIZES:
            mine, theirs = results["compiled", case, size], results["plain", case, size]
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


@by_world_size
def test_a_gradient_that_goes_in_buckets_has_the_same_bits(world_size):
    for results in means_of(world_size):
        for case in CASES:
            for size in SIZES:
                whole, parts = results["compiled", case, size], results["buckets", case, size]
                torch.testing.assert_close(whole, parts, rtol=0, atol=0, equal_nan=True)


def alone(rank: int, world_size: int) -> tuple[Tensor, dict[str, float]]:
    subject = exchange()
    flat = gradient("uneven", 1000, rank)
    subject.mean_(flat)
    with pytest.raises(ValueError, match="expected one of"):
        subject.dtype = "fp4"
    return flat, subject.take_statistics()


def test_a_single_replica_keeps_its_gradient_and_sends_nothing():
    ((mean, statistics),) = run_ranks(alone, 1)
    assert torch.equal(mean, gradient("uneven", 1000, 0))
    assert set(statistics.values()) == {0.0}


def statistics(rank: int, world_size: int) -> list[dict[str, float]]:
    subject = exchange(min_size=1000, block=128)
    taken = []
    for dtype, size in (("fp8", 64_000), ("fp8", 999), ("bf16", 64_000), ("fp32", 64_000)):
        subject.dtype = dtype
        subject.mean_(gradient("uneven", size, rank))
        taken.append(subject.take_statistics())
    return taken


def test_statistics_count_bytes_on_the_wire_and_the_rounding_error():
    for fp8, small, bf16, fp32 in run_ranks(statistics, 2):
        assert min(fp8[part] for part in ("quantize_s", "wire_s", "dequantize_s")) > 0
        assert bf16["wire_s"] > 0 == bf16["quantize_s"]
        assert fp8["uncompressed_bytes"] == 2 * 64_000
        assert fp8["bytes"] == 64_000 + 500
        assert 0.01 < fp8["relative_error"] < 0.05
        assert small["bytes"] == small["uncompressed_bytes"] == 2 * 999
        assert bf16["bytes"] == bf16["uncompressed_bytes"] == 2 * 64_000
        assert fp32["bytes"] == 4 * 64_000
        assert (small["relative_error"], bf16["relative_error"]) == (0.0, 0.0)


def repeated(rank: int, world_size: int, feedback: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of many exchanges of one gradient; with the state restored half-way, once more."""
    subject = exchange()
    residual = torch.zeros(1000) if feedback else None
    total, first_after = torch.zeros(1000), torch.zeros(0)
    for step in range(16):
        if step == 8 and residual is not None:
            saved = residual.clone()
        flat = gradient("uneven", 1000, rank)
        subject.mean_(flat, residual=residual)
        total += flat
        if step == 8:
            first_after = flat
    if residual is not None:
        residual.copy_(saved)
    again = gradient("uneven", 1000, rank)
    subject.mean_(again, residual=residual)
    poisoned = gradient("nan", 1000, rank)
    subject.mean_(poisoned, residual=residual)
    return (
        total / 16,
        torch.stack([first_after, again]),
        again if residual is None else residual,
    )


def test_error_feedback_makes_up_for_rounding_over_steps_and_is_state():
    exact = sum(gradient("uneven", 1000, rank).double() for rank in range(2)) / 2

    def error(feedback: bool) -> float:
        results = run_ranks(repeated, 2, feedback)
        for _, (last, again), residual in results:
            assert torch.equal(last, again)
            assert residual.isfinite().all()
        return ((results[0][0].double() - exact).norm() / exact.norm()).item()

    assert error(True) < 0.75 * error(False)


def in_buckets(rank: int, world_size: int) -> list[tuple[Tensor, Tensor]]:
    """Gradients and error feedback after some exchanges; first whole, then in many buckets."""
    left = []
    for bucket in (10**6, 200):
        for scattered in (False, True):
            subject = exchange(bucket=bucket, scattered=scattered)
            # Two sizes in turn, so that neither finds the other's bytes.
            residuals = {size: torch.zeros(size) for size in (4098, 1000 * world_size)}
            for step in range(6):
                for size, residual in residuals.items():
                    flat = gradient("uneven", size + step, rank)[:size]
                    subject.mean_(flat, residual=residual)
                    left.append((flat, residual.clone()))
    return left


@by_world_size
def test_error_feedback_has_the_same_bits_in_many_buckets(world_size):
    for left in run_ranks(in_buckets, world_size):
        half = len(left) // 2
        for (mean, residual), (cut, residual_cut) in zip(left[:half], left[half:], strict=True):
            assert residual.any()
            assert torch.equal(bits(mean), bits(cut))
            assert torch.equal(bits(residual), bits(residual_cut))


def kept_bytes(rank: int, world_size: int) -> list[int]:
    """What an exchange keeps for gradients of 10 and of 1000 buckets; whole, then scattered."""

    def kept(scattered: bool, buckets: int) -> int:
        subject = exchange(bucket=64, scattered=scattered)
        before = _living_bytes()
        subject.mean_(gradient("uneven", world_size * 64 * buckets, rank))
        return _living_bytes() - before

    return [kept(scattered, buckets) for scattered in (False, True) for buckets in (10, 1000)]


def _living_bytes() -> int:
    tensors = [t for t in gc.get_objects() if type(t) is Tensor]
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def test_a_large_gradient_takes_no_more_buffers_than_a_few_buckets_have():
    for whole, much_whole, scattered, much_scattered in run_ranks(kept_bytes, 2):
        assert 0 < much_whole == whole
        assert 0 < much_scattered == scattered


def reduced_amax(rank: int, world_size: int) -> list[Tensor]:
    scope = PrecisionScope("fp8", FP8Config(amax_history_len=2), num_layers=1)
    layer = scope.linear("layers.0.mlp.down", 16, 16)
    torch.manual_seed(0)
    torch.nn.init.normal_(layer.weight)
    taken = []
    for value in (1.0, math.nan if rank == 0 else 2.0):
        x = torch.full((4, 16), value * (rank + 1)).bfloat16().requires_grad_()
        layer(x).backward(torch.full((4, 16), 3.0 - rank).bfloat16())
        scope.reduce_amax(dist.group.WORLD)
        scope.finish_step(applied=True)
        taken.append(scope.statistics()[1])
    return [*taken, scope.state_tensors()["scale"]]


def test_amax_is_the_largest_of_all_replicas_and_a_nan_reaches_them_all():
    results = run_ranks(reduced_amax, 2)
    for first, second, scale in results:
        assert first[0, 0] == 2.0
        assert first[2, 0] == 3.0
        assert second[0, 0].isnan()
        assert scale[0] == 224.0
        assert torch.equal(scale, results[0][2])
