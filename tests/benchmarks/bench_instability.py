"""Unstable training: Octavo against what a user could take instead, on the same fault.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.bench_instability [--steps 300] [--onset 175]
        [--seeds 0 1 2] [--sides octavo torchrun …] [--faults nan_passing …] [--every 10]
        [--kept FILE] [--out DIR]

Every side trains one small model (FP8 linears, one process) on the same batches from the same
weights, undisturbed and then once with each fault, which the same drill code puts in at the same
step. Octavo's side is a job with its own defaults: its detectors, its ladder, its snapshots each
10 steps (without Ray, ``tests.incidents.local_ranks``: nothing is started anew here). The others
are a plain loop under ``torchrun --max-restarts 3`` with a checkpoint each ``--every`` steps, and
one published rule acting with its own defaults (``peers.stability_rules`` has each one's source).
Octavo's engine is DeepSpeed's with BF16 parameters, theirs is plain PyTorch with FP32 ones: so
each side is held to its own undisturbed run of that seed.

When a run is back on the undisturbed curve is defined in ``back_on_curve``; the limit is how far
seeds alone lie apart. Per fault and side: steps executed and seconds until then, steps done again
or left out, final loss above the undisturbed one, and whether a person is needed. Runs that didn't
come back, or ended for a person to see to, are failures beside these; what a person would have been
called for is the note. Sides take turns, another one first each round. ``--kept``: runs are kept in
that file, and those in it are not done again.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from orchestrator.spec.completion import complete
from orchestrator.spec.job import JobSpec, spec_yaml
from tests.benchmarks.back_on_curve import Curve, Executed, Verdict, curve_of, judge, tolerance
from tests.benchmarks.demo_runs import Rows
from tests.benchmarks.peers.instability_train import RAISED, STEPS, STOPPED
from tests.benchmarks.peers.jobs import SAVE_EVERY
from tests.benchmarks.peers.processes import (
    ROOT,
    Program,
    SideError,
    end_all,
    interrupt_on_signals,
    new_mark,
)
from tests.benchmarks.peers.stability_rules import RULES
from tests.benchmarks.peers.turns import rotated
from tests.benchmarks.results import OCTAVO, Result, add_arguments, measured, report
from tests.incidents.local_ranks import Told, run_job

SCRIPT = ROOT / "tests/benchmarks/peers/instability_train.py"
MAX_RESTARTS = 3
START_S, STEP_S = 240.0, 1.0
"""A run is hung after the first and the second for each of its steps: many times what it takes."""
LAYER = 1
Ended = Literal["finished", "person", "failed", "hung"]
"""To its last step; before it, for a person to see to; of something that is no answer to a fault;
ended by us."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, on every side alike."""

    words: str
    drill: Mapping[str, Any] = field(hash=False)
    recurs: bool = False
    """It is in the data: there whenever its batch is trained on."""


FAULTS: Mapping[str, Fault] = {
    "nan_passing": Fault("a NaN in a gradient, once", {"kind": "nonfinite_gradient"}),
    "nan_batch": Fault(
        "a batch that makes a NaN in a gradient", {"kind": "nonfinite_gradient"}, recurs=True
    ),
    "poisoned": Fault(
        "three batches of random tokens", {"kind": "poisoned_batch", "batches": 3}, recurs=True
    ),
    "surge": Fault(
        "MLP weights of one layer × 64", {"kind": "weight_surge", "layer": LAYER, "factor": 64}
    ),
}
SIDES = (OCTAVO, *RULES)
OURS = "a job with the defaults of its spec, without Ray, controller, store and W&B"


@dataclass(frozen=True, slots=True)
class Run:
    """What became of one run."""

    executed: tuple[Executed, ...]
    ended: Ended
    why: str = ""
    """What a person would have to see to, or what failed."""
    answers: tuple[str, ...] = ()
    """What was done about it, in order."""


@dataclass(frozen=True, slots=True)
class Case:
    """One run to do."""

    side: str
    fault: str | None
    seed: int
    steps: int
    onset: int
    every: int

    @property
    def key(self) -> str:
        """Its name in the file of runs; an undisturbed one is the same for every onset."""
        fault = "undisturbed" if self.fault is None else f"{self.fault} at {self.onset}"
        return f"{self.side}/{fault}/{self.seed}/{self.steps}/{self.every}"

    def spec(self) -> JobSpec:
        """The job; the peers take its model, data, numbers and drills."""
        drills = () if self.fault is None else ({"step": self.onset, **FAULTS[self.fault].drill},)
        values = {
            "name": "instability",
            "slots_per_node": 1,
            "parallelism": {"data": 1},
            "model": {"hidden_size": 64, "num_layers": 2, "num_heads": 2},
            "data": {"shuffle_seed": self.seed},
            "training": {
                "steps": self.steps,
                "seq_len": 64,
                "train_batch_size": 16,
                "lr": 3e-3,
                "warmup_steps": 20,
                "seed": self.seed,
            },
            "fp8": {"recipe": "delayed", "amax_history_len": 16},
            "checkpoint": {"every": self.every},
            "wandb": {"mode": "disabled"},
            "drills": drills,
        }
        return complete(JobSpec.model_validate(values))


def main() -> None:
    """Run what isn't kept, print a line a run, then the table."""
    interrupt_on_signals()
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--onset", type=int, default=175, help="the fault's step")
    parser.add_argument("--every", type=int, default=SAVE_EVERY, help="steps between checkpoints")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--faults", nargs="+", choices=sorted(FAULTS), default=list(FAULTS))
    parser.add_argument("--kept", type=Path, default=None, help="file of runs to go on with")
    parser.add_argument("--patience", type=float, default=1.0, help="more on a busy machine")
    add_arguments(parser)
    asked = parser.parse_args()
    began = time.monotonic()
    kept = Rows(asked.kept)
    numbers = {"steps": asked.steps, "onset": asked.onset, "every": asked.every}
    cases = {
        (side, fault, seed): Case(side, fault, seed, **numbers)
        for side in asked.sides
        for fault in (None, *asked.faults)
        for seed in asked.seeds
    }
    with tempfile.TemporaryDirectory(prefix="octavo-instability-") as folder:
        turns = [(seed, fault) for seed in asked.seeds for fault in (None, *asked.faults)]
        for turn, (seed, fault) in enumerate(turns):
            for side in rotated(asked.sides, turn):
                case = cases[side, fault, seed]
                if case.key not in kept:
                    place = Path(tempfile.mkdtemp(dir=folder))
                    kept.add(case.key, to_json(run(case, place, asked.patience)))
                print(_line(case, from_json(kept[case.key])), flush=True)
    runs = {at: from_json(kept[case.key]) for at, case in cases.items()}
    rows = list(table(runs, asked.sides, asked.faults, asked.seeds, numbers))
    report("bench_instability", rows, asked.out, seconds=time.monotonic() - began)


# One run.


def run(case: Case, folder: Path, patience: float = 1.0) -> Run:
    """Do it; whatever becomes of it is a Run. ``patience``: times as long as it may take."""
    do = _octavo if case.side == OCTAVO else _peer
    try:
        return do(case, folder, patience)
    except SideError as error:
        return Run((), "hung" if error.hung else "failed", str(error))
    except Exception as error:
        # What becomes of a side is its result, whatever it is.
        return Run((), "failed", f"{type(error).__name__}: {error}")


def _octavo(case: Case, folder: Path, patience: float) -> Run:
    try:
        told = run_job(case.spec(), folder=folder, patience=2 * patience)
    except TimeoutError as error:
        raise SideError(str(error), hung=True) from error
    _check_seen_once(case, told)
    executed = tuple(
        Executed(of.step, of.loss, of.time, applied=not of.skipped) for of in told.records
    )
    answers = tuple(action.kind for action in told.actions)
    if told.state == "succeeded":
        return Run(executed, "finished", answers=answers)
    reason = told.actions[-1].reason if told.actions else "no action"
    return Run(executed, "person", f"{told.state}: {reason}", answers)


def _check_seen_once(case: Case, told: Told) -> None:
    """A job fires a drill once: where the fault is in a batch, a second look at it would be a
    kinder fault than the others'. Poisoned batches are poisoned whenever they are seen."""
    if case.fault is None or FAULTS[case.fault].drill["kind"] == "poisoned_batch":
        return
    seen = sum(record.batch == case.onset for record in told.records)
    if FAULTS[case.fault].recurs and seen > 1:
        raise SideError(f"batch {case.onset} was trained on {seen} times, its fault is in one")


def _peer(case: Case, folder: Path, patience: float) -> Run:
    spec = folder / "job.yaml"
    spec.write_text(spec_yaml(case.spec()))
    told = folder / "run"
    recurs = case.fault is not None and FAULTS[case.fault].recurs
    command = [
        *(str(Path(sys.executable).parent / "torchrun"), "--standalone"),
        *("--nproc-per-node", "1", "--max-restarts", str(MAX_RESTARTS)),
        *(str(SCRIPT), str(spec), "--rule", case.side, "--folder", str(told)),
        *("--every", str(case.every), *(("--recurs",) if recurs else ())),
    ]
    mark = new_mark()
    try:
        program = Program(command, mark, log=folder / "log.txt")
        deadline = time.monotonic() + patience * (START_S + STEP_S * case.steps)
        while (code := program.poll()) is None:
            if time.monotonic() > deadline:
                raise SideError(f"not over in time; it ends:\n{program.tail()}", hung=True)
            time.sleep(0.2)
    finally:
        end_all(mark)
    executed = tuple(Executed(**row) for row in _read(told / STEPS))
    raised = [row["why"] for row in _read(told / RAISED)]
    answers = ("restart",) * min(len(raised), MAX_RESTARTS)
    if (stopped := told / STOPPED).exists():
        return Run(executed, "person", stopped.read_text(), (*answers, "stop"))
    if code == 0:
        return Run(executed, "finished", answers=answers)
    if len(raised) > MAX_RESTARTS:
        return Run(executed, "person", f"{MAX_RESTARTS} restarts are spent: {raised[-1]}", answers)
    return Run(executed, "failed", f"exit code {code}; it ends:\n{program.tail()}", answers)


def _read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def to_json(run: Run) -> dict[str, Any]:
    return {**asdict(run), "executed": [list(asdict(of).values()) for of in run.executed]}


def from_json(row: Mapping[str, Any]) -> Run:
    executed = tuple(Executed(*of) for of in row["executed"])
    return Run(executed, row["ended"], row["why"], tuple(row["answers"]))


def _line(case: Case, run: Run) -> str:
    done = f"{len(run.executed)} steps done, {run.ended}"
    answers = f"; {', '.join(run.answers)}" if run.answers else ""
    why = f": {run.why}" if run.why else ""
    return f"{case.side}, {case.fault or 'undisturbed'}, seed {case.seed}: {done}{answers}{why}"


# What they come to.

Runs = Mapping[tuple[str, str | None, int], Run]
"""By side, fault (None: undisturbed) and seed."""


def table(
    runs: Runs,
    sides: Sequence[str],
    faults: Sequence[str],
    seeds: Sequence[int],
    numbers: Mapping[str, int],
) -> Iterator[Result]:
    """The rows; first what each side did with nothing wrong."""
    onset, steps = numbers["onset"], numbers["steps"]
    curves = {
        (side, seed): curve_of(runs[side, None, seed].executed)
        for side in sides
        for seed in seeds
        if runs[side, None, seed].ended == "finished"
    }
    of_sides = {
        side: [curves[side, seed] for seed in seeds if (side, seed) in curves] for side in sides
    }
    within = tolerance(of_sides, onset)
    shape = f"2 layers of 64, {steps} steps, fault at {onset}"
    yield measured(
        "limit of being back: how far seeds lie apart", shape, [within], "nats", side="all"
    )
    for side in sides:
        of_side = [runs[side, None, seed] for seed in seeds]
        whole = [(run, curve_of(run.executed)) for run in of_side if run.ended == "finished"]
        lost = [_judged(run, curve, numbers, within).lost for run, curve in whole]
        note = OURS
        if side in RULES:
            note = f"{RULES[side].label}, in our loop by its source: {RULES[side].source}"
        yield measured(
            "nothing wrong: steps lost", shape, lost, "", side=side, note=note, **_beside(of_side)
        )
    for fault in faults:
        for side in sides:
            held = {s: runs[side, fault, s] for s in seeds if (side, s) in curves}
            told = {s: _judged(run, curves[side, s], numbers, within) for s, run in held.items()}
            yield from _rows(FAULTS[fault].words, shape, side, seeds, held, told)


def _judged(run: Run, curve: Curve, numbers: Mapping[str, int], within: float) -> Verdict:
    return judge(run.executed, curve, onset=numbers["onset"], steps=numbers["steps"], within=within)


def _rows(
    words: str,
    shape: str,
    side: str,
    seeds: Sequence[int],
    held: Mapping[int, Run],
    told: Mapping[int, Verdict],
) -> Iterator[Result]:
    """A side's rows of one fault; a seed without an undisturbed curve counts as failed."""
    hangs = sum(run.ended == "hung" for run in held.values())

    def row(name: str, values: Sequence[float | None], unit: str, note: str = "") -> Result:
        had = [value for value in values if value is not None]
        failures = len(seeds) - len(had) - hangs
        return measured(
            name, shape, had, unit, side=side, failures=failures, hangs=hangs, note=note
        )

    back = {
        s: v for s, v in told.items() if held[s].ended == "finished" and not _is_spoilt(held[s])
    }
    note = called(held.values())
    name = f"{words}: steps to be back on the undisturbed curve"
    yield row(name, [v.steps for v in back.values()], "", note)
    yield row("… seconds", [v.seconds for v in back.values()], "s")
    yield row("… steps done again or left out", [v.lost for v in back.values()], "")
    percents = [None if v.final is None else 100 * v.final for v in back.values()]
    yield row("… final loss, above undisturbed", percents, "%")
    # Of every run there is an answer to this, so that none is missing.
    alone = [float(_needs_a_person(run)) for run in held.values() if run.ended != "hung"]
    yield row("… of each run: a person is needed", alone, "")


def called(runs: Iterable[Run]) -> str:
    """Whether a person is needed, and what for."""
    all_runs = list(runs)
    needed = [run.why for run in all_runs if run.ended == "person"]
    if needed:
        return f"a person in {len(needed)} of {len(all_runs)}: {needed[0]}"
    spoilt = [run for run in all_runs if run.ended == "finished" and _is_spoilt(run)]
    if spoilt:
        return f"a person in {len(spoilt)} of {len(all_runs)}: trains on with a loss of NaN"
    broken = [run for run in all_runs if run.ended in ("failed", "hung")]
    if broken:
        return f"{broken[0].ended}: {broken[0].why.splitlines()[0]}"
    answers = [", ".join(run.answers) for run in all_runs if run.answers]
    return f"no person; {answers[0]}" if answers else "no person"


def _needs_a_person(run: Run) -> bool:
    return run.ended != "finished" or _is_spoilt(run)


def _is_spoilt(run: Run) -> bool:
    return not run.executed or not math.isfinite(run.executed[-1].loss)


def _beside(runs: Iterable[Run]) -> dict[str, Any]:
    ended = [run.ended for run in runs]
    hangs = ended.count("hung")
    return {"hangs": hangs, "failures": len(ended) - ended.count("finished") - hangs}


if __name__ == "__main__":
    main()
