"""The mean of gradients over data-parallel replicas, in eight bits on the wire.

A flat gradient is cut into blocks; each block travels as FP8 payload and one scale byte::

    scale_inv = 2^e, the least power of two with amax / scale_inv <= fp8_max
    code      = saturating_cast(x / scale_inv)        byte = e + 127, 255 for a NaN block
    x         ≈ code * scale_inv

The hops: quantize → all-to-all, so that each rank has every replica's version of its share
→ FP32 sum in rank order, mean → quantize again → all-gather → dequantize. So there is one
rounding a hop and no sum in FP8, and every rank, the owner of a share too, takes what was
gathered: all end with the same bits. Bytes are half of BF16's ring all-reduce, plus one in
``block``. A block with an Inf or NaN on any rank is NaN on all of them; a mean beyond
FP32's range likewise.

A gradient goes in buckets, so that one is quantized while the one before it is on the wire::

    bucket 0   quantize  all-to-all  sum, quantize  all-gather  dequantize
    bucket 1             quantize    all-to-all     sum, …      all-gather   …

Buckets change no number: a block's bytes depend on the block alone.

Where the optimizer is sharded (ZeRO 1 and above) a rank needs the mean of its own part alone.
A ``scattered`` exchange stops after the sum, at half the bytes: quantize → all-to-all → FP32
sum, mean. Neither the mean nor what a rank adds to its own part is rounded.

Error feedback makes up for the first rounding, in the next step. The second, of a mean that is
gathered, stays: it is the same on all ranks and about as large, so that feedback all but ends
the long run's error where the exchange is scattered, and halves it where it is not.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from parallel.config import EXCHANGE_BITS, ExchangeDtype, GradientExchangeConfig
from parallel.precision import kernels
from parallel.precision.formats import FORMATS, Float8Format, saturating_cast

_NAN_BYTE = 255


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
    """Blocks to bytes and back: in C on CPU where there is a compiler, else in PyTorch."""

    def __init__(self, format: Float8Format, block: int, library: ctypes.CDLL | None) -> None:
        self.format = format
        self.block = block
        self._library = library

    def quantize(self, x: Tensor, payload: Tensor, scales: Tensor, error: Tensor) -> None:
        """``block_quantize`` in this codec's format."""
        if self._library is None:
            block_quantize(x, payload, scales, self.format, error)
            return
        self._library.octavo_block_quantize(
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
        if self._library is None:
            values = block_dequantize(payload, scales, self.format)[: out.numel()]
            if add:
                out.add_(values)
            else:
                out.copy_(values)
            return
        self._library.octavo_block_dequantize(
            payload.data_ptr(),
            scales.data_ptr(),
            out.numel(),
            self.block,
            self.format.code,
            add,
            out.data_ptr(),
        )


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Consecutive elements of one size of gradient; a row of bytes is one rank's share.

    Of a scattered gradient it is these elements of every rank's part, and a row is one part's.
    """

    start: int
    """Where it begins in the gradient, or in each part."""
    numel: int
    sent: Tensor
    received: Tensor
    gathered: Tensor
    """Empty for a scattered gradient, as ``share`` is."""
    share: Tensor
    """float32, as many as this rank's share has real elements."""


@dataclass(slots=True)
class _Clock:
    """Seconds since the last ``take_statistics``; on a device they are the host's, not its."""

    quantize_s: float = 0.0
    wire_s: float = 0.0
    """Waiting for others and for bytes, after all work that could be done meanwhile."""
    dequantize_s: float = 0.0

    @contextlib.contextmanager
    def measure(self, what: str) -> Iterator[None]:
        """Add the block's time to ``what``."""
        started = time.perf_counter()
        yield
        setattr(self, what, getattr(self, what) + time.perf_counter() - started)


class GradientExchange:
    """Averages flat gradient tensors over a group, compressed on the wire."""

    def __init__(
        self,
        dtype: ExchangeDtype,
        config: GradientExchangeConfig,
        group: dist.ProcessGroup,
        device: torch.device | str = "cpu",
        *,
        scattered: bool = False,
        compiled: bool = True,
    ) -> None:
        """``group`` is the replicas of this rank's parameters.

        ``scattered``: rank i takes the mean of the i-th of equal consecutive parts alone.
        With ``compiled`` the casts on CPU are the C ones where a compiler is found; the
        numbers are the same.
        """
        self.config = config
        self.dtype = dtype
        self._group = group
        self._scattered = scattered
        self._ranks = dist.get_world_size(group)
        self._rank = dist.get_rank(group)
        self._device = torch.device(device)
        on_cpu = self._device.type == "cpu"
        library = kernels.load() if compiled and on_cpu and dtype == "fp8" else None
        self._codec = BlockCodec(FORMATS[config.format.upper()], config.block, library)
        self._buckets: dict[tuple[int, bool], tuple[_Bucket, ...]] = {}
        self._bytes = 0
        self._uncompressed_bytes = 0
        self._error = torch.zeros(2, dtype=torch.float64, device=self._device)
        self._unread = torch.zeros_like(self._error)
        self._clock = _Clock()

    @property
    def dtype(self) -> ExchangeDtype:
        """What travels; may be set between steps, on every rank of the group alike."""
        return self._dtype

    @dtype.setter
    def dtype(self, dtype: ExchangeDtype) -> None:
        if dtype not in EXCHANGE_BITS:
            raise ValueError(f"gradient exchange in {dtype!r}: expected one of {[*EXCHANGE_BITS]}")
        self._dtype = dtype

    def another(self, dtype: ExchangeDtype) -> GradientExchange:
        """One like this between the same ranks, with buffers and statistics of its own."""
        return GradientExchange(
            dtype, self.config, self._group, self._device, scattered=self._scattered
        )

    @property
    def device(self) -> torch.device:
        """Where its buffers are."""
        return self._device

    @property
    def ranks(self) -> int:
        """Replicas that take part."""
        return self._ranks

    def mean_(
        self, flat: Tensor, *, residual: Tensor | None = None, scattered: bool | None = None
    ) -> None:
        """Replace ``flat`` by its mean over the group, the same bits on every rank.

        ``flat`` is a contiguous float32 or bfloat16 vector. A collective: every rank of the
        group calls it with as many elements. In FP8 those below ``min_size`` go in BF16.

        ``residual``, float32 of flat's size and contiguous, is error feedback: what rounding
        took from these elements the last time, added now and replaced. Where nothing is rounded
        to FP8 it stays as it is.

        ``scattered``: for this call, other than as the exchange was made. A scattered exchange
        takes float32 in equal parts (else ValueError), and replaces this rank's part alone: the
        others keep what they held.
        """
        scattered = self._scattered if scattered is None else scattered
        if scattered and (flat.numel() % self._ranks or flat.dtype is not torch.float32):
            raise ValueError(
                f"{flat.numel()} elements of {flat.dtype} for {self._ranks} ranks: a scattered "
                "exchange takes float32 in equal parts"
            )
        if self._ranks == 1 or flat.numel() == 0:
            return
        if scattered:
            self._scatter_mean(flat, residual)
            return
        ring = 2 * (self._ranks - 1) * flat.numel() // self._ranks
        self._uncompressed_bytes += 2 * ring
        if self._dtype == "fp8" and flat.numel() >= self.config.min_size:
            self._mean_fp8(flat, residual)
            return
        wire = flat.to(torch.float32 if self._dtype == "fp32" else torch.bfloat16)
        self._bytes += ring * wire.element_size()
        with self._clock.measure("wire_s"):
            dist.all_reduce(wire, group=self._group)
        flat.copy_(wire)
        flat.mul_(1.0 / self._ranks)

    def take_statistics(self) -> dict[str, float]:
        """``take_statistics`` of this exchange alone."""
        return take_statistics([self])

    def _mean_fp8(self, flat: Tensor, residual: Tensor | None) -> None:
        x = flat.float()
        if residual is not None:
            x = x + residual
        result = flat if flat.dtype is torch.float32 else torch.empty_like(x)
        buckets = self._buckets_of(flat.numel(), scattered=False)
        _overlap(self._exchange(bucket, x, result, residual) for bucket in buckets)
        if result is not flat:
            flat.copy_(result)

    def _scatter_mean(self, flat: Tensor, residual: Tensor | None) -> None:
        others = flat.numel() - flat.numel() // self._ranks
        self._uncompressed_bytes += 2 * others
        parts = flat.view(self._ranks, -1)
        mine = parts[self._rank]
        if self._dtype == "fp8" and flat.numel() >= self.config.min_size:
            residuals = None
            if residual is not None:
                residuals = residual.view_as(parts)
                parts = parts + residuals
            buckets = self._buckets_of(flat.numel(), scattered=True)
            _overlap(self._scatter(bucket, parts, mine, residuals) for bucket in buckets)
        else:
            dtype = torch.float32 if self._dtype == "fp32" else torch.bfloat16
            self._bytes += dtype.itemsize * others
            step = self._bucket_share()
            for start in range(0, mine.numel(), step):
                # All-to-all and not reduce-scatter, which sums in the dtype that travels.
                wire = parts[:, start : start + step].to(dtype).contiguous()
                received = torch.empty_like(wire)
                with self._clock.measure("wire_s"):
                    dist.all_to_all_single(received, wire, group=self._group)
                for rank in self._others():
                    mine[start : start + step].add_(received[rank])
        mine.mul_(1.0 / self._ranks)

    def _scatter(
        self, bucket: _Bucket, parts: Tensor, mine: Tensor, residuals: Tensor | None
    ) -> Iterator[None]:
        """Add the other ranks' values of one bucket to ``mine``; pauses as ``_exchange`` does.

        ``parts`` and ``residuals`` are [ranks, elements of a part]; ``mine`` is this rank's
        own values, with no rounding to feed back.
        """
        here = slice(bucket.start, bucket.start + bucket.numel)
        with self._clock.measure("quantize_s"):
            for rank in self._others():
                x = parts[rank, here]
                payload, scales = self._split(bucket.sent[rank])
                self._codec.quantize(x, payload, scales, self._error)
                if residuals is not None:
                    kept = residuals[rank, here]
                    self._codec.dequantize(payload, scales, kept, add=False)
                    torch.sub(x, kept, out=kept)
                    kept.nan_to_num_(0.0, posinf=0.0, neginf=0.0)
        work = dist.all_to_all_single(
            bucket.received, bucket.sent, group=self._group, async_op=True
        )
        self._bytes += (self._ranks - 1) * bucket.sent[self._rank].numel()
        yield
        self._wait(work)
        with self._clock.measure("dequantize_s"):
            for rank in self._others():
                payload, scales = self._split(bucket.received[rank])
                self._codec.dequantize(payload, scales, mine[here], add=True)

    def _others(self) -> Iterator[int]:
        return (rank for rank in range(self._ranks) if rank != self._rank)

    def _exchange(
        self, bucket: _Bucket, x: Tensor, result: Tensor, residual: Tensor | None
    ) -> Iterator[None]:
        """Average one bucket of ``x`` into ``result``; pauses while its bytes are on the wire."""
        here = slice(bucket.start, bucket.start + bucket.numel)
        with self._clock.measure("quantize_s"):
            for piece, payload, scales in self._shares(x[here], bucket.sent):
                self._codec.quantize(piece, payload, scales, self._error)
            if residual is not None:
                self._keep_residual(x[here], bucket.sent, residual[here])
        work = dist.all_to_all_single(
            bucket.received, bucket.sent, group=self._group, async_op=True
        )
        yield
        self._wait(work)
        with self._clock.measure("dequantize_s"):
            for rank in range(self._ranks):
                payload, scales = self._split(bucket.received[rank])
                self._codec.dequantize(payload, scales, bucket.share, add=rank > 0)
            bucket.share.mul_(1.0 / self._ranks)
        # The share's bytes go where its own row was sent from; that hop's error isn't counted.
        mine = bucket.sent[self._rank]
        with self._clock.measure("quantize_s"):
            self._codec.quantize(bucket.share, *self._split(mine), self._unread)
        work = dist.all_gather_single(
            bucket.gathered.view(-1), mine, group=self._group, async_op=True
        )
        self._bytes += 2 * (self._ranks - 1) * mine.numel()
        yield
        self._wait(work)
        with self._clock.measure("dequantize_s"):
            for piece, payload, scales in self._shares(result[here], bucket.gathered):
                self._codec.dequantize(payload, scales, piece, add=False)

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None, "an asynchronous collective of this group's own rank"
        with self._clock.measure("wire_s"):
            work.wait()

    def _keep_residual(self, x: Tensor, sent: Tensor, residual: Tensor) -> None:
        for piece, payload, scales in self._shares(residual, sent):
            self._codec.dequantize(payload, scales, piece, add=False)
        torch.sub(x, residual, out=residual)
        # A non-finite step is left out, and must not come back with the next one.
        residual.nan_to_num_(0.0, posinf=0.0, neginf=0.0)

    def _shares(self, x: Tensor, bytes_: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Each rank's part of ``x`` with its payload and scale bytes; parts may be empty."""
        for rank, row in enumerate(bytes_):
            payload, scales = self._split(row)
            start = rank * payload.numel()
            yield x[start : start + payload.numel()], payload, scales

    def _split(self, row: Tensor) -> tuple[Tensor, Tensor]:
        blocks = row.numel() // (self.config.block + 1)
        return row[: blocks * self.config.block], row[blocks * self.config.block :]

    def _buckets_of(self, numel: int, scattered: bool) -> tuple[_Bucket, ...]:
        """Made once for a size of gradient and a way to go."""
        key = numel, scattered
        if key not in self._buckets:
            step = self._bucket_share() * (1 if scattered else self._ranks)
            end = numel // self._ranks if scattered else numel
            self._buckets[key] = tuple(
                self._bucket(start, min(step, end - start), scattered)
                for start in range(0, end, step)
            )
        return self._buckets[key]

    def _bucket_share(self) -> int:
        """Elements of a bucket for each rank; whole blocks, so that buckets cut none."""
        return max(1, self.config.bucket // self.config.block) * self.config.block

    def _bucket(self, start: int, numel: int, scattered: bool) -> _Bucket:
        block = self.config.block
        blocks = -(-numel // (block * (1 if scattered else self._ranks)))
        shape = (self._ranks, blocks * (block + 1))
        sent, received, gathered = (
            torch.zeros(shape, dtype=torch.uint8, device=self._device) for _ in range(3)
        )
        if scattered:
            return _Bucket(start, numel, sent, received, gathered[:0], sent.new_empty(0))
        before = min(numel, self._rank * blocks * block)
        share = torch.zeros(
            min(blocks * block, numel - before), dtype=torch.float32, device=self._device
        )
        return _Bucket(start, numel, sent, received, gathered, share)


def take_statistics(exchanges: Sequence[GradientExchange]) -> dict[str, float]:
    """Of several exchanges together, since the last call; on one device.

    ``bytes`` this rank sent, ``uncompressed_bytes`` that BF16 would have taken, and
    ``relative_error``, the 2-norm of what rounding the gradients it sent to FP8 took away over
    their 2-norm (0 when nothing went in FP8); ``quantize_s``, ``wire_s`` and ``dequantize_s``,
    where the time went.

    The one place that waits for the device.
    """
    error, norm = torch.stack([exchange._error for exchange in exchanges]).sum(0).tolist()
    statistics = {
        "bytes": float(sum(exchange._bytes for exchange in exchanges)),
        "uncompressed_bytes": float(sum(exchange._uncompressed_bytes for exchange in exchanges)),
        "relative_error": (error / norm) ** 0.5 if norm > 0 else 0.0,
    }
    for field in dataclasses.fields(_Clock):
        statistics[field.name] = sum(getattr(exchange._clock, field.name) for exchange in exchanges)
    for exchange in exchanges:
        exchange._clock = _Clock()
        exchange._bytes = exchange._uncompressed_bytes = 0
        exchange._error.zero_()
    return statistics


def _overlap(exchanges: Iterable[Iterator[None]]) -> None:
    """Run them to their ends, each begun before the ones before it are waited for.

    Each hop of a bucket is one generator step, so that the next bucket's first hop is under
    way before this one's is waited for. All ranks take the same steps.
    """
    waiting: deque[Iterator[None]] = deque()
    for exchange in exchanges:
        waiting.append(exchange)
        next(exchange)
        for earlier in list(waiting)[-2::-1]:
            if _ended(earlier):
                waiting.remove(earlier)
    while waiting:
        if _ended(waiting[0]):
            waiting.popleft()


def _ended(hops: Iterator[None]) -> bool:
    """Take the next hop; whether it was the last."""
    return next(hops, True) is True
