"""One rank of a gradient exchange between hosts; one command line argument, a JSON object.

``{"numel": …, "dtypes": ["fp8", "bf16"], "scattered": false, "repeats": …}``; ``env://`` says
where the others are.
Prints, as JSON, the seconds of each exchange by dtype. The dtypes take turns, every exchange
begins together, and the words ``begin`` and ``end`` with an answer on standard input stand
around them all, so that the one who started the ranks can read the hosts' counters between.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist

from parallel.config import GradientExchangeConfig
from parallel.gradients import GradientExchange


def main() -> None:
    """Exchange ``repeats`` times."""
    case = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator().manual_seed(dist.get_rank())
    gradient = torch.randn(case["numel"], generator=generator)
    config = GradientExchangeConfig()
    exchanges = {
        d: GradientExchange(d, config, group, scattered=case["scattered"]) for d in case["dtypes"]
    }
    for exchange in exchanges.values():
        exchange.mean_(gradient.clone())  # buffers, connections
    meet("begin")
    seconds: dict[str, list[float]] = {dtype: [] for dtype in exchanges}
    for _ in range(case["repeats"]):
        for dtype, exchange in exchanges.items():
            flat = gradient.clone()
            dist.barrier()
            started = time.perf_counter()
            exchange.mean_(flat)
            seconds[dtype].append(time.perf_counter() - started)
    meet("end")
    print(json.dumps(seconds))
    dist.destroy_process_group()


def meet(what: str) -> None:
    """Say ``what`` once all ranks are here, and wait for an answer."""
    dist.barrier()
    print(what, flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
