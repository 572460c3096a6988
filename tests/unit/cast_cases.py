"""Gradients of every kind and the hops of an exchange over them, for tests that compare casts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parallel.precision.exchange_casts import BlockCodec, Casts, SharewiseCasts
from parallel.precision.formats import FORMATS

KINDS = ("any bits", "usual", "subnormal", "huge")


def gradients(seed: int, numel: int, kind: str) -> Tensor:
    """float32 [numel] of every magnitude that matters, in runs of about a block."""
    draw = np.random.default_rng(seed)
    if kind == "any bits":
        # Any float there is: infinities, NaN and subnormals among them.
        return torch.from_numpy(draw.integers(0, 2**32, numel, np.uint32).view(np.float32))
    lowest, highest = {"usual": (-40, 10), "subnormal": (-150, -126), "huge": (100, 128)}[kind]
    octaves = np.repeat(draw.uniform(lowest, highest, numel // 16 + 1), 16)[:numel]
    with np.errstate(over="ignore"):
        values = (draw.uniform(-1, 1, numel) * 2.0**octaves).astype(np.float32)
    values[draw.random(numel) < 0.1] = draw.choice([0.0, -0.0])
    return torch.from_numpy(values)


def rows_for(ranks: int, numel: int, block: int) -> Tensor:
    """Rows of bytes for shares of ``numel`` elements, with something else in them."""
    return torch.full((ranks, -(-numel // block) * (block + 1)), 77, dtype=torch.uint8)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """NaN is NaN, whatever its payload; zeros have signs."""
    if one.dtype is not torch.float32:
        return torch.equal(one, other)
    nan = one.isnan()
    return torch.equal(nan, other.isnan()) and torch.equal(
        one.view(torch.int32)[~nan], other.view(torch.int32)[~nan]
    )


def reference(hop: str, format: str, block: int, *args: Any) -> list[Any]:
    """The arguments after the plain way's ``hop``."""
    told = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
    getattr(SharewiseCasts(BlockCodec(FORMATS[format], block, None)), hop)(*told)
    return told


def hop_cases(format: str) -> Iterator[tuple[str, int, tuple[Any, ...]]]:
    """Hop, block and arguments, on CPU: all kinds, sizes beside whole blocks, three ranks."""
    ranks = 3
    for block, numel in ((128, 3 * 128 * 70 + 5), (128, 97), (20, 2000)):
        for seed, kind in enumerate(KINDS):
            error = torch.zeros(2, dtype=torch.float64)
            vector = gradients(seed, numel, kind)
            rows = rows_for(ranks, -(-numel // ranks), block)
            yield "pack", block, (vector, rows, error)
            yield "pack", block, (vector, rows, error, gradients(seed + 9, numel, "usual"))
            packed = reference("pack", format, block, vector, rows, error)[1]
            yield "unpack", block, (packed, torch.full((numel,), 5.0))
            parts = gradients(seed, ranks * numel, kind).view(ranks, numel)
            left = gradients(seed + 9, ranks * numel, "usual").view(ranks, numel)
            rows = rows_for(ranks, numel, block)
            yield "pack", block, (parts, rows, error, left, 1)
            received = reference("pack", format, block, parts, rows, error)[1]
            yield "mean", block, (received, rows[0], torch.full((numel,), 5.0))
            yield "add", block, (received, gradients(seed + 9, numel, "usual"), 2)


def compare(make: Callable[[str, int], Casts], format: str, device: str) -> int:
    """Hold ``make(format, block)`` to the plain way in every case; how many there were.

    Raises AssertionError with the first case that differs in a bit, or in a sum of squares by
    more than FP32's rounding. What ``mean`` leaves in its scratch is nobody's.
    """
    count = 0
    for hop, block, args in hop_cases(format):
        told = [arg.to(device, copy=True) if isinstance(arg, Tensor) else arg for arg in args]
        getattr(make(format, block), hop)(*told)
        for place, (mine, plain) in enumerate(
            zip(told, reference(hop, format, block, *args), strict=True)
        ):
            if not isinstance(mine, Tensor) or (hop, place) == ("mean", 2):
                continue
            where = f"{hop}, {format}, blocks of {block}, case {count}, argument {place}"
            if mine.dtype is torch.float64:
                torch.testing.assert_close(mine.cpu(), plain, rtol=1e-5, atol=0, msg=where)
            else:
                assert same_bits(mine.cpu(), plain), where
        count += 1
    return count
