"""The gradient exchange's casts, every way there is: what the choice of one rests on.

    python -m tests.benchmarks.bench_exchange_casts [--millions 0.3 1 16] [--ranks 2] [--repeats 7]
                                                    [--out DIR]

What a rank does with a gradient beside sending it, in the exchange's buckets: ``pack`` the own
gradient, sum all ranks' shares and round their ``mean``, ``unpack`` what was gathered. The ways
take turns in one run, on one thread. A way whose bits aren't the plain way's is counted as failed.
torch.compile is given the plain way's two functions, a share at a time, as the plain way calls
them; where a share ends inside a block, torch 2.13's makes zeros of some of that block's values on
CPU, which the size of 0.3 M shows. On a machine with CUDA the same is measured there, with Triton
in the place of C.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from parallel.config import GradientExchangeConfig
from parallel.precision import exchange_casts
from parallel.precision.exchange_casts import BlockCodec, Casts, SharewiseCasts, choose
from parallel.precision.formats import E4M3
from tests.benchmarks.results import OCTAVO, Result, add_arguments, at_least, measured, report

HOPS = ("pack", "mean", "unpack")
PLAIN = "plain"
CASTS = "casts of a gradient exchange"
CONFIG = GradientExchangeConfig()


class CompiledCodec(BlockCodec):
    """The plain way's functions through torch.compile."""

    def __init__(self) -> None:
        super().__init__(E4M3, CONFIG.block, None)
        self._quantize = torch.compile(exchange_casts.block_quantize, dynamic=False)
        self._dequantize = torch.compile(_dequantized, dynamic=False)

    def quantize(self, x: Tensor, payload: Tensor, scales: Tensor, error: Tensor) -> None:
        self._quantize(x, payload, scales, self.format, error)

    def dequantize(self, payload: Tensor, scales: Tensor, out: Tensor, *, add: bool) -> None:
        self._dequantize(payload, scales, out, add)


def _dequantized(payload: Tensor, scales: Tensor, out: Tensor, add: bool) -> None:
    values = exchange_casts.block_dequantize(payload, scales, E4M3)[: out.numel()]
    if add:
        out.add_(values)
    else:
        out.copy_(values)


def ways(device: torch.device) -> dict[str, Casts]:
    """By name, the chosen one first."""
    chosen = choose(device, E4M3, CONFIG.block)
    return {
        chosen.name: chosen,
        "torch.compile": SharewiseCasts(CompiledCodec()),
        PLAIN: SharewiseCasts(BlockCodec(E4M3, CONFIG.block, None)),
    }


@dataclass(frozen=True, slots=True)
class Timed:
    """One size."""

    device: str
    numel: int
    seconds: dict[str, dict[str, list[float]]]
    """Of each repeat, by way and hop; the chosen way first."""
    same_bits: dict[str, bool]

    def totals(self, way: str) -> list[float]:
        """Seconds of all hops, of each repeat."""
        return [sum(hops) for hops in zip(*self.seconds[way].values(), strict=True)]

    def rows(self) -> list[Result]:
        """All ways, and what each takes over the chosen one."""
        setting = f"{self.device}, {self.numel / 2**20:.3g} M elements, one thread"
        chosen = next(iter(self.seconds))
        rows = []
        for way, hops in self.seconds.items():
            wrong = not self.same_bits[way]
            side = f"{OCTAVO} ({way})" if way in (chosen, PLAIN) else way
            each = ", ".join(f"{hop} {1e3 * median(hops[hop]):.2f} ms" for hop in HOPS)
            note = f"{each}{'; other bits than the plain way' if wrong else ''}"
            row = partial(measured, setting=setting, side=side)
            times = row(CASTS, values=self.totals(way), unit="s", note=note, failures=int(wrong))
            rows.append(times)
            if way != chosen:
                pairs = zip(self.totals(way), self.totals(chosen), strict=True)
                ratios = [other / own for other, own in pairs]
                # The chosen way's to be the fastest.
                name = f"… over {chosen}'s"
                rows.append(row(name, values=ratios, unit="×", aim=at_least(1.0)))
        return rows


def measure(device: torch.device, numel: int, ranks: int, repeats: int) -> Timed:
    """Every way, in turns, after one round that compiles and isn't counted."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(numel, generator=generator).to(device)
    all_ways = ways(device)
    seconds: dict[str, dict[str, list[float]]] = {
        way: {hop: [] for hop in HOPS} for way in all_ways
    }
    results = {}
    for repeat in range(-1, repeats):
        for way, casts in all_ways.items():
            results[way], taken = _once(casts, gradient, ranks)
            if repeat >= 0:
                for hop in HOPS:
                    seconds[way][hop].append(taken[hop])
    same = {way: torch.equal(result, results[PLAIN]) for way, result in results.items()}
    return Timed(device.type, numel, seconds, same)


def _once(casts: Casts, gradient: Tensor, ranks: int) -> tuple[Tensor, dict[str, float]]:
    """What one rank of ``ranks`` with this gradient ends with, and each hop's seconds."""
    device, block = gradient.device, CONFIG.block
    share = CONFIG.bucket // block * block
    buckets = gradient.split(share * ranks)
    blocks = [-(-bucket.numel() // (block * ranks)) for bucket in buckets]
    rows = [torch.zeros((ranks, b * (block + 1)), dtype=torch.uint8, device=device) for b in blocks]
    means = [torch.zeros_like(row) for row in rows]
    scratch = [torch.zeros(b * block, device=device) for b in blocks]
    error = torch.zeros(2, dtype=torch.float64, device=device)
    out = torch.zeros_like(gradient)
    taken = {}

    def timed(hop: str, work: Callable[[], None]) -> None:
        _finish(device)
        started = time.perf_counter()
        work()
        _finish(device)
        taken[hop] = time.perf_counter() - started

    def pack() -> None:
        for bucket, row in zip(buckets, rows, strict=True):
            casts.pack(bucket, row, error)

    def mean() -> None:
        # Every share's would be other ranks' work: one is this rank's.
        for row, kept, share in zip(rows, means, scratch, strict=True):
            casts.mean(row, kept[0], share)

    def unpack() -> None:
        for row, piece in zip(rows, out.split(share * ranks), strict=True):
            casts.unpack(row, piece)

    for hop, work in (("pack", pack), ("mean", mean), ("unpack", unpack)):
        timed(hop, work)
    seen = [out.view(torch.uint8), *(row.flatten() for row in (*rows, *means))]
    return torch.cat(seen), taken


def _finish(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--millions", type=float, nargs="+", default=[0.3, 1, 16])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    add_arguments(parser)
    asked = parser.parse_args()
    began = time.monotonic()
    torch.set_num_threads(1)
    rows: list[Result] = []
    for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        for millions in asked.millions:
            numel = int(millions * 2**20)
            rows += measure(torch.device(device), numel, asked.ranks, asked.repeats).rows()
    report("bench_exchange_casts", rows, asked.out, seconds=time.monotonic() - began)


if __name__ == "__main__":
    main()
