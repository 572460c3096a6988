"""One state, saved and brought back by Octavo, torch.save, DCP and DeepSpeed's engines.

    python -m tests.benchmarks.bench_saving [--rounds 3] [--sizes "64 MB" "1 GB"]
        [--saves 3] [--restores 2] [--sides NAME …] [--disk DIR] [--out DIR]

Two ranks of a plain DeepSpeed training (ZeRO 1: BF16 weights on both, FP32 masters and moments
divided) under torchrun. The sides take turns; a turn is a run that saves, whose first save is on a
cold start and told apart, and a run that brings the last one back, out of the page cache. Told are
how long the loop stands still, what training loses in all (steps beside a save are slower), when
the save is on disk, and how fast it is back, by tier; whether every tensor is equal to the bit; and
what becomes of a save with one byte flipped.

Octavo's numbers are those of its parts in these ranks: the ring's copy is the stall; digest, the
node's keeper, the partner's and the disk (hashed, written, synced, read back, committed) come
beside. ``--disk``: where the saves go; the machine's folder for temporary files.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.peers.processes import SideError, interrupt_on_signals, run_to_end
from tests.benchmarks.peers.turns import Failed, failures, hangs, take_turns, values
from tests.benchmarks.results import OCTAVO, Result, add_arguments, at_most, measured, report
from tests.benchmarks.saving.octavo import RANKS, keepers
from tests.benchmarks.saving.rank import Restored, Save, Task
from tests.benchmarks.saving.savers import (
    DISK,
    MEMORY,
    NO_DATASTATES,
    PARTNER,
    PEERS,
    RING,
    SEALED,
    why_not,
)
from tests.benchmarks.saving.state import BLOCKS, nbytes_of
from tests.benchmarks.sides import BIN, free_port

SIZES = ("64 MB", "1 GB")
LIMIT_S = 1200.0
"""Of one run."""
ROOM, DISK_ROOM = 18, 6
"""Copies of a rank's state that memory and disk must have room for: engines, ring, keepers."""
WHERE: Mapping[str, str] = {
    RING: "in the ring",
    SEALED: "hashed",
    MEMORY: "in the node's keeper",
    PARTNER: "in a partner's keeper",
    DISK: "on disk",
}


@dataclass(frozen=True, slots=True)
class Damaged:
    """What became of a copy with a flipped byte."""

    refused: str
    """What it said; empty: it was loaded."""
    differing: int
    """Tensors that were loaded wrong, of all ranks."""
    hung: bool = False

    @property
    def silent(self) -> bool:
        """Whether what was loaded is not what was saved, and nobody said so."""
        return not self.refused and self.differing > 0


@dataclass(frozen=True, slots=True)
class Turn:
    """What a side did in one turn."""

    nbytes: int
    """Of a rank's state."""
    saves: tuple[Save, ...]
    restored: tuple[Restored, ...]
    damaged: Mapping[str, Damaged]
    """By tier."""
    lost: Damaged | None = None
    """Why nothing came back of an undamaged save, where that is so."""


def main() -> None:
    """Print a line a turn, then the table."""
    interrupt_on_signals()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", choices=list(BLOCKS), default=list(SIZES))
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--restores", type=int, default=2)
    parser.add_argument("--sides", nargs="+", choices=[OCTAVO, *PEERS], default=[OCTAVO, *PEERS])
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    add_arguments(parser)
    asked = parser.parse_args()
    if asked.saves < 2:
        parser.error("--saves: 2 at least, since the first is told apart")
    began = time.monotonic()
    left_out = {name: why for name in asked.sides if name in PEERS and (why := why_not(name))}
    left_out["DeepSpeed, DataStates"] = NO_DATASTATES
    sides = [name for name in asked.sides if name not in left_out]
    rows: list[Result] = []
    for size in asked.sizes:
        if why := _no_room(nbytes_of(size), asked.disk):
            left_out[f"saving, {size} a rank"] = why
            continue
        runs = {
            side: partial(turn_of, side, size, asked.saves, asked.restores, asked.disk)
            for side in sides
        }
        for side, found in take_turns(runs, asked.rounds, partial(_tell, size)).items():
            rows += rows_of(side, size, found)
    seconds = time.monotonic() - began
    report("bench_saving", rows, asked.out, seconds=seconds, left_out=left_out)


def turn_of(side: str, size: str, saves: int, restores: int, disk: Path) -> Turn:
    """Both runs of a side. Raises SideError."""
    around = keepers(nbytes_of(size)) if side == OCTAVO else contextlib.nullcontext("")
    with (
        tempfile.TemporaryDirectory(prefix="octavo-saving-", dir=disk) as folder,
        around as address,
    ):
        out, place = Path(folder), Path(folder) / "saves"
        place.mkdir()
        task = partial(Task, side, size, folder=str(place), out=folder, saves=saves)
        _run(task(phase="save", restores=restores, address=address), out)
        saved = json.loads((out / "save.json").read_text())
        broken: SideError | None = None
        try:
            _run(task(phase="restore", restores=restores, address=address), out)
        except SideError as error:
            broken = error
        back = out / "restore.json"
        restored = json.loads(back.read_text())["restored"] if back.exists() else []
        lost = None if back.exists() or broken is None else Damaged(_why(broken), 0, broken.hung)
        return Turn(
            saved["nbytes"],
            tuple(Save(**save) for save in saved["saves"]),
            tuple(Restored(**one) for one in [*saved["restored"], *restored]),
            # By a flipped byte, if the whole copy has been brought back before.
            damaged_of(_told(out), broken if back.exists() else None),
            lost,
        )


def damaged_of(
    told: Mapping[str, Sequence[Mapping[str, Any]]], broken: SideError | None
) -> dict[str, Damaged]:
    """What all ranks told of each tier; ``broken``: that the run on disk's copy ended so."""
    found = {}
    for tier, ranks in told.items():
        # Whoever refused first knows why; the others lost him.
        said = sorted((one["time"], one["refused"]) for one in ranks if one["refused"])
        found[tier] = Damaged(said[0][1] if said else "", sum(one["differing"] for one in ranks))
    if broken is not None and DISK not in found:
        found[DISK] = Damaged(_why(broken), 0, broken.hung)
    return found


def _why(error: SideError) -> str:
    """The last error that a program's output tells, or what became of the program."""
    lines = [line.strip() for line in str(error).splitlines()]
    raised = [line for line in lines if "Error: " in line and "ChildFailedError" not in line]
    return raised[-1] if raised else lines[0]


def _told(out: Path) -> dict[str, list[dict[str, Any]]]:
    """Of each tier's flipped byte, by the ranks that came so far as to say it."""
    told: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(out.glob("damaged-*.json")):
        told.setdefault(file.stem.split("-")[1], []).append(json.loads(file.read_text()))
    return told


def _run(task: Task, out: Path) -> None:
    file = out / "task.json"
    file.write_text(task.written())
    command = [str(BIN / "torchrun"), "--nproc-per-node", str(RANKS)]
    command += ["--master-port", str(free_port()), "-m", "tests.benchmarks.saving.rank", str(file)]
    run_to_end(command, out / f"{task.phase}.log", LIMIT_S, {"DS_ACCELERATOR": "cpu"})


def rows_of(side: str, size: str, found: Sequence[Turn | Failed]) -> list[Result]:
    """All rows of one side at one size."""
    turns = values(found)
    counts: dict[str, Any] = {"side": side, "failures": failures(found), "hangs": hangs(found)}
    nbytes = turns[0].nbytes if turns else nbytes_of(size)
    setting = f"{nbytes / 1e6:.0f} MB a rank, {RANKS} ranks"
    if not turns:
        why = next(one.why for one in found if isinstance(one, Failed))
        return [measured("save: loop stands still", setting, (), "s", note=_short(why), **counts)]
    warm = [save for turn in turns for save in turn.saves[1:]]
    cold = max(turn.saves[0].stall for turn in turns)
    beside = sum(save.beside for save in warm) / len(warm)
    synced = side == OCTAVO or PEERS[side].synced
    rate = [RANKS * nbytes / 1e6 / save.reached[DISK] for save in warm]
    disk = [save.reached[DISK] for save in warm]
    note = f"{warm[-1].written / 1e6:.0f} MB" + ("" if synced else ", not synced: lost with power")
    rows = [
        measured(
            "save: loop stands still",
            setting,
            [save.stall for save in warm],
            "s",
            note=f"first one {1e3 * cold:.3g} ms",
            **counts,
        ),
        measured(
            "save: training loses in all",
            setting,
            [save.lost for save in warm],
            "s",
            note=f"{beside:.1f} steps beside",
            **counts,
        ),
        measured("save: until on disk", setting, disk, "s", note=note, **counts),
        measured("save: bandwidth to disk", setting, rate, "MB/s", **counts),
    ]
    for tier in (RING, SEALED, MEMORY, PARTNER):
        if tier in warm[0].reached:
            times = [save.reached[tier] for save in warm]
            rows.append(measured(f"save: until {WHERE[tier]}", setting, times, "s", **counts))
    return rows + _restored_rows(side, setting, turns, counts)


def _restored_rows(
    side: str, setting: str, turns: Sequence[Turn], counts: Mapping[str, Any]
) -> list[Result]:
    none = at_most(0) if side == OCTAVO else None
    rows = []
    for tier in (RING, MEMORY, PARTNER, DISK):
        restored = [one for turn in turns for one in turn.restored if one.tier == tier]
        lost = [turn.lost for turn in turns if turn.lost is not None and tier == DISK]
        if restored or lost:
            times = [one.seconds for one in restored]
            note = _short(lost[0].refused) if lost else ""
            worse = {
                **counts,
                "failures": counts["failures"] + sum(not one.hung for one in lost),
                "hangs": counts["hangs"] + sum(one.hung for one in lost),
            }
            name = f"back, having been {WHERE[tier]}"
            rows.append(measured(name, setting, times, "s", note=note, **worse))
    differing = [one.differing for turn in turns for one in turn.restored]
    name = "tensors back that are not equal to the bit"
    rows.append(measured(name, setting, differing, "", aim=none, **counts))
    for tier in (RING, MEMORY, PARTNER, DISK):
        damaged = [turn.damaged[tier] for turn in turns if tier in turn.damaged]
        if not damaged:
            continue
        note = _short(damaged[0].refused) if damaged[0].refused else "loaded without a word"
        if not damaged[0].refused and not damaged[0].silent:
            note = "it hit nothing that is read"
        hung = {**counts, "hangs": counts["hangs"] + sum(one.hung for one in damaged)}
        silent = [float(one.silent) for one in damaged]
        name = f"a flipped byte {WHERE[tier]}: taken for the state"
        rows.append(measured(name, setting, silent, "", aim=none, note=note, **hung))
    return rows


def _no_room(nbytes: int, disk: Path) -> str | None:
    memory, space = psutil.virtual_memory().available, shutil.disk_usage(disk).free
    if memory < ROOM * nbytes:
        return f"{memory / 1e9:.1f} GB of memory are free, {ROOM * nbytes / 1e9:.1f} are needed"
    if space < DISK_ROOM * nbytes:
        return f"{disk} has {space / 1e9:.1f} GB free, {DISK_ROOM * nbytes / 1e9:.1f} are needed"
    return None


def _tell(size: str, turn: int, side: str, found: Turn | Failed) -> None:
    if isinstance(found, Failed):
        said = found.why
    else:
        save = found.saves[-1]
        said = f"stall {1e3 * save.stall:.1f} ms, on disk after {save.reached[DISK]:.2f} s"
    print(f"{size}, round {turn}, {side}: {said}", flush=True)


def _short(text: str) -> str:
    # A cell of a table.
    return text.splitlines()[0].replace("|", "/")[:120]


if __name__ == "__main__":
    main()
