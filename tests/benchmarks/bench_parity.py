"""Final losses of every FP8 recipe against BF16: the demo's model, several seeds.

    python -m tests.benchmarks.bench_parity [--steps 500] [--seeds 0 1 2] [--processes 2]

Each run is the demo's model, batches and schedule on one rank, without its drill, so that
only the linears' numerics differ; runs of a seed start from the same weights and see the
same batches. The final loss is the mean of the last fifty steps: single steps differ more
by their text than recipes do. Rows can be kept in a file and are then not run again.
"""

from __future__ import annotations

import argparse
import math
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from orchestrator.spec.job import JobSpec, load_spec
from parallel.config import FP8Config
from tests.benchmarks.demo_runs import DEMO, Rows, demo_run, losses
from tests.benchmarks.emulation import Formats, take_over
from tests.ranks.launch_ranks import run_ranks

RECIPES = ("bf16", "delayed", "current", "block", "mxfp8")
EMULATION = "emulation"
"""``current`` written a second time (``emulation.py``): what the format itself costs."""
LAST = 50
"""Steps at the end whose losses are averaged."""
LONGEST_S = 4 * 3600.0
"""Of one run."""


def _final(case: tuple[str, int, int]) -> tuple[str, float]:
    recipe, seed, steps = case
    run = demo_run(
        seed,
        steps,
        precision="fp8" if recipe in RECIPES[1:] else "bf16",
        fp8=fp8_of(recipe),
        communication_data_type="fp32",
    )
    body = _emulated_losses if recipe == EMULATION else losses
    told: list[list[float]] = run_ranks(body, 1, run, timeout_s=LONGEST_S)
    return _key(*case), statistics.fmean(told[0][-LAST:])


def _emulated_losses(rank: int, world_size: int, run: JobSpec) -> list[float]:
    take_over(Formats())
    return losses(rank, world_size, run)


def fp8_of(recipe: str) -> FP8Config:
    """The recipe with its defaults; delayed with the demo's history. Else it is left open."""
    if recipe == "delayed":
        length = load_spec(DEMO).fp8.amax_history_len
        return FP8Config.model_validate({"recipe": recipe, "amax_history_len": length})
    return FP8Config.model_validate({"recipe": recipe} if recipe in RECIPES[1:] else {})


def _key(recipe: str, seed: int, steps: int) -> str:
    return f"{recipe}/{seed}/{steps}"


def main() -> None:
    """Print a row a run as it ends, then the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--recipes", nargs="+", default=list(RECIPES), choices=(*RECIPES, EMULATION)
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="JSON file of finished runs, read and written")
    arguments = parser.parse_args()
    done = Rows(arguments.keep)
    recipes = tuple(dict.fromkeys(("bf16", *arguments.recipes)))
    cases = [(r, seed, arguments.steps) for seed in arguments.seeds for r in recipes]
    wanted = [case for case in cases if _key(*case) not in done]
    # A thread a run: its rank is a process of its own.
    with ThreadPoolExecutor(arguments.processes) as pool:
        for key, loss in pool.map(_final, wanted):
            done.add(key, loss)
            print(f"{key}: {loss:.4f}", flush=True)
    _print_table(recipes, arguments.seeds, arguments.steps, done)


def _print_table(recipes: tuple[str, ...], seeds: list[int], steps: int, done: Rows) -> None:
    bf16 = [done[_key("bf16", seed, steps)] for seed in seeds]
    print(f"\n| recipe | {' | '.join(f'seed {s}' for s in seeds)} | mean | against BF16 |")
    print("|---" * (len(seeds) + 3) + "|")
    for recipe in recipes:
        finals = [done[_key(recipe, seed, steps)] for seed in seeds]
        gaps = [100 * (f / b - 1) for f, b in zip(finals, bf16, strict=True)]
        spread = f" ({min(gaps):+.2f} … {max(gaps):+.2f})" if recipe != "bf16" else ""
        cells = " | ".join(f"{f:.4f}" for f in finals)
        mean = statistics.fmean(finals)
        print(f"| {recipe} | {cells} | {mean:.4f} | {statistics.fmean(gaps):+.2f} %{spread} |")
    if len(seeds) > 1:
        between = statistics.stdev(bf16) / math.fsum(bf16) * len(bf16) * 100
        print(f"\nBF16 differs by {between:.2f} % (standard deviation) from seed to seed.")


if __name__ == "__main__":
    main()
