"""The casts of the gradient exchange on a GPU: one fused Triton kernel a hop.

**So far these kernels have run in Triton's interpreter alone, which executes them on CPU with
NumPy, and never on a GPU**: no machine with one was at hand when they were written. What the
interpreter shows is that their bytes are those of the plain path; they also compile for
capability 9.0. That they agree on a GPU and are faster is for ``tests/gpu/test_exchange_casts.py``.

A bucket is [ranks, row] bytes, as ``parallel.gradients`` cuts it; a program takes ``GROUP`` blocks
of one row, and each hop reads its input once and writes its output once::

    pack     gradient, residual → amax → scale, codes → payload and scale byte, new residual
    mean     every rank's bytes → FP32 sum in rank order → mean → payload and scale byte
    unpack   bytes → gradient
    add      every other rank's bytes → added to this rank's own part

Promises: the bytes, values and residuals of the plain path, to the bit. Whatever decides a bit is
integer arithmetic on the fields of the floats: no FP8 cast, no division, no product of which a
compiler might flush a subnormal or fuse a sum; only the sum over ranks, its one product with
1 / ranks, and the residual's sum and difference are floating-point, each rounded once as in
PyTorch. The two sums of squares are statistics, and agree to FP32's rounding.

Import it only where Triton is installed: ``parallel.precision.exchange_casts`` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from parallel.precision.formats import Float8Format

TILE = 1024
"""Elements that a program holds in registers, at least one block."""


# In Triton's language, whose tensors have no Python types; shapes are [GROUP, WIDTH]: blocks of
# a power of two elements, of which BLOCK are real. MANTISSA, BIAS and TOP are the format's:
# mantissa bits, exponent bias, and the exponent of its greatest value, which is 1.75 * 2^TOP.


@triton.jit
def _encode(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, TOP: tl.constexpr):  # type: ignore[no-untyped-def]
    """int32 codes and, a block, the scale byte: ``block_quantize``, in integers."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # As integers magnitudes order as floats do, with Inf and NaN above all others.
    amax = tl.max(magnitude, axis=1)
    finite = amax < 0x7F800000
    # The least power of two that is at least amax / (1.75 * 2^TOP): one more where amax's
    # mantissa is above 1.75. Below FP32's range it is the least normal one, or, where the
    # quotient rounds to zero, which it does up to half the least subnormal, none.
    exponent = (amax >> 23) - TOP + ((amax & 0x7FFFFF) > 0x600000).to(tl.int32)
    exponent = tl.maximum(exponent, (amax > (7 << (TOP - 3))).to(tl.int32))
    exponent = tl.where(finite, exponent, 255)

    # A subnormal is an integer times 2^-149, which as a float of its own is normal.
    subnormal = magnitude < 0x800000
    as_integer = magnitude.to(tl.float32).to(tl.int32, bitcast=True)
    normal = tl.where(subnormal, as_integer, magnitude)
    field = (normal >> 23) - tl.where(subnormal, 149, 0) - exponent[:, None] + BIAS
    significand = (normal & 0x7FFFFF) | 0x800000
    # To nearest even: half of what is dropped, less one where the kept part is even. Of more
    # than 25 places nothing is left. A carry runs into the exponent, where it belongs.
    drop = tl.minimum(23 - MANTISSA + tl.maximum(1 - field, 0), 26)
    odd = (significand >> drop) & 1
    rounded = (significand + (1 << (drop - 1)) - 1 + odd) >> drop
    code = rounded + (tl.maximum(field - 1, 0) << MANTISSA)
    code = code | ((bits >> 24) & 0x80)
    return tl.where(finite[:, None], code, 0), exponent


@triton.jit
def _decode(code, exponent, MANTISSA: tl.constexpr, BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 values of codes under the scale bytes ``exponent``: ``block_dequantize``."""
    scale = exponent[:, None]
    fraction = code & ((1 << MANTISSA) - 1)
    eighth = (code & 0x7F) >> MANTISSA
    integer = tl.where(eighth > 0, fraction + (1 << MANTISSA), fraction)
    # The code's value is integer * 2^(eighth - BIAS - MANTISSA), with 1 for an exponent of 0.
    digits = integer.to(tl.float32).to(tl.int32, bitcast=True)
    field = (digits >> 23) + tl.maximum(eighth, 1) - BIAS - MANTISSA + scale - 127
    mantissa = digits & 0x7FFFFF
    below = (mantissa | 0x800000) >> tl.minimum(tl.maximum(1 - field, 0), 31)
    bits = tl.where(field > 0, (field << 23) | mantissa, below)
    bits = tl.where(field >= 255, 0x7F800000, bits)
    bits = tl.where((integer == 0) | (scale == 0), 0, bits)
    bits = bits | ((code & 0x80) << 24)
    bits = tl.where(scale == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _load(  # type: ignore[no-untyped-def]
    rows, at, inside, real, block, there, payload,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """float32 values of these blocks of the row whose bytes begin at ``at``."""
    code = tl.load(rows + at + inside, mask=real, other=0).to(tl.int32)
    exponent = tl.load(rows + at + payload + block, mask=there, other=0).to(tl.int32)
    return _decode(code, exponent, MANTISSA, BIAS)


@triton.jit(do_not_specialize=["skip"])
def _pack(  # type: ignore[no-untyped-def]
    x, residual, rows, squares,
    stride, residual_stride, share, end, blocks, skip,
    FEEDBACK: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """Row i of ``rows`` from the ``share`` elements of ``x`` at i * stride, before ``end``."""
    row = tl.program_id(1).to(tl.int64)
    row += (row >= skip).to(tl.int64)
    block = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    column = tl.arange(0, WIDTH)
    inside = block[:, None] * BLOCK + column[None, :]
    there = block < blocks
    real = there[:, None] & (column < BLOCK)[None, :]
    given = real & (inside < share) & (row * stride + inside < end)
    value = tl.load(x + row * stride + inside, mask=given, other=0.0)
    if FEEDBACK:
        left = tl.load(residual + row * residual_stride + inside, mask=given, other=0.0)
        value = value + left
    code, exponent = _encode(value, MANTISSA, BIAS, TOP)
    at = row * blocks * (BLOCK + 1)
    tl.store(rows + at + inside, code.to(tl.uint8), mask=real)
    tl.store(rows + at + blocks * BLOCK + block, exponent.to(tl.uint8), mask=there)
    finite = exponent < 255
    if FEEDBACK:
        # What is left for the next step; nothing of a block that can't be sent.
        left = value - _decode(code, exponent, MANTISSA, BIAS)
        left = tl.where(finite[:, None] & (tl.abs(left) < float("inf")), left, 0.0)
        tl.store(residual + row * residual_stride + inside, left, mask=given)
    # Statistics in scaled units, so that no square overflows.
    kept = tl.where(finite, exponent, 127)
    scale = ((254 - kept) << 23).to(tl.float32, bitcast=True)
    scaled = tl.where(finite[:, None], value, 0.0) * scale[:, None]
    lost = _decode(code, tl.full((GROUP,), 127, tl.int32), MANTISSA, BIAS) - scaled
    unit = tl.where(kept > 0, (kept.to(tl.int64) + (1023 - 127)) << 52, 0)
    unit = unit.to(tl.float64, bitcast=True)
    unit = unit * unit
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    error = tl.sum(lost * lost, axis=1).to(tl.float64) * unit
    norm = tl.sum(scaled * scaled, axis=1).to(tl.float64) * unit
    tl.store(squares + 2 * program, tl.sum(error, axis=0))
    tl.store(squares + 2 * program + 1, tl.sum(norm, axis=0))


@triton.jit
def _mean(  # type: ignore[no-untyped-def]
    received, sent, ranks, inverse, blocks,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """``sent``, one row, from the sum of all rows of ``received`` times ``inverse``."""
    block = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    column = tl.arange(0, WIDTH)
    inside = block[:, None] * BLOCK + column[None, :]
    there = block < blocks
    real = there[:, None] & (column < BLOCK)[None, :]
    payload = blocks * BLOCK
    row = tl.cast(payload + blocks, tl.int64)
    total = _load(received, 0, inside, real, block, there, payload, MANTISSA, BIAS)
    for rank in range(1, ranks):
        total += _load(received, row * rank, inside, real, block, there, payload, MANTISSA, BIAS)
    code, exponent = _encode(total * inverse, MANTISSA, BIAS, TOP)
    tl.store(sent + inside, code.to(tl.uint8), mask=real)
    tl.store(sent + payload + block, exponent.to(tl.uint8), mask=there)


@triton.jit
def _unpack(  # type: ignore[no-untyped-def]
    rows, out, numel, blocks,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """The first ``numel`` values of all rows' blocks, one after the other."""
    row = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    column = tl.arange(0, WIDTH)
    inside = block[:, None] * BLOCK + column[None, :]
    there = block < blocks
    real = there[:, None] & (column < BLOCK)[None, :]
    payload = blocks * BLOCK
    at = row * (payload + blocks)
    value = _load(rows, at, inside, real, block, there, payload, MANTISSA, BIAS)
    index = row * payload + inside
    tl.store(out + index, value, mask=real & (index < numel))


@triton.jit(do_not_specialize=["skip"])
def _add(  # type: ignore[no-untyped-def]
    rows, out, numel, ranks, skip, blocks,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Add every row's values but row ``skip``'s to the ``numel`` ones of ``out``."""
    block = tl.program_id(0) * GROUP + tl.arange(0, GROUP)
    column = tl.arange(0, WIDTH)
    inside = block[:, None] * BLOCK + column[None, :]
    there = block < blocks
    real = there[:, None] & (column < BLOCK)[None, :]
    given = real & (inside < numel)
    payload = blocks * BLOCK
    row = tl.cast(payload + blocks, tl.int64)
    total = tl.load(out + inside, mask=given, other=0.0)
    for other in range(ranks - 1):
        rank = other + (other >= skip).to(tl.int32)
        total += _load(rows, row * rank, inside, real, block, there, payload, MANTISSA, BIAS)
    tl.store(out + inside, total, mask=given)


class TritonCasts:
    """The hops of ``parallel.precision.exchange_casts.Casts``, each one kernel."""

    name: ClassVar[Literal["triton"]] = "triton"

    def __init__(self, format: Float8Format, block: int) -> None:
        self._block = block
        width = triton.next_power_of_2(block)
        mantissa, bias, top = (3, 7, 8) if format.name == "E4M3" else (2, 15, 15)
        self._group = max(1, TILE // width)
        self._shape = {"BLOCK": block, "WIDTH": width, "GROUP": self._group}
        self._decoding = {**self._shape, "MANTISSA": mantissa, "BIAS": bias}
        self._encoding = {**self._decoding, "TOP": top}

    def pack(
        self,
        x: Tensor,
        rows: Tensor,
        error: Tensor,
        residual: Tensor | None = None,
        skip: int | None = None,
    ) -> None:
        """See ``Casts.pack``."""
        blocks = self._blocks(rows)
        if x.dim() == 1:
            share = stride = residual_stride = blocks * self._block
            end = x.numel()
        else:
            share, stride = x.shape[1], x.stride(0)
            end = (x.shape[0] - 1) * stride + share
            residual_stride = stride if residual is None else residual.stride(0)
        grid = triton.cdiv(blocks, self._group), len(rows) - (skip is not None)
        squares = torch.empty((grid[0] * grid[1], 2), dtype=torch.float64, device=x.device)
        self._launch(
            _pack[grid],
            *(x, x if residual is None else residual, rows, squares),
            *(stride, residual_stride, share, end, blocks, len(rows) if skip is None else skip),
            FEEDBACK=residual is not None,
            **self._encoding,
        )
        # Summed in a fixed order, which atomic additions in the kernel would not be.
        error += squares.sum(0)

    def mean(self, rows: Tensor, sent: Tensor, share: Tensor) -> None:
        """See ``Casts.mean``; ``share`` is not written, the sum stays in registers."""
        blocks = self._blocks(rows)
        self._launch(
            _mean[(triton.cdiv(blocks, self._group),)],
            *(rows, sent, len(rows), 1.0 / len(rows), blocks),
            **self._encoding,
        )

    def unpack(self, rows: Tensor, out: Tensor) -> None:
        """See ``Casts.unpack``."""
        blocks = self._blocks(rows)
        self._launch(
            _unpack[triton.cdiv(blocks, self._group), len(rows)],
            *(rows, out, out.numel(), blocks),
            **self._decoding,
        )

    def add(self, rows: Tensor, out: Tensor, skip: int) -> None:
        """See ``Casts.add``."""
        blocks = self._blocks(rows)
        self._launch(
            _add[(triton.cdiv(blocks, self._group),)],
            *(rows, out, out.numel(), len(rows), skip, blocks),
            **self._decoding,
        )

    def _blocks(self, rows: Tensor) -> int:
        return rows.shape[1] // (self._block + 1)

    def _launch(self, kernel: Callable[..., object], first: Tensor, *args: Any, **of: Any) -> None:
        # Triton launches on the current device, wherever the tensors are.
        on = torch.cuda.device(first.device) if first.is_cuda else contextlib.nullcontext()
        with on:
            kernel(first, *args, enable_fp_fusion=False, **of)
