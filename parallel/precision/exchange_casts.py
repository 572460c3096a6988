"""What the gradient exchange does with numbers: blocks to bytes and back, one method a hop.

``choose`` says how on a device: in C on CPU where there is a compiler, in fused Triton kernels on
CUDA where Triton is, else in plain PyTorch, which is the reference for both and in no case the
fastest (``tests.benchmarks.bench_exchange_casts`` measures all of them, and torch.compile's too).
Promises: every way gives the same bytes and values, to the bit; statistics agree to FP32's
rounding. A bucket's bytes are [ranks, row]; a row, one rank's share, is its blocks' payload and
behind it their scale bytes.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
from collections.abc import Iterator
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.precision import kernels
from parallel.precision.formats import Float8Format, saturating_cast

CastsName = Literal["triton", "c", "plain"]

logger = logging.getLogger(__name__)

_NAN_BYTE = 255


class Casts(Protocol):
    """The hops of an exchange; all tensors on one device, ``rows`` uint8 [ranks, row]."""

    @property
    def name(self) -> CastsName:
        """How they are done."""

    def pack(
        self,
        x: Tensor,
        rows: Tensor,
        error: Tensor,
        residual: Tensor | None = None,
        skip: int | None = None,
    ) -> None:
        """Quantize float32 ``x`` into ``rows``.

        ``x`` is a vector, whose consecutive shares go to the rows as far as they reach, or
        [ranks, share] with any distance between its rows. ``residual``, like ``x``, is added
        first and then what rounding took away, 0 where that isn't finite. ``error`` is float64
        [2] and grows by the squared rounding error and the squared norm of the finite blocks.
        Row ``skip`` is left as it is.
        """

    def mean(self, rows: Tensor, sent: Tensor, share: Tensor) -> None:
        """Quantize the mean over ``rows``, an FP32 sum in their order, into the row ``sent``.

        ``share`` is float32 scratch, as many elements as the share has.
        """

    def unpack(self, rows: Tensor, out: Tensor) -> None:
        """The values of all rows, one after the other, as many as float32 ``out`` has elements."""

    def add(self, rows: Tensor, out: Tensor, skip: int) -> None:
        """Add every row's values but row ``skip``'s to float32 ``out``, in their order."""


def choose(
    device: torch.device, format: Float8Format, block: int, *, compiled: bool = True
) -> Casts:
    """The fastest there is for ``device``; with ``compiled`` false the plain ones."""
    casts, why = _chosen(device.type, format, block, compiled)
    _say(casts.name, device.type, why)
    return casts


def _chosen(device: str, format: Float8Format, block: int, compiled: bool) -> tuple[Casts, str]:
    if not compiled:
        return SharewiseCasts(BlockCodec(format, block, None)), "asked for"
    if device == "cuda":
        if importlib.util.find_spec("triton") is None:
            reason = "Triton is not installed: pip install 'octavo[triton]'"
            return SharewiseCasts(BlockCodec(format, block, None)), reason
        # Seconds to import, and needed on GPUs alone.
        from parallel.precision.exchange_triton import TritonCasts

        return TritonCasts(format, block), "one fused kernel a hop"
    library = kernels.load() if device == "cpu" else None
    if library is None:
        return SharewiseCasts(
            BlockCodec(format, block, None)
        ), f"there is nothing faster on {device} here"
    return SharewiseCasts(BlockCodec(format, block, library)), "built by this machine's compiler"


@functools.cache
def _say(name: CastsName, device: str, why: str) -> None:
    """Once a process: an exchange is made for each parameter group."""
    logger.info("FP8 gradient exchange on %s, casts: %s (%s)", device, name, why)


class SharewiseCasts:
    """A share after the other: in C, or in plain PyTorch."""

    def __init__(self, codec: BlockCodec) -> None:
        self._block = codec.block
        self._codec = codec
        self.name: CastsName = "plain" if codec.library is None else "c"

    def pack(
        self,
        x: Tensor,
        rows: Tensor,
        error: Tensor,
        residual: Tensor | None = None,
        skip: int | None = None,
    ) -> None:
        """See ``Casts.pack``."""
        kept = None if residual is None else self._shares(residual, rows)
        for rank, (piece, payload, scales) in enumerate(self._shares(x, rows)):
            left = next(kept)[0] if kept else None
            if rank == skip:
                continue
            fed = piece if left is None else piece + left
            self._codec.quantize(fed, payload, scales, error)
            if left is not None:
                self._codec.dequantize(payload, scales, left, add=False)
                torch.sub(fed, left, out=left)
                # A non-finite step is left out, and must not come back with the next one.
                left.nan_to_num_(0.0, posinf=0.0, neginf=0.0)

    def mean(self, rows: Tensor, sent: Tensor, share: Tensor) -> None:
        """See ``Casts.mean``."""
        for rank, row in enumerate(rows):
            self._codec.dequantize(*self._split(row), share, add=rank > 0)
        share.mul_(1.0 / len(rows))
        # This hop's error isn't counted.
        unread = torch.zeros(2, dtype=torch.float64, device=share.device)
        self._codec.quantize(share, *self._split(sent), unread)

    def unpack(self, rows: Tensor, out: Tensor) -> None:
        """See ``Casts.unpack``."""
        for piece, payload, scales in self._shares(out, rows):
            self._codec.dequantize(payload, scales, piece, add=False)

    def add(self, rows: Tensor, out: Tensor, skip: int) -> None:
        """See ``Casts.add``."""
        for rank, row in enumerate(rows):
            if rank != skip:
                self._codec.dequantize(*self._split(row), out, add=True)

    def _shares(self, x: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Each rank's part of ``x`` with its payload and scale bytes; parts may be empty."""
        for rank, row in enumerate(rows):
            payload, scales = self._split(row)
            start = rank * payload.numel()
            yield (
                x[rank] if x.dim() == 2 else x[start : start + payload.numel()],
                payload,
                scales,
            )

    def _split(self, row: Tensor) -> tuple[Tensor, Tensor]:
        payload = row.numel() // (self._block + 1) * self._block
        return row[:payload], row[payload:]


def block_quantize(
    x: Tensor, payload: Tensor, scales: Tensor, format: Float8Format, error: Tensor
) -> None:
    """Quantize the float32 vector ``x`` into ``payload`` and ``scales``, uint8, in place.

    ``scales`` is [blocks], ``payload`` [blocks · block] with at least the elements of ``x``;
    what lies behind them is zero. ``error`` is float64 [2] and grows by the squared rounding
    error and the squared norm of the finite blocks. Rounds to nearest even; blocks with an
    Inf or NaN have scale byte 255 and payload 0; of values more than 2²⁷ below a block's
    amax nothing is left, and of blocks below 2⁻¹³⁶ neither.
    """
    blocks = F.pad(x, (0, payload.numel() - x.numel())).view(scales.numel(), -1)
    amax = blocks.abs().amax(1)
    finite = torch.isfinite(amax)
    # By a tensor: CUDA turns division by a number into a product with its reciprocal.
    quotient = amax / torch.full_like(amax, format.max)
    # The exponent of the quotient, one more if there is a mantissa: rounds up to a power of 2.
    exponent = (quotient.view(torch.int32) + 0x7FFFFF) >> 23
    exponent = torch.where(finite, exponent, 0)
    scale = ((254 - exponent) << 23).view(torch.float32)
    scaled = torch.where(finite[:, None], blocks, 0.0) * scale[:, None]
    codes = saturating_cast(scaled, format)
    scale_inv = (exponent << 23).view(torch.float32).double()
    difference = codes.float() - scaled
    for i, of in enumerate((difference, scaled)):
        error[i] += (of.square().sum(1).double() * scale_inv.square()).sum()
    payload.copy_(codes.view(torch.uint8).flatten())
    scales.copy_(torch.where(finite, exponent, _NAN_BYTE))


def block_dequantize(payload: Tensor, scales: Tensor, format: Float8Format) -> Tensor:
    """float32 [blocks · block] values of ``block_quantize``'s bytes, exactly.

    A code shifted into FP32's fields has an exponent too small by the difference of the
    biases; one product mends that and normalizes subnormals, in far less time than a cast.
    """
    shift, mend = (20, 2.0**120) if format.name == "E4M3" else (21, 2.0**112)
    code = payload.to(torch.int32)
    bits = ((code & 0x7F) << shift) | ((code & 0x80) << 24)
    values = bits.view(torch.float32).mul_(mend).view(scales.numel(), -1)
    exponent = scales.to(torch.int32)
    scale_inv = torch.where(exponent == _NAN_BYTE, 0x7FC00000, exponent << 23)
    return values.mul_(scale_inv.view(torch.float32)[:, None]).flatten()


class BlockCodec:
    """Blocks to bytes and back: in C, on CPU, with a library, else in plain PyTorch."""

    def __init__(self, format: Float8Format, block: int, library: ctypes.CDLL | None) -> None:
        self.format = format
        self.block = block
        self.library = library

    def quantize(self, x: Tensor, payload: Tensor, scales: Tensor, error: Tensor) -> None:
        """``block_quantize`` in this codec's format."""
        if self.library is None:
            block_quantize(x, payload, scales, self.format, error)
            return
        self.library.octavo_block_quantize(
            x.data_ptr(),
            x.numel(),
            scales.numel(),
            self.block,
            self.format.code,
            payload.data_ptr(),
            scales.data_ptr(),
            error.data_ptr(),
        )

    def dequantize(self, payload: Tensor, scales: Tensor, out: Tensor, *, add: bool) -> None:
        """Write to ``out``, or add, as many values as it has elements."""
        if self.library is None:
            values = block_dequantize(payload, scales, self.format)[: out.numel()]
            if add:
                out.add_(values)
            else:
                out.copy_(values)
            return
        self.library.octavo_block_dequantize(
            payload.data_ptr(),
            scales.data_ptr(),
            out.numel(),
            self.block,
            self.format.code,
            add,
            out.data_ptr(),
        )
