"""Final losses of the demo's model with gradients exchanged in FP8, against FP32.

    python -m tests.benchmarks.bench_curves [--steps 240] [--seeds 0 1 2] [--replicas 2]
                                            [--keep rows.json]

Each run is the demo's model, batches, schedule and ZeRO stage on two data-parallel replicas, one
rank and thread each, without its drill and its pipeline; in the demo's FP8 linears and in BF16.
Runs of a seed start from the same weights and see the same batches, so that they differ by the
exchange alone. The final loss is the mean of the last twenty steps. Two exchanges can't be told
apart where the ranges of their final losses over the seeds overlap: what seeds change is then as
much as what the exchange does. Whole curves can be kept in a file and are then not run again.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from parallel.config import ExchangeDtype, GradientExchangeConfig, Precision
from tests.benchmarks.demo_runs import Rows, demo_run, losses
from tests.ranks.launch_ranks import run_ranks

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
    """Print a row a run as it ends, then the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="JSON file of finished runs, read and written")
    asked = parser.parse_args()
    rows = Rows(asked.keep)
    cases = {
        (precision, exchange): [
            Case(precision, exchange, seed, asked.steps, asked.replicas) for seed in asked.seeds
        ]
        for precision in PRECISIONS
        for exchange in EXCHANGES
    }
    # A seed's runs together: an unfinished table then compares whole seeds.
    for of_seed in zip(*cases.values(), strict=True):
        for case in of_seed:
            if case.key not in rows:
                rows.add(case.key, case.curve())
                print(f"{case.key}: {_final(rows, case):.4f}", flush=True)
    print(
        f"\n| linears | exchange | {' | '.join(f'seed {s}' for s in asked.seeds)} | mean ", end=""
    )
    print("| spread | against FP32 | ranges |")
    print("|---" * (len(asked.seeds) + 6) + "|")
    for precision in PRECISIONS:
        against = [_final(rows, case) for case in cases[precision, EXCHANGES[0]]]
        print(f"| {precision.upper()} | {EXCHANGES[0]} | {_cells(against, against)} |")
        for exchange in EXCHANGES[1:]:
            finals = [_final(rows, case) for case in cases[precision, exchange]]
            print(f"| {precision.upper()} | {exchange} | {_cells(finals, against)} |")


def _cells(finals: Sequence[float], against: Sequence[float]) -> str:
    gaps = [100 * (f / a - 1) for f, a in zip(finals, against, strict=True)]
    reference = finals is against
    return " | ".join(
        [
            *(f"{final:.4f}" for final in finals),
            f"{statistics.fmean(finals):.4f}",
            f"{max(finals) - min(finals):.4f}",
            ""
            if reference
            else f"{statistics.fmean(gaps):+.2f} % ({min(gaps):+.2f} … {max(gaps):+.2f})",
            "" if reference else compared(finals, against),
        ]
    )


def _final(rows: Rows, case: Case) -> float:
    return statistics.fmean(rows[case.key][-LAST:])


if __name__ == "__main__":
    main()
