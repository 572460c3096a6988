"""How far the gradient exchange's mean over ranks is from the float64 mean.

    python -m tests.benchmarks.bench_exchange_error [--ranks 4] [--elements 1048576]
                                                    [--repeats 50] [--steps 20] [--out DIR]

Gradients: normal, heavy-tailed (Student's t, two degrees of freedom), and real ones, recorded
from the demo's model after some steps. ``one mean``: 2-norm of a single exchange's error over
the exact mean's. ``in the long run``: the same of the average over many exchanges of the same
gradients, which is what rounding does to training that errors of single steps don't show:
plain rounding errs the same way each time, error feedback makes up for it. ``whole``: every
rank takes the whole mean, which is rounded a second time; ``scattered``: under a sharded
optimizer (ZeRO 1), its own part.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

from tests.benchmarks.results import OCTAVO, Result, add_arguments, measured, report
from tests.ranks.exchange_errors import Errors, Way, errors
from tests.ranks.launch_ranks import RankFailed, run_ranks

WAYS = [
    Way("fp32"),
    Way("bf16"),
    *(
        Way("fp8", format, scattered, feedback)
        for format in ("e4m3", "e5m2")
        for scattered in (False, True)
        for feedback in (False, True)
    ),
]


KINDS = ("normal", "heavy", "recorded")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--elements", type=int, default=2**20)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    add_arguments(parser)
    asked = parser.parse_args()
    began = time.monotonic()
    rows: list[Result] = []
    for kind in asked.kinds:
        size = asked.steps if kind == "recorded" else asked.elements
        try:
            told = run_ranks(errors, asked.ranks, kind, size, WAYS, asked.repeats, timeout_s=3600)
        except RankFailed as error:
            hung = "silent for" in str(error)
            missed = {"failures": int(not hung), "hangs": int(hung), "note": str(error)}
            rows.append(measured(f"{kind} gradients", f"{asked.ranks} ranks", [], "%", **missed))
            continue
        for way, error in zip(WAYS, told[0], strict=True):
            rows += rows_of(kind, asked.ranks, asked.repeats, way, error)
    report("bench_exchange_error", rows, asked.out, seconds=time.monotonic() - began)


def rows_of(kind: str, ranks: int, repeats: int, way: Way, error: Errors) -> list[Result]:
    """One way's errors of one kind of gradients."""
    side = f"{OCTAVO} FP8 {way.format}" if way.dtype == "fp8" else f"torch {way.dtype.upper()}"
    side += ", scattered" if way.scattered else ""
    side += ", error feedback" if way.error_feedback else ""
    row = partial(measured, setting=f"{kind} gradients, {ranks} ranks", unit="%", side=side)
    return [
        row("error of one mean", values=[100 * error.one]),
        row(f"… of {repeats} means' average", values=[100 * error.lasting]),
    ]


if __name__ == "__main__":
    main()
