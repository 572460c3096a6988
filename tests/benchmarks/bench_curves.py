"""Final losses of the demo's model with gradients exchanged in FP8, against FP32.

    python -m tests.benchmarks.bench_curves [--steps 240] [--seeds 0 1 2] [--replicas 2]
                                            [--precisions fp8] [--kept rows.json] [--out DIR]

Each run is the demo's model, batches, schedule and ZeRO stage on two data-parallel replicas, one
rank and thread each, without its drill and its pipeline; in the demo's FP8 linears or, asked for,
in BF16 (which ``bench_hooks`` trains too, beside DDP's).
Runs of a seed start from the same weights and see the same batches, so that they differ by the
exchange alone. The final loss is the mean of the last twenty steps. Two exchanges can't be told
apart where the ranges of their final losses over the seeds overlap: what seeds change is then as
much as what the exchange does. Whole curves can be kept in a file and are then not run again.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from parallel.config import ExchangeDtype, GradientExchangeConfig, Precision
from tests.benchmarks.demo_runs import Rows, demo_run, losses
from tests.benchmarks.results import OCTAVO, Result, add_arguments, measured, report
from tests.ranks.launch_ranks import RankFailed, run_ranks

LAST = 20
"""Steps at the end whose losses are averaged."""
LONGEST_S = 4 * 3600.0
"""Of one run, on a machine with better things to do."""
PRECISIONS: tuple[Precision, ...] = ("fp8", "bf16")


@dataclass(frozen=True, slots=True)
class Exchange:
    """One way to exchange gradients; the first of ``EXCHANGES`` is what others are held to."""

    dtype: ExchangeDtype
    error_feedback: bool = False

    def __str__(self) -> str:
        return self.dtype.upper() + (" with error feedback" if self.error_feedback else "")


EXCHANGES = (Exchange("fp32"), Exchange("fp8"), Exchange("fp8", error_feedback=True))


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    precision: Precision
    exchange: Exchange
    seed: int
    steps: int
    replicas: int

    @property
    def key(self) -> str:
        """Its name in the file of rows."""
        feedback = "+feedback" if self.exchange.error_feedback else ""
        way = f"{self.exchange.dtype}{feedback}"
        return f"{self.precision}/{way}/{self.replicas}/{self.seed}/{self.steps}"

    def curve(self) -> list[float]:
        """The loss of every step."""
        run = demo_run(
            self.seed,
            self.steps,
            replicas=self.replicas,
            precision=self.precision,
            communication_data_type=self.exchange.dtype,
            gradient_exchange=GradientExchangeConfig(error_feedback=self.exchange.error_feedback),
        )
        told: list[list[float]] = run_ranks(losses, self.replicas, run, timeout_s=LONGEST_S)
        return told[0]


def compared(
    finals: Sequence[float], against: Sequence[float]
) -> Literal["overlap", "apart", "one seed"]:
    """Whether the ranges of two exchanges' final losses over the seeds have a loss in common."""
    if len(finals) == 1:
        return "one seed"
    common = max(min(finals), min(against)) <= min(max(finals), max(against))
    return "overlap" if common else "apart"


def main() -> None:
    """Print a line a run as it ends, then the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["fp8"])
    parser.add_argument("--kept", type=Path, help="JSON file of finished runs, read and written")
    add_arguments(parser)
    asked = parser.parse_args()
    began = time.monotonic()
    kept = Rows(asked.kept)
    cases = {
        (precision, exchange): [
            Case(precision, exchange, seed, asked.steps, asked.replicas) for seed in asked.seeds
        ]
        for precision in asked.precisions
        for exchange in EXCHANGES
    }
    failed: dict[Case, str] = {}
    # A seed's runs together: an unfinished table then compares whole seeds.
    for of_seed in zip(*cases.values(), strict=True):
        for case in of_seed:
            if case.key not in kept:
                try:
                    kept.add(case.key, case.curve())
                except RankFailed as error:
                    failed[case] = str(error)
                    print(f"{case.key}: {error}", flush=True)
                    continue
            print(f"{case.key}: {_final(kept, case):.4f}", flush=True)
    rows: list[Result] = []
    for precision in asked.precisions:
        finals = {
            exchange: {
                case.seed: _final(kept, case)
                for case in cases[precision, exchange]
                if case not in failed
            }
            for exchange in EXCHANGES
        }
        for exchange in EXCHANGES:
            hung = [
                "silent for" in failed[case]
                for case in cases[precision, exchange]
                if case in failed
            ]
            missed = {"failures": len(hung) - sum(hung), "hangs": sum(hung)}
            setting = (
                f"demo model in {precision.upper()}, {asked.replicas} replicas, {asked.steps} steps"
            )
            rows += rows_of(setting, exchange, finals[exchange], finals[EXCHANGES[0]], missed)
    report("bench_curves", rows, asked.out, seconds=time.monotonic() - began)


def rows_of(
    setting: str,
    exchange: Exchange,
    finals: Mapping[int, float],
    against: Mapping[int, float],
    missed: Mapping[str, int],
) -> list[Result]:
    """One exchange's final losses by seed, and how far above those of ``against`` they are."""
    row = partial(measured, setting=setting, side=f"{OCTAVO} {exchange}", **missed)
    rows = [row("final loss by exchange", values=finals.values(), unit="nats")]
    gaps = [100 * (loss / against[seed] - 1) for seed, loss in finals.items() if seed in against]
    if exchange != EXCHANGES[0]:
        note = ""
        if gaps:
            note = f"mean {statistics.fmean(gaps):+.2f} %; ranges: "
            note += compared([*finals.values()], [*against.values()])
        rows.append(row("… above FP32's", values=gaps, unit="%", note=note))
    return rows


def _final(kept: Rows, case: Case) -> float:
    return statistics.fmean(kept[case.key][-LAST:])


if __name__ == "__main__":
    main()
