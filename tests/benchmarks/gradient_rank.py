"""One rank of training steps between hosts, every side in turn; one argument, a JSON object.

``{"shape": "demo", "sides": [{…}, …], "turns": 5, "steps": 4, "limit_s": 600}``; ``env://`` says
where the other is. Each side is made and warmed up between the word ``make`` and the next one; each
turn of a side stands between ``begin`` and ``end``, with an answer on standard input to each word,
so that the one who started the ranks can read the hosts' counters and knows whose turn it is. After
each ``end`` come the seconds of one of its steps.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.benchmarks.gradient_sides import SHAPES, Side, run_of, stepper
from tests.benchmarks.peers.turns import rotated
from tests.hosts.exchange_rank import meet

WARM_UP = 4
"""Steps: connections, buffers, buckets that DDP builds anew, PowerSGD's own beginning."""
STARTS = 2
SCHEDULE = 1000


def main() -> None:
    """Make every side, then take turns."""
    case = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=case["limit_s"]))
    sides = [Side(**side) for side in case["sides"]]
    steps, numbers = {}, dict.fromkeys(sides, 0)

    def train(side: Side, count: int) -> None:
        for _ in range(count):
            steps[side](numbers[side])
            numbers[side] += 1

    for side in sides:
        meet("make")
        run = run_of(SHAPES[case["shape"]], side, 0, SCHEDULE)
        steps[side] = stepper(side, run, dist.get_rank(), STARTS)
        train(side, WARM_UP)
    for turn in range(case["turns"]):
        for side in rotated(sides, turn):
            meet("begin")
            dist.barrier()
            started = time.perf_counter()
            train(side, case["steps"])
            seconds = (time.perf_counter() - started) / case["steps"]
            meet("end")
            print(seconds, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
