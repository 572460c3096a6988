"""How far the gradient exchange's mean over ranks is from the float64 mean.

    python -m tests.benchmarks.bench_exchange_error [--ranks 4] [--elements 1048576]
                                                    [--repeats 50] [--steps 20]

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

from tests.ranks.exchange_errors import Way, errors
from tests.ranks.launch_ranks import run_ranks

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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--elements", type=int, default=2**20)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()
    print(f"{asked.ranks} ranks, {asked.repeats} exchanges in the long run, in percent")
    print("| gradients | in | mean | feedback | one mean | in the long run |")
    print("|---|---|---|---|---|---|")
    for kind in ("normal", "heavy", "recorded"):
        size = asked.steps if kind == "recorded" else asked.elements
        told = run_ranks(errors, asked.ranks, kind, size, WAYS, asked.repeats, timeout_s=900)
        for way, error in zip(WAYS, told[0], strict=True):
            name = way.dtype if way.dtype != "fp8" else f"fp8 {way.format}"
            print(
                f"| {kind} | {name} | {'scattered' if way.scattered else 'whole'} | "
                f"{'yes' if way.error_feedback else 'no'} | {100 * error.one:.3g} | "
                f"{100 * error.lasting:.2g} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
