"""A training script's own checkpoints: a file a rank, the newest whole one to go on from.

What a script around an engine does by hand, as PyTorch's and Ray Train's guides to fault-tolerant
training advise: save every few steps, beside the last one and renamed when it is whole; at the
start look for the newest. It saves the tensors that a rollback needs, straight from memory, which
is less than DeepSpeed's own ``save_checkpoint`` writes.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from parallel.engine import Engine

KEPT = 2


def save(engine: Engine, folder: Path, step: int, rank: int) -> None:
    """This rank's state before step ``step``, in a folder of that step."""
    folder = folder / f"step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(engine, folder / f"rank-{rank}.pt")


def save_file(engine: Engine, file: Path) -> None:
    """This rank's state in one file, which is there when it is whole."""
    part = file.with_suffix(".part")
    torch.save({"tensors": engine.live_tensors(), "meta": json.dumps(engine.meta())}, part)
    part.rename(file)


def forget_old(folder: Path, world: int) -> None:
    """Remove all but the newest that are whole; one rank calls it."""
    for step in whole_steps(folder, world)[:-KEPT]:
        shutil.rmtree(folder / f"step-{step}", ignore_errors=True)


def whole_steps(folder: Path, world: int) -> list[int]:
    """Steps of which every rank has its file, in order."""
    steps = (int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))
    return sorted(
        step
        for step in steps
        if all((folder / f"step-{step}" / f"rank-{rank}.pt").exists() for rank in range(world))
    )


def load(engine: Engine, folder: Path, rank: int, world: int) -> int:
    """Take back the newest that every rank has; the step to go on with, 0 where there is none."""
    steps = whole_steps(folder, world)
    if not steps:
        return 0
    load_file(engine, folder / f"step-{steps[-1]}" / f"rank-{rank}.pt")
    return steps[-1]


def load_file(engine: Engine, file: Path) -> None:
    """Take back what ``save_file`` wrote, in place."""
    state = torch.load(file, weights_only=True)
    live = engine.live_tensors()
    for name, tensor in state["tensors"].items():
        live[name].copy_(tensor)
    engine.load_meta(json.loads(state["meta"]))
