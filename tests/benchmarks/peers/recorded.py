"""A model that writes down the end of each step, in a file a rank, whoever trains it.

    model: {factory: "tests.benchmarks.peers.recorded:make", num_layers: 6, options: {…}}

The built-in transformer of the shape in ``options``, whose loss is remembered; when the
optimizer's step ends (torch's own hook, which fires for every optimizer of every side), a line
goes to ``$RECORD_STEPS/rank-R.jsonl``: when, which step, its loss, which process. The step's
number is the one in the optimizer's state, so it goes back where training went back, and no side
needs to be believed.

Promises: a line is written by one ``write`` to a file opened for appending, and survives the
process' SIGKILL; times are of one clock (``CLOCK_REALTIME`` of this machine); what it costs a
step is one number read from memory that a CPU wrote. Reading needs no torch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.hooks import RemovableHandle

    from parallel.model_plan import ModelPlan
    from parallel.precision.backend import LayerScope

FACTORY = f"{__name__}:make"
FOLDER = "RECORD_STEPS"
"""Environment variable: the folder of the files; unset, nothing is recorded."""
RANK = "RECORD_RANK"
"""Environment variable: the rank, where the process group doesn't know it."""


@dataclass(frozen=True, slots=True)
class StepEnd:
    """The end of one step on one rank."""

    time: float
    """Seconds since the epoch."""
    step: int
    """From 0."""
    loss: float
    """Mean over this rank's micro-batches, nats a token; NaN on a stage without the loss."""
    rank: int
    pid: int


def read(folder: Path) -> list[StepEnd]:
    """All lines of all ranks, by time; a last line that was cut off by a kill is none."""
    ends = []
    for file in sorted(folder.glob("rank-*.jsonl")):
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                ends.append(StepEnd(**json.loads(line)))
    return sorted(ends, key=lambda end: end.time)


class Recorder:
    """Gathers the losses of a step's micro-batches, and writes the line at its end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._losses: list[Tensor] = []
        self._last = -1
        self._file: int | None = None
        self._rank = 0

    def loss(self, value: Tensor) -> None:
        """Of one micro-batch of the step that runs."""
        self._losses.append(value.detach())

    def ended(self, steps: int) -> None:
        """An optimizer has made ``steps`` steps, all told; several may be parts of one step."""
        if steps == self._last:
            return
        now = time.time()
        self._last = steps
        losses = [float(value) for value in self._losses]
        self._losses.clear()
        loss = sum(losses) / len(losses) if losses else float("nan")
        if self._file is None:
            self._file = self._open()
        end = StepEnd(now, steps - 1, loss, self._rank, os.getpid())
        os.write(self._file, (json.dumps(asdict(end)) + "\n").encode())

    def _open(self) -> int:
        import torch.distributed as dist

        given = os.environ.get(RANK)
        self._rank = int(given) if given is not None else dist.get_rank()
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"rank-{self._rank}.jsonl"
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def make(*, options: dict[str, Any], seq_len: int, seed: int, scope: LayerScope) -> ModelPlan:
    """The factory: the built-in model of the shape in ``options``, recorded."""
    from parallel.config import ModelConfig
    from parallel.model_plan import ModelPlan
    from parallel.transformer import layer_plans, loss_fn

    plans = layer_plans(ModelConfig(**options), seq_len=seq_len, seed=seed, scope=scope)
    folder = os.environ.get(FOLDER)
    if folder is None:
        return ModelPlan(plans, loss_fn)
    recorder = Recorder(Path(folder))
    watch_optimizers(recorder)

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        value = loss_fn(output, targets)
        recorder.loss(value)
        return value

    return ModelPlan(plans, loss)


def watch_optimizers(recorder: Recorder) -> RemovableHandle:
    """Tell ``recorder`` of the end of each step of every optimizer in this process."""
    from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

    def ended(optimizer: Optimizer, *_: Any) -> None:
        states: Iterable[dict[str, Any]] = optimizer.state.values()
        steps = [state["step"] for state in states if "step" in state]
        if steps:
            recorder.ended(int(steps[0]))

    return register_optimizer_step_post_hook(ended)
