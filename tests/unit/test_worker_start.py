"""What a worker does before it has a rank, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

BUILT = """
import os, sys
from launch.imports import import_ahead
import_ahead()
before = set(sys.modules)
os.environ.update(LOCAL_RANK="0", LOCAL_SIZE="1")
import torch.distributed as dist
from parallel.config import FP8Config, GradientExchangeConfig, ModelConfig, ParallelismConfig
from parallel.engine import TrainingNumbers
from parallel.engine_build import build_engine
store = dist.HashStore()
dist.init_process_group("gloo", rank=0, world_size=1, store=store)
build_engine(
    parallelism=ParallelismConfig(data=1),
    model=ModelConfig(hidden_size=64, num_layers=2),
    numbers=TrainingNumbers(2, 1, 32),
    precision="fp8",
    fp8=FP8Config(amax_history_len=4),
    communication_data_type="fp8",
    gradient_exchange=GradientExchangeConfig(),
)
late = {name.split(".")[0] + "." + name.split(".")[1] for name in set(sys.modules) - before
        if name.startswith("torch.")}
assert not late, f"imported only when the engine was built: {late}"
assert "deepspeed.runtime.engine" in before
assert "torch._inductor.compile_fx" not in before, "nothing is compiled"
"""

FAULTS = """
import resource, sys
import torch
torch.set_num_threads(1)
if sys.argv[1] == "kept":
    from launch.allocator import keep_freed_memory
    keep_freed_memory()
def fill():
    torch.empty(16 << 20).fill_(1.0)
for _ in range(16):
    fill()  # the heap grows, and its places are touched once each
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    fill()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_a_standby_worker_has_imported_all_that_an_engine_takes_time_to_import() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BUILT], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_memory_that_a_step_freed_is_there_for_the_next_without_page_faults() -> None:
    faults = {kept: int(_python(FAULTS, kept)) for kept in ("kept", "returned")}
    assert faults["kept"] < faults["returned"] / 100, faults


def _python(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
