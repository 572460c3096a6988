"""One rank of training steps between hosts; one command line argument, a JSON object.

``{"cases": [{…}, …], "steps": …}``: options of ``tests.ranks.engine_runs.build``; ``env://``
says where the others are. Of each case the words ``begin`` and ``end`` with an answer on
standard input stand around the steps, and the bytes that the exchange says it sent follow.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

from parallel.config import GradientExchangeConfig
from tests.hosts.exchange_rank import meet
from tests.ranks.engine_runs import LR, WIDE, batches, build


def main() -> None:
    """Train each case."""
    told = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    for case in told["cases"]:
        engine = build(
            world,
            model=WIDE.model_copy(update={"tie_embeddings": told["tied"]}),
            gradient_exchange=GradientExchangeConfig(min_size=1024),
            **case,
        )
        replica = case.get("pipeline", 1) * case.get("tensor", 1)
        for step in range(1 + told["steps"]):
            if step == 1:  # there are connections now
                engine.take_exchange_statistics()
                meet("begin")
            engine.train_step(batches(engine, world, replica, step), LR)
        meet("end")
        print(engine.take_exchange_statistics()["bytes"], flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
