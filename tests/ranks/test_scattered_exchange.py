"""A rank that owns one part of the gradient gets that part's mean, in half the bytes."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from tests.ranks.launch_ranks import run_ranks
from tests.ranks.test_gradient_exchange import CASES, bits, exchange, gradient

PARTS = (1, 15, 64, 333, 1001)
"""Elements that a rank owns."""
WAYS = {
    "compiled": {},
    "plain": {"compiled": False},
    "buckets": {"bucket": 100},
    "e5m2": {"format": "e5m2"},
    "sent bf16": {"dtype": "bf16", "bucket": 100},
    "sent fp32": {"dtype": "fp32"},
}
FLOAT32_CASES = tuple(case for case in CASES if case != "bf16")

by_world_size = pytest.mark.parametrize("world_size", [2, 3])


def means(rank: int, world_size: int) -> dict[tuple[str, str, int], Tensor]:
    """What every way of exchanging leaves on this rank, of the whole gradient."""
    results = {}
    for way, options in WAYS.items():
        for case in FLOAT32_CASES:
            for part in PARTS:
                flat = gradient(case, part * world_size, rank)
                exchange(scattered=True, **options).mean_(flat)
                results[way, case, part] = flat
    return results


@functools.cache
def means_of(world_size: int) -> list[dict[tuple[str, str, int], Tensor]]:
    return run_ranks(means, world_size)


def owned(results: list[dict[tuple[str, str, int], Tensor]], *key: object) -> Tensor:
    """The parts of all ranks, each from its owner."""
    size = len(results) * key[2]
    return torch.cat(
        [mean[key][rank * size // len(results) :][: key[2]] for rank, mean in enumerate(results)]
    )


@by_world_size
@pytest.mark.parametrize(
    ("way", "error"),
    [("compiled", 0.03), ("e5m2", 0.06), ("sent bf16", 0.004), ("sent fp32", 1e-6)],
)
@pytest.mark.parametrize("case", ["uneven", "outlier"])
def test_the_mean_is_near_the_exact_one(world_size: int, way: str, error: float, case: str) -> None:
    for part in PARTS:
        mean = owned(means_of(world_size), way, case, part).double()
        size = part * world_size
        exact = sum(gradient(case, size, rank).double() for rank in range(world_size)) / world_size
        bound = error * 2.2 if case == "outlier" else error
        assert (mean - exact).norm() <= bound * exact.norm()


@by_world_size
def test_parts_of_others_keep_what_they_held(world_size: int) -> None:
    for rank, results in enumerate(means_of(world_size)):
        for (_, case, part), flat in results.items():
            before = gradient(case, part * world_size, rank)
            for other in range(world_size):
                here = slice(other * part, (other + 1) * part)
                assert other == rank or torch.equal(bits(flat[here]), bits(before[here]))


@by_world_size
def test_the_ways_of_casting_and_cutting_give_the_same_bits(world_size: int) -> None:
    results = means_of(world_size)
    for case in FLOAT32_CASES:
        for part in PARTS:
            compiled = owned(results, "compiled", case, part)
            for way in ("plain", "buckets"):
                other = owned(results, way, case, part)
                torch.testing.assert_close(compiled, other, rtol=0, atol=0, equal_nan=True)


@by_world_size
@pytest.mark.parametrize("case", ["nan", "inf"])
def test_a_nonfinite_value_reaches_its_owner_and_no_other_block(world_size: int, case: str) -> None:
    for way in WAYS:
        for part in PARTS:
            mean = owned(means_of(world_size), way, case, part)
            where = part * world_size // 2
            assert not mean[where].isfinite()
            # Blocks begin where parts do.
            block = where - where % part % 64
            assert mean[:block].isfinite().all()
            assert mean[min(block + 64, part * (where // part + 1)) :].isfinite().all()


@by_world_size
def test_zeros_stay_zeros(world_size: int) -> None:
    for way in WAYS:
        assert owned(means_of(world_size), way, "zeros", 333).count_nonzero() == 0


def statistics(rank: int, world_size: int) -> list[dict[str, float]]:
    taken = []
    for dtype in ("fp8", "bf16", "fp32"):
        subject = exchange(dtype, block=128, scattered=True)
        flat = gradient("uneven", 128 * 100 * world_size, rank)
        subject.mean_(flat)
        taken.append(subject.take_statistics())
        whole = exchange(dtype, block=128)
        whole.mean_(gradient("uneven", flat.numel(), rank))
        taken.append(whole.take_statistics())
    return taken


@by_world_size
def test_half_the_bytes_of_the_whole_exchange_are_sent(world_size: int) -> None:
    for fp8, whole_fp8, bf16, whole_bf16, fp32, whole_fp32 in run_ranks(statistics, world_size):
        sent = 128 * 100 * (world_size - 1)
        assert fp8["bytes"] == sent * 129 / 128
        assert (bf16["bytes"], fp32["bytes"]) == (2 * sent, 4 * sent)
        for part, whole in ((fp8, whole_fp8), (bf16, whole_bf16), (fp32, whole_fp32)):
            assert 2 * part["bytes"] == whole["bytes"]
            assert 2 * part["uncompressed_bytes"] == whole["uncompressed_bytes"] == 4 * sent
        assert 0.01 < fp8["relative_error"] < 0.05
        assert bf16["relative_error"] == 0.0


def repeated(rank: int, world_size: int, feedback: bool) -> tuple[Tensor, bool]:
    """The mean over exchanges of one gradient; whether a restored state gave the same bits."""
    subject = exchange(scattered=True)
    size = 300 * world_size
    residual = torch.zeros(size) if feedback else None
    mine = slice(300 * rank, 300 * (rank + 1))
    total = torch.zeros(300)
    saved = torch.zeros(size)
    after: list[Tensor] = []
    for step in range(16):
        if step == 8 and residual is not None:
            saved = residual.clone()
        flat = gradient("uneven", size, rank)
        subject.mean_(flat, residual=residual)
        total += flat[mine]
        after.append(flat[mine])
    if residual is not None:
        residual.copy_(saved)
    again = gradient("uneven", size, rank)
    subject.mean_(again, residual=residual)
    subject.mean_(gradient("nan", size, rank), residual=residual)
    finite = residual is None or bool(residual.isfinite().all())
    return total / 16, torch.equal(again[mine], after[8]) and finite


@by_world_size
def test_error_feedback_makes_up_for_rounding_and_is_state(world_size: int) -> None:
    size = 300 * world_size
    exact = sum(gradient("uneven", size, rank).double() for rank in range(world_size)) / world_size

    def error(feedback: bool) -> float:
        results = run_ranks(repeated, world_size, feedback)
        assert all(same for _, same in results)
        return float((torch.cat([mean for mean, _ in results]).double() - exact).norm())

    assert error(True) < 0.25 * error(False)


def refused(rank: int, world_size: int) -> None:
    subject = exchange(scattered=True)
    with pytest.raises(ValueError, match="equal parts"):
        subject.mean_(torch.zeros(5))
    with pytest.raises(ValueError, match="float32"):
        subject.mean_(torch.zeros(6, dtype=torch.bfloat16))


def test_unequal_parts_are_refused() -> None:
    run_ranks(refused, 2)
