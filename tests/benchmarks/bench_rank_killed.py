"""A rank's SIGKILL in mid-training: Octavo against what a user could take instead.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.bench_rank_killed [--rounds 10] [--steps 160]
        [--sides octavo octavo_each_step torchrun torchrun_fresh ray_train torchft] [--seed 0]
        [--folder runs/peers] [--kept FILE] [--out DIR]

Every side trains the demo's model on two data-parallel ranks of this machine (the layout that
torchft can have too), once undisturbed and then ``rounds`` times with one rank killed: which one,
after which step and how far into the next is drawn from the seed, the same for all sides of a
round. Sides take turns, another one first each round. Each keeps its state every 10 steps, and
``octavo_each_step`` in memory each step, which is told apart with what a step takes then: what is
done again is the same for all that keep state as often, and most of an outage of few seconds.

Per side: seconds a step in the second half of what was done before the fault; from the fault to
the end of the next new step; to that of the first step that is new or done again, which doesn't
hang on how long ago the state was kept; to that of the first one with all ranks, where survivors go
on alone; steps done again; steps whose loss differs from the side's own undisturbed run, and by how
much the mean of the last 10 does. Runs that failed or hung
(no new step for a minute) are counted beside these; where it is a side's undisturbed run, the rows
that compare with it have no value, and count it. Ratios are by rounds; of a peer that didn't come
back, by what it was away at least.
``--kept``: runs are kept in that file, and those in it are not done again.
DeepSpeed's launcher isn't among them unless asked for (``--sides deepspeed``): it ends the other
ranks and exits.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.benchmarks.demo_runs import Rows
from tests.benchmarks.peers.environments import FOLDER, releases
from tests.benchmarks.peers.jobs import LAYOUT, planned_fault, recorded_job
from tests.benchmarks.peers.judging import final_difference, losses, step_seconds
from tests.benchmarks.peers.processes import interrupt_on_signals
from tests.benchmarks.peers.runs import STALL_S, SideRun, run_side
from tests.benchmarks.peers.sides import SIDES, Side, available
from tests.benchmarks.peers.turns import rotated
from tests.benchmarks.results import (
    OCTAVO,
    Result,
    add_arguments,
    at_least,
    at_most,
    measured,
    report,
)

OURS = (OCTAVO, "octavo_each_step")
DEFAULT = (*OURS, "torchrun", "torchrun_fresh", "ray_train", "torchft")
WORLD = 2
LAUNCHER = "deepspeed"
NO_RECOVERY = "its launcher recovers from nothing: it ends the other ranks and exits"
AIMS = {"torchrun": 5.0, "torchrun_fresh": 5.0, "ray_train": 5.0, "torchft": 1.0}
"""How many times as long their outage is to be."""


def main() -> None:
    """Run what isn't kept, print a line a run, then the table."""
    interrupt_on_signals()
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sides", nargs="+", choices=sorted(SIDES), default=list(DEFAULT))
    parser.add_argument("--folder", type=Path, default=FOLDER, help="the peers' environments")
    parser.add_argument("--kept", type=Path, default=None, help="file of runs to go on with")
    add_arguments(parser)
    arguments = parser.parse_args()
    began = time.monotonic()
    folder = arguments.folder.resolve()
    sides, missing = available(arguments.sides, folder)
    kept = Rows(arguments.kept)
    with tempfile.TemporaryDirectory() as place:
        for turn in (None, *range(arguments.rounds)):
            for side in rotated(sides, turn or 0):
                key = _key(side.name, arguments.steps, arguments.seed, turn)
                if key not in kept:
                    run = _run(side, turn, arguments.steps, arguments.seed, Path(place))
                    kept.add(key, _kept(run))
                print(_line(side.name, turn, kept[key]), flush=True)
    found = {
        side.name: [
            kept[_key(side.name, arguments.steps, arguments.seed, turn)]
            for turn in (None, *range(arguments.rounds))
        ]
        for side in sides
    }
    rows = [row for side in sides for row in _rows(side, found[side.name])]
    rows += [row for name in OURS if name in found for row in _ratios(found, name)]
    left_out = {each.name: each.reason for each in missing}
    if LAUNCHER not in arguments.sides:
        left_out[LAUNCHER] = NO_RECOVERY
    report(
        "bench_rank_killed",
        rows,
        arguments.out,
        seconds=time.monotonic() - began,
        left_out=left_out,
        versions=releases([SIDES[name][0] for name in arguments.sides], folder),
    )


def _run(side: Side, turn: int | None, steps: int, seed: int, folder: Path) -> SideRun:
    planned = None if turn is None else planned_fault(seed, turn, steps=steps, world=WORLD)
    return run_side(side, recorded_job(steps), folder / f"{side.name}-{turn}", planned)


def _key(side: str, steps: int, seed: int, turn: int | None) -> str:
    return f"{side}, {steps} steps, seed {seed}, {'undisturbed' if turn is None else turn}"


def _kept(run: SideRun) -> dict[str, Any]:
    return {
        **asdict(run.verdict),
        "note": run.note,
        "step_s": step_seconds(
            [end for end in run.ends if run.fault is None or end.time < run.fault.time]
        ),
        # Of JSON's keys none is a number.
        "losses": list(losses(run.ends).items()),
    }


def _line(side: str, turn: int | None, told: dict[str, Any]) -> str:
    when = "undisturbed" if turn is None else f"round {turn}"
    line = f"{side}, {when}: {told['outcome']}"
    if told["outage_s"] is not None:
        whole = "never" if told["whole_s"] is None else f"{told['whole_s']:.2f} s"
        line += (
            f", next new step after {told['outage_s']:.2f} s, of all ranks after {whole}, "
            f"{told['redone']} redone, {told['alone']} with fewer ranks"
        )
    return line if not told["note"] else f"{line}\n{told['note']}"


def _rows(side: Side, told: Sequence[dict[str, Any]]) -> list[Result]:
    """``told``: the undisturbed run, then those with a fault."""
    runs = told[1:]
    good = [run for run in runs if run["outcome"] == "recovered"]
    whole: dict[str, Any] = {"side": side.name, **_counts(runs, "recovered")}
    setting = f"demo model, {LAYOUT}"
    outages = [run["outage_s"] for run in good if run["outage_s"] is not None]
    steps = [run["step_s"] for run in told if run.get("step_s") is not None]
    rows = [
        measured(OUTAGE, setting, outages, "s", note=side.how, **whole),
        measured("… a step, before it", setting, steps, "s", side=side.name),
    ]
    if any(run["alone"] for run in good):
        together = [run["whole_s"] for run in good if run["whole_s"] is not None]
        rows.append(measured("… to the first with all ranks", setting, together, "s", **whole))
    again = [run["again_s"] for run in good if run["again_s"] is not None]
    rows.append(measured("… to the first step, new or not", setting, again, "s", **whole))
    redone = [run["redone"] for run in good]
    rows.append(measured("… steps done again", setting, redone, "", **whole))
    found = [dict(map(tuple, run["losses"])) for run in good]
    # Without an undisturbed run there is nothing to compare with: rows without a value, which meet
    # no aim.
    undisturbed: dict[int, float] = {}
    compared: dict[str, Any] = {**whole, "note": f"the undisturbed run: {told[0]['outcome']}"}
    if told[0]["outcome"] == "undisturbed":
        undisturbed = dict(map(tuple, told[0]["losses"]))
        compared = whole
    else:
        for kind, count in _counts(told[:1], "undisturbed").items():
            compared[kind] += count
    differing = [
        sum(of.get(step) != loss for step, loss in undisturbed.items())
        for of in found
        if undisturbed
    ]
    equal = at_most(0) if side.name in OURS else None
    rows.append(measured("… steps of another loss", setting, differing, "", aim=equal, **compared))
    finals = [final_difference(of, undisturbed) for of in found]
    percents = [100 * value for value in finals if value is not None]
    rows.append(measured("… final loss, above undisturbed", setting, percents, "%", **compared))
    return rows


def _counts(runs: Sequence[dict[str, Any]], wanted: str) -> dict[str, int]:
    """Of runs that did not end as ``wanted``."""
    hangs = sum(run["outcome"] == "hang" for run in runs)
    failures = sum(run["outcome"] not in (wanted, "hang") for run in runs)
    return {"failures": failures, "hangs": hangs}


OUTAGE = "rank killed, to the next new step"


def _ratios(found: Mapping[str, Sequence[dict[str, Any]]], ours_is: str) -> list[Result]:
    """Each peer's outage over that of ``ours_is``, by rounds in which that was back, and without
    the steps that both do again.

    A peer that hung or failed in a round was away for ``STALL_S`` at least, and counts as so long:
    the rounds in which it came back would flatter it. Failures and hangs are Octavo's: no aim is
    met beside them. The peer's are told.
    """
    own = found[ours_is][1:]
    # Peers keep their state each 10 steps: against one each step, nothing is met.
    aims = AIMS if ours_is == OCTAVO else {}
    rows = []
    for name, told in found.items():
        if name in OURS:
            continue
        peers = _counts(told[1:], "recovered")
        of = (
            f"of {len(own)} of {name}'s, {peers['failures']} failed and {peers['hangs']} hung: "
            f"counted as {STALL_S:g} s"
        )
        pairs = [
            (theirs, ours)
            for theirs, ours in zip(told[1:], own, strict=True)
            if ours["outcome"] == "recovered"
        ]
        for title, time_s, aim in (
            (f"outage of {name} over {ours_is}'s", "outage_s", aims.get(name)),
            ("… to the first step, new or not", "again_s", None),
        ):
            rows.append(
                measured(
                    title,
                    f"demo model, {LAYOUT}",
                    [
                        (theirs[time_s] if theirs["outcome"] == "recovered" else STALL_S)
                        / ours[time_s]
                        for theirs, ours in pairs
                    ],
                    "×",
                    side=ours_is,
                    aim=at_least(aim) if aim is not None else None,
                    note=of if sum(peers.values()) else "",
                    **_counts(own, "recovered"),
                )
            )
    return rows


if __name__ == "__main__":
    main()
