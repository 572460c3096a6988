"""Blocks of the gradient exchange against the plain formula, in PyTorch and in C."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel.precision import kernels
from parallel.precision.exchange_casts import BlockCodec, block_dequantize
from parallel.precision.formats import E4M3, E5M2, Float8Format

NUMPY = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2}
BLOCK = 16

by_format = pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda format: format.name)
by_way = pytest.mark.parametrize("way", ["compiled", "plain"])


def plain_formula(x: np.ndarray, format: Float8Format) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and exponents of blocks, from the definition, one block at a time."""
    codes, scales = [], []
    for block in x.reshape(-1, BLOCK):
        if not np.isfinite(block).all():
            codes.append(np.zeros(BLOCK, np.uint8))
            scales.append(255)
            continue
        quotient = np.abs(block).max() / np.float32(format.max)
        mantissa, exponent = math.frexp(quotient)
        exponent = exponent - 1 if mantissa == 0.5 else exponent
        # FP32's least normal exponent is the least there is; 0 stands for blocks of zeros.
        exponent = 0 if quotient == 0 else max(exponent + 127, 1)
        scaled = block.astype(np.float64) * 2.0 ** (127 - exponent)
        clipped = np.clip(scaled.astype(np.float32), -format.max, format.max)
        codes.append(clipped.astype(NUMPY[format.name]).view(np.uint8))
        scales.append(exponent)
    return np.concatenate(codes), np.array(scales, np.uint8)


def quantize(x: Tensor, format: Float8Format, way: str, blocks: int) -> tuple[Tensor, ...]:
    library = kernels.load() if way == "compiled" else None
    assert way == "plain" or library is not None, "the tests need a C compiler"
    payload = torch.full((blocks * BLOCK,), 77, dtype=torch.uint8)
    scales = torch.full((blocks,), 77, dtype=torch.uint8)
    error = torch.zeros(2, dtype=torch.float64)
    codec = BlockCodec(format, BLOCK, library)
    codec.quantize(x, payload, scales, error)
    values = torch.full((x.numel(),), 5.0)
    codec.dequantize(payload, scales, values, add=False)
    added = torch.ones(x.numel())
    codec.dequantize(payload, scales, added, add=True)
    torch.testing.assert_close(added, values + 1, rtol=0, atol=0, equal_nan=True)
    return payload, scales, values, error


FLOATS = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.floats(width=32, min_value=-1, max_value=1),
    st.floats(width=32, min_value=0, max_value=2.0**-126),
    st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan, 3.0e38]),
)


@by_format
@settings(max_examples=150, deadline=None)
@given(st.lists(FLOATS, min_size=BLOCK, max_size=4 * BLOCK).map(lambda v: v[: len(v) // 16 * 16]))
def test_both_ways_give_the_bytes_of_the_plain_formula(format, values):
    x = torch.tensor(values, dtype=torch.float32)
    codes, exponents = plain_formula(x.numpy(), format)
    for way in ("compiled", "plain"):
        payload, scales, _, _ = quantize(x, format, way, x.numel() // BLOCK)
        np.testing.assert_array_equal(scales.numpy(), exponents)
        np.testing.assert_array_equal(payload.numpy(), codes)


@by_format
@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 70),
    st.integers(-120, 100),
    st.integers(0, 2**31),
)
def test_values_come_back_within_half_a_last_place_of_the_block(format, size, octave, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator) * 2.0**octave
    _, _, values, error = quantize(x, format, "compiled", -(-size // BLOCK))
    places = 3 if format is E4M3 else 2
    for block, back in zip(x.split(BLOCK), values.split(BLOCK), strict=True):
        # Normal values lose half a last place; below, half the least subnormal, which is at
        # most twice what the amax would allow because the scale is a power of two.
        floor = block.abs().max() * 2 * format.min_subnormal / format.max
        bound = torch.maximum(block.abs() * 2.0 ** -(places + 1), floor)
        assert torch.all((back - block).abs() <= bound)
    measured = (values.double() - x.double()).square().sum()
    torch.testing.assert_close(error[0], measured, rtol=1e-4, atol=0)
    torch.testing.assert_close(error[1], x.double().square().sum(), rtol=1e-4, atol=0)


@by_format
@by_way
def test_a_block_of_zeros_comes_back_as_zeros(format, way):
    _, scales, values, error = quantize(torch.zeros(40), format, way, 3)
    assert values.count_nonzero() == 0
    assert scales.tolist() == [0, 0, 0]
    assert error.tolist() == [0.0, 0.0]


@by_format
@by_way
def test_powers_of_two_and_what_lies_behind_the_end_are_exact(format, way):
    x = torch.tensor([2.0**-k for k in range(13)])
    payload, _, values, error = quantize(x, format, way, 2)
    assert torch.equal(values, x)
    assert payload[13:].count_nonzero() == 0
    assert error[0] == 0


@by_format
@by_way
def test_an_outlier_costs_its_own_block_alone(format, way):
    x = torch.randn(3 * BLOCK, generator=torch.Generator().manual_seed(0))
    _, _, expected, _ = quantize(x, format, way, 3)
    x[20] = 1e30
    _, _, values, _ = quantize(x, format, way, 3)
    assert torch.equal(values[:BLOCK], expected[:BLOCK])
    assert torch.equal(values[2 * BLOCK :], expected[2 * BLOCK :])
    assert values[BLOCK : 2 * BLOCK].count_nonzero() == 1
    assert values[20] == pytest.approx(1e30, rel=0.07)


@by_format
@by_way
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_value_makes_its_block_nan_and_no_other(format, way, bad):
    x = torch.randn(3 * BLOCK, generator=torch.Generator().manual_seed(0))
    x[BLOCK + 3] = bad
    _, _, values, error = quantize(x, format, way, 3)
    assert values[BLOCK : 2 * BLOCK].isnan().all()
    assert values[:BLOCK].isfinite().all()
    assert values[2 * BLOCK :].isfinite().all()
    assert error.isfinite().all()


@by_format
def test_every_code_dequantizes_to_its_value_times_the_scale(format):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    expected = codes.numpy().view(NUMPY[format.name]).astype(np.float32)
    numbers = np.isfinite(expected)
    for exponent in (3, 127, 230):
        scales = torch.full((16,), exponent, dtype=torch.uint8)
        mine = block_dequantize(codes, scales, format).numpy()[numbers]
        with np.errstate(over="ignore"):
            scaled = expected[numbers] * np.float32(2.0 ** (exponent - 127))
        np.testing.assert_array_equal(mine, scaled)
