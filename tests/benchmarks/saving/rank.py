"""One rank that saves, or brings back, and writes down what it measured.

    torchrun --nproc-per-node 2 -m tests.benchmarks.saving.rank TASK.json

Phase ``save``: trains, saves a few times, and trains on until each save is over, so that what a
save takes from the steps beside it is measured too. Phase ``restore``, in processes of its own:
brings the newest save back, compares every tensor with what was saved, and then does so with one
byte flipped. Rank 0 writes what all measured; of a flipped byte each rank writes for itself, since
whoever refuses it leaves the others alone.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from tests.benchmarks.saving.savers import DISK, PEERS, SaveFailed, Saver
from tests.benchmarks.saving.state import Training

WARM_UP, BASE = 2, 3
SAVE_S = 600.0
"""That a save may take."""
COLLECTIVE_S = 300.0


@dataclass(frozen=True, slots=True)
class Task:
    """What the ranks are to do."""

    side: str
    size: str
    phase: Literal["save", "restore"]
    folder: str
    """Of the saves."""
    out: str
    """Folder for what was measured."""
    saves: int
    """The first of them is on a cold start, and told apart."""
    restores: int
    address: str = ""
    """Of the keepers' Ray; Octavo's alone."""

    def written(self) -> str:
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Save:
    """One save as all ranks saw it, in seconds from its begin."""

    stall: float
    """That the loop was held up."""
    lost: float
    """That training lost in all, until it was over: steps beside it are slower."""
    beside: int
    """Steps trained meanwhile."""
    step: float
    """Median of those without a save."""
    reached: dict[str, float]
    """When every rank's part was in a tier."""
    written: int
    """Bytes on disk."""


@dataclass(frozen=True, slots=True)
class Restored:
    """One state brought back."""

    tier: str
    seconds: float
    differing: int
    """Tensors that aren't what was saved, of all ranks."""


def main() -> None:
    """Do the task of the file that the command line names."""
    task = Task(**json.loads(Path(sys.argv[1]).read_text()))
    rank = int(os.environ["RANK"])
    # As DeepSpeed's own launcher says it of one machine.
    os.environ.update(CROSS_SIZE="1", CROSS_RANK="0", LOCAL_SIZE=os.environ["LOCAL_WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_S))
    saves_by = task.phase == "save" and task.side in PEERS
    checkpoint = PEERS[task.side].checkpoint if saves_by else {}
    training = Training.built(task.size, rank, checkpoint)
    for _ in range(WARM_UP):
        training.step()
    folder = Path(task.folder)
    saver: Saver
    if task.side in PEERS:
        saver = PEERS[task.side].made(training, folder)
    else:
        # Peers' processes, which begin by importing this module, shall not pay for Ray.
        from tests.benchmarks.saving.octavo import Octavo

        saver = Octavo(training, folder, task.address)
    if task.phase == "save":
        _save(task, training, saver)
    else:
        _restore(task, training, saver)
    saver.close()
    dist.barrier()
    dist.destroy_process_group()


def _save(task: Task, training: Training, saver: Saver) -> None:
    saves = []
    for number in range(task.saves):
        saver.prepare(number)
        expected, save = _measured_save(training, saver, number)
        saves.append(save)
    restored: list[Restored] = []
    last = task.saves - 1
    for tier in saver.kept_here:
        restored += _measured_restores(task, training, saver, tier, last, expected)
        _try_damaged(task, training, saver, tier, last, expected)
    told = {"nbytes": training.nbytes, "saves": [asdict(save) for save in saves]}
    _write(task, told | {"restored": [asdict(one) for one in restored]}, expected)


def _measured_save(training: Training, saver: Saver, number: int) -> tuple[dict[str, str], Save]:
    """Digests of what was saved, and the save."""
    step_s = statistics.median(_timed(training.step) for _ in range(BASE))
    expected = training.digests()
    dist.barrier()
    began = time.monotonic()
    saver.begin(number)
    stall = time.monotonic() - began
    beside = 0
    while not _all(saver.tiers and set(saver.tiers) <= set(saver.reached())):
        if time.monotonic() - began > SAVE_S:
            raise SaveFailed(f"save {number} is not over after {SAVE_S:.0f} s: {saver.reached()}")
        training.step()
        beside += 1
    lost = time.monotonic() - began - beside * step_s
    reached = {tier: when - began for tier, when in saver.reached().items()}
    told = _gathered((stall + saver.waited(), lost, reached))
    # What it has left to the cache would be written beside the next one.
    written = _settled(saver.place(number)) if training.rank == 0 else 0
    dist.barrier()
    return expected, Save(
        max(one[0] for one in told),
        max(one[1] for one in told),
        beside,
        step_s,
        {tier: max(one[2].get(tier, 0.0) for one in told) for tier in reached},
        written,
    )


def _restore(task: Task, training: Training, saver: Saver) -> None:
    expected = json.loads((Path(task.out) / f"expected-{training.rank}.json").read_text())
    last = task.saves - 1
    restored = [
        one
        for tier in saver.kept
        for one in _measured_restores(task, training, saver, tier, last, expected)
    ]
    _write(task, {"restored": [asdict(one) for one in restored]})
    for tier in saver.kept:
        _try_damaged(task, training, saver, tier, last, expected)


def _measured_restores(
    task: Task, training: Training, saver: Saver, tier: str, number: int, expected: dict[str, str]
) -> list[Restored]:
    found = []
    for _ in range(task.restores):
        training.step()
        if tier == DISK and training.rank == 0:
            _forget(saver.place(number))
        dist.barrier()
        seconds = _timed(lambda: saver.restore(number, tier))
        told = _gathered((seconds, _differing(training, expected)))
        slowest, differing = max(one[0] for one in told), sum(one[1] for one in told)
        found.append(Restored(tier, slowest, differing))
    return found


def _try_damaged(
    task: Task, training: Training, saver: Saver, tier: str, number: int, expected: dict[str, str]
) -> None:
    """What becomes of a save with a flipped byte, into a file of this rank's."""
    training.step()
    if training.rank == 0:
        if tier == DISK:
            _flip(saver.place(number))
        else:
            saver.damage(number, tier)
    dist.barrier()
    refused, differing = "", 0
    try:
        saver.restore(number, tier)
        differing = _differing(training, expected)
    except Exception as error:
        refused = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    told = {"refused": refused, "differing": differing, "time": time.monotonic()}
    (Path(task.out) / f"damaged-{tier}-{training.rank}.json").write_text(json.dumps(told))
    if refused and task.side in PEERS:
        # Octavo's ranks agree on it. A peer's other rank may wait for this one in a collective;
        # the connection tells it.
        os._exit(0)


def _write(task: Task, told: dict[str, Any], expected: dict[str, str] | None = None) -> None:
    out, rank = Path(task.out), dist.get_rank()
    if expected is not None:
        (out / f"expected-{rank}.json").write_text(json.dumps(expected))
    if rank == 0:
        (out / f"{task.phase}.json").write_text(json.dumps(told))
    dist.barrier()


def _differing(training: Training, expected: dict[str, str]) -> int:
    return sum(digest != expected[name] for name, digest in training.digests().items())


def _timed(work: Callable[[], None]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def _all(mine: object) -> bool:
    flag = torch.tensor([int(bool(mine))])
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def _gathered(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _settled(folder: Path) -> int:
    """Have all of it on the disk; its size."""
    for file in _files(folder):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
    return sum(file.stat().st_size for file in _files(folder))


def _forget(folder: Path) -> None:
    """Out of the page cache: after a restart, files come from the disk."""
    for file in _files(folder):
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _flip(folder: Path) -> None:
    """One byte in the middle of the largest file."""
    file = max(_files(folder), key=lambda path: path.stat().st_size)
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))


if __name__ == "__main__":
    main()
