"""Final losses of every FP8 recipe against BF16: the demo's model, several seeds.

    python -m tests.benchmarks.bench_parity [--steps 500] [--seeds 0 1 2] [--processes 2]

Each run is the demo's model, batches and schedule on one rank, without its drill, so that
only the linears' numerics differ; runs of a seed start from the same weights and see the
same batches. The final loss is the mean of the last fifty steps: single steps differ more
by their text than recipes do. Rows can be kept in a file and are then not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ |= {"LOCAL_RANK": "0", "LOCAL_SIZE": "1"}

import torch
import torch.distributed as dist

from launch.data import TokenStream, batch_of
from launch.engine import engine_of
from launch.schedule import lr_at
from orchestrator.spec import JobSpec, load_spec
from parallel.config import FP8Config
from parallel.engine import MicroBatch

DEMO = Path(__file__).parents[2] / "deploy/jobs/demo.yaml"
RECIPES = ("bf16", "delayed", "current", "block", "mxfp8")
LAST = 50
"""Steps at the end whose losses are averaged."""
MICRO_BATCH = 16
"""Sequences at once: as many as keep one core busy, which changes no sum but its order."""


def losses(recipe: str, seed: int, steps: int) -> list[float]:
    """The loss of each step of one run, in this process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    demo = load_spec(DEMO)
    training = demo.training.model_copy(update={"steps": steps, "seed": seed})
    assert training.train_batch_size is not None
    count = training.train_batch_size // MICRO_BATCH
    batch_shape = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": count,
    }
    run = demo.model_copy(
        update={
            "parallelism": demo.parallelism.model_copy(update={"pipeline": 1, "data": 1}),
            "training": training.model_copy(update=batch_shape),
            "precision": "bf16" if recipe == "bf16" else "fp8",
            "fp8": _fp8(demo, recipe),
            "communication_data_type": "fp32",
        }
    )
    engine = engine_of(run)
    stream = TokenStream(demo.data, training.seq_len)

    def batches(step: int) -> Iterator[MicroBatch]:
        batch = batch_of(step, frozenset())
        return stream.micro_batches(batch, 0, 1, MICRO_BATCH, count)

    seen = [
        float(engine.train_step(batches(step), lr_at(step, training, 1.0)).loss)
        for step in range(steps)
    ]
    dist.destroy_process_group()
    return seen


def _fp8(demo: JobSpec, recipe: str) -> FP8Config:
    if recipe == "bf16":
        return FP8Config()
    history = {"amax_history_len": demo.fp8.amax_history_len} if recipe == "delayed" else {}
    return FP8Config.model_validate({"recipe": recipe, **history})


def _final(case: tuple[str, int, int]) -> tuple[str, float]:
    recipe, seed, steps = case
    return _key(*case), statistics.fmean(losses(recipe, seed, steps)[-LAST:])


def _key(recipe: str, seed: int, steps: int) -> str:
    return f"{recipe}/{seed}/{steps}"


def main() -> None:
    """Print a row a run as it ends, then the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="JSON file of finished runs, read and written")
    arguments = parser.parse_args()
    done: dict[str, float] = {}
    if arguments.keep and arguments.keep.exists():
        done = json.loads(arguments.keep.read_text())
    recipes = tuple(dict.fromkeys(("bf16", *arguments.recipes)))
    cases = [(r, seed, arguments.steps) for seed in arguments.seeds for r in recipes]
    wanted = [case for case in cases if _key(*case) not in done]
    with ProcessPoolExecutor(
        arguments.processes, mp_context=get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        for key, loss in pool.map(_final, wanted):
            done[key] = loss
            print(f"{key}: {loss:.4f}", flush=True)
            if arguments.keep:
                arguments.keep.write_text(json.dumps(done, indent=1))
    _print_table(recipes, arguments.seeds, arguments.steps, done)


def _print_table(
    recipes: tuple[str, ...], seeds: list[int], steps: int, done: dict[str, float]
) -> None:
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
