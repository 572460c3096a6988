"""What a user of torchrun would train with: checkpoints, and a resume from the newest.

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 \
        tests/benchmarks/peers/torchrun_train.py job.yaml --saved DIR [--every 10] [--fresh-store]

After PyTorch's tutorial "Fault-tolerant Distributed Training with torchrun" (ddp_series_fault_
tolerance) and the page "Train script" of torch.distributed.elastic: the script loads the newest
snapshot when it starts, for torchrun starts all workers anew after any one's failure.
``--fresh-store``: the ranks of each restart meet in a store that none before has written to (a
file's, named by TORCHELASTIC_RESTART_COUNT), and a process group has a minute for what it does.
Without it they meet in the agent's, which outlives them, and wait the half hour that is default.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))

import torch
import torch.distributed as dist

from launch.engine import engine_of
from orchestrator.spec.job import load_spec
from tests.benchmarks.peers import saved
from tests.benchmarks.plain_deepspeed import training_steps

FRESH_TIMEOUT = timedelta(seconds=60)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("spec", type=Path)
    parser.add_argument("--saved", type=Path, required=True)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--fresh-store", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    arguments.saved.mkdir(parents=True, exist_ok=True)
    if arguments.fresh_store:
        store = arguments.saved / f"store-{os.environ['TORCHELASTIC_RESTART_COUNT']}"
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store.resolve()}",
            rank=rank,
            world_size=world,
            timeout=FRESH_TIMEOUT,
        )
    else:
        dist.init_process_group("gloo")

    job = load_spec(arguments.spec)
    engine = engine_of(job)
    first = saved.load(engine, arguments.saved, rank, world)
    for step, _ in training_steps(job, engine, first):
        if (step + 1) % arguments.every == 0:
            saved.save(engine, arguments.saved, step + 1, rank)
            if rank == 0:
                saved.forget_old(arguments.saved, world)


if __name__ == "__main__":
    main()
