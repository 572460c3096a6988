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
import dataclasses
import functools
import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.config import EXCHANGE_BITS, ExchangeDtype, GradientExchangeConfig
from parallel.precision import exchange_casts
from parallel.precision.formats import FORMATS

_HOPS, _HOPS_SCATTERED = 3, 2
"""Generator steps of ``_exchange`` and ``_scatter``: as many buckets are under way at once."""


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
    """With the sum over ranks, its mean and the mean's rounding, which are one hop."""

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
        With ``compiled`` the casts are the fastest there are for the device
        (``exchange_casts.choose``), else the plain ones; the numbers are the same.
        """
        self.config = config
        self.dtype = dtype
        self._group = group
        self._scattered = scattered
        self._ranks = dist.get_world_size(group)
        self._rank = dist.get_rank(group)
        self._device = torch.device(device)
        self._compiled = compiled
        self._buckets: dict[tuple[int, bool], tuple[_Bucket, ...]] = {}
        self._scratch = torch.empty(0, dtype=torch.float32, device=self._device)
        self._bytes = 0
        self._uncompressed_bytes = 0
        self._error = torch.zeros(2, dtype=torch.float64, device=self._device)
        self._clock = _Clock()
        if dtype == "fp8":
            # Now, and not in the first step: the ones in C may have to be built.
            _ = self.casts

    @functools.cached_property
    def casts(self) -> exchange_casts.Casts:
        """How blocks become bytes and come back."""
        format = FORMATS[self.config.format.upper()]
        return exchange_casts.choose(
            self._device, format, self.config.block, compiled=self._compiled
        )

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
            dtype,
            self.config,
            self._group,
            self._device,
            scattered=self._scattered,
            compiled=self._compiled,
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
            residuals = None if residual is None else residual.view_as(parts)
            buckets = self._buckets_of(flat.numel(), scattered=True)
            _overlap(self._scatter(bucket, parts, mine, residuals) for bucket in buckets)
        else:
            dtype = torch.float32 if self._dtype == "fp32" else torch.bfloat16
            self._bytes += dtype.itemsize * others
            step = bucket_share(mine.numel(), self.config)
            for start in range(0, mine.numel(), step):
                # All-to-all and not reduce-scatter, which sums in the dtype that travels.
                wire = parts[:, start : start + step].to(dtype).contiguous()
                received = torch.empty_like(wire)
                with self._clock.measure("wire_s"):
                    dist.all_to_all_single(received, wire, group=self._group)
                for rank in range(self._ranks):
                    if rank != self._rank:
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
            left = None if residuals is None else residuals[:, here]
            self.casts.pack(parts[:, here], bucket.sent, self._error, left, self._rank)
        work = dist.all_to_all_single(
            bucket.received, bucket.sent, group=self._group, async_op=True
        )
        self._bytes += (self._ranks - 1) * bucket.sent[self._rank].numel()
        yield
        self._wait(work)
        with self._clock.measure("dequantize_s"):
            self.casts.add(bucket.received, mine[here], self._rank)

    def _exchange(
        self, bucket: _Bucket, x: Tensor, result: Tensor, residual: Tensor | None
    ) -> Iterator[None]:
        """Average one bucket of ``x`` into ``result``; pauses while its bytes are on the wire."""
        here = slice(bucket.start, bucket.start + bucket.numel)
        with self._clock.measure("quantize_s"):
            left = None if residual is None else residual[here]
            self.casts.pack(x[here], bucket.sent, self._error, left)
        work = dist.all_to_all_single(
            bucket.received, bucket.sent, group=self._group, async_op=True
        )
        yield
        self._wait(work)
        # The share's bytes go where its own row was sent from; that hop's error isn't counted.
        mine = bucket.sent[self._rank]
        with self._clock.measure("dequantize_s"):
            self.casts.mean(bucket.received, mine, bucket.share)
        work = dist.all_gather_single(
            bucket.gathered.view(-1), mine, group=self._group, async_op=True
        )
        self._bytes += 2 * (self._ranks - 1) * mine.numel()
        yield
        self._wait(work)
        with self._clock.measure("dequantize_s"):
            self.casts.unpack(bucket.gathered, result[here])

    def _wait(self, work: dist.Work | None) -> None:
        assert work is not None, "an asynchronous collective of this group's own rank"
        with self._clock.measure("wire_s"):
            work.wait()

    def _buckets_of(self, numel: int, scattered: bool) -> tuple[_Bucket, ...]:
        """Made once for a size of gradient and a way to go.

        No more have bytes of their own than are under way at once (``_overlap``): the rest take
        them again, so that a large gradient costs no more memory than a few buckets.
        """
        key = numel, scattered
        if key not in self._buckets:
            part = -(-numel // self._ranks)
            step = bucket_share(part, self.config) * (1 if scattered else self._ranks)
            end = numel // self._ranks if scattered else numel
            starts = range(0, end, step)
            under_way = [
                self._buffers(min(step, end), scattered)
                for _ in starts[: _HOPS_SCATTERED if scattered else _HOPS]
            ]
            self._buckets[key] = tuple(
                self._bucket(start, min(step, end - start), scattered, buffers)
                for start, buffers in zip(starts, itertools.cycle(under_way), strict=False)
            )
        return self._buckets[key]

    def _row(self, numel: int, scattered: bool) -> int:
        """Bytes of one rank's share of a bucket: its blocks' payload and their scales."""
        block = self.config.block
        blocks = -(-numel // (block * (1 if scattered else self._ranks)))
        return blocks * (block + 1)

    def _buffers(self, numel: int, scattered: bool) -> tuple[Tensor, ...]:
        """Room for what of a bucket is sent, received, gathered."""
        size = self._ranks * self._row(numel, scattered)
        sizes = (size, size, 0 if scattered else size)
        return tuple(torch.zeros(n, dtype=torch.uint8, device=self._device) for n in sizes)

    def _bucket(
        self, start: int, numel: int, scattered: bool, buffers: Sequence[Tensor]
    ) -> _Bucket:
        row = self._row(numel, scattered)
        sent, received, gathered = (buffer[: self._ranks * row].view(-1, row) for buffer in buffers)
        if scattered:
            return _Bucket(start, numel, sent, received, gathered, self._scratch[:0])
        values = row // (self.config.block + 1) * self.config.block
        mine = max(0, min(values, numel - self._rank * values))
        if self._scratch.numel() < mine:
            self._scratch = torch.empty(mine, dtype=torch.float32, device=self._device)
        return _Bucket(start, numel, sent, received, gathered, self._scratch[:mine])


def bucket_share(part: int, config: GradientExchangeConfig) -> int:
    """Elements of a bucket for each rank, out of ``part``; whole blocks, so it cuts none. Pure.

    As few buckets as ``config.bucket`` allows, as equal as they can be, since the least of them
    takes the network's latency as well. What would be a single one is halved, so that something
    overlaps, unless it is half of ``config.bucket`` or less.
    """
    most, blocks = max(1, config.bucket // config.block), -(-part // config.block)
    buckets = -(-blocks // most)
    if buckets == 1 and 2 * blocks > most:
        buckets = 2
    return -(-blocks // buckets) * config.block


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
