"""From submit to the end of the first step, cold and warm, against torchrun and Ray Train.

    python -m tests.benchmarks.bench_start [--rounds 3] [--folder runs/peers] [--out DIR]

The demo's model and layout. Octavo cold: a running controller, no worker; warm: `octavo up
--standby 4`, its workers imported; both from the submission. Ray Train: TorchTrainer on a Ray that
runs already, from ``fit()``, its driver imported. torchrun: the plain script, from its command;
there is nothing that would run before. Sides take turns; a ratio is of two runs of one round.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from orchestrator.spec.job import JobSpec, load_spec
from tests.benchmarks.peers.environments import (
    FOLDER,
    Environment,
    Unavailable,
    environment_of,
    releases,
)
from tests.benchmarks.peers.processes import ROOT, interrupt_on_signals
from tests.benchmarks.peers.turns import Failed, failures, hangs, take_turns, values, why
from tests.benchmarks.results import (
    OCTAVO,
    Result,
    add_arguments,
    at_least,
    at_most,
    measured,
    report,
)
from tests.benchmarks.sides import cluster, ray_of, under_octavo, under_ray_train, under_torchrun

IMPORTS_S = 40.0
"""Seconds after which four standby workers on two cores have done their imports."""
RANKS = 4
COLD, WARM, TORCHRUN, RAY_TRAIN = "octavo, cold", "octavo, standby", "torchrun", "ray_train"
START = "submit to the end of the first step"


def main() -> None:
    """Print a line a turn, then times and ratios."""
    interrupt_on_signals()
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="the peers' environments")
    add_arguments(parser)
    arguments = parser.parse_args()
    began = time.monotonic()
    demo = load_spec(ROOT / "deploy/jobs/demo.yaml")
    training = demo.training.model_copy(update={"steps": 3, "warmup_steps": 0})
    spec = demo.model_copy(update={"training": training, "drills": ()})
    peer = environment_of(RAY_TRAIN, arguments.folder.resolve())
    with tempfile.TemporaryDirectory() as folder:
        sides: dict[str, Callable[[], float]] = {
            COLD: partial(_octavo, spec, Path(folder), standby=0),
            WARM: partial(_octavo, spec, Path(folder), standby=RANKS),
            TORCHRUN: lambda: under_torchrun(spec, Path(folder)).first_step_s,
        }
        if isinstance(peer, Environment):
            sides[RAY_TRAIN] = partial(_ray_train, spec, Path(folder), peer)
        told = take_turns(sides, arguments.rounds, _tell)
    rows = [
        measured(
            _name(START, side),
            "demo model, 2x2",
            values(found),
            "s",
            side=_who(side),
            failures=failures(found),
            hangs=hangs(found),
            note=why(found),
        )
        for side, found in told.items()
    ]
    left_out = {peer.name: peer.reason} if isinstance(peer, Unavailable) else {}
    rows += _ratios(told)
    report(
        "bench_start",
        rows,
        arguments.out,
        seconds=time.monotonic() - began,
        left_out=left_out,
        versions=releases((RAY_TRAIN,), arguments.folder.resolve()),
    )


def _octavo(spec: JobSpec, folder: Path, standby: int) -> float:
    with cluster(folder / "home", slots=RANKS, standby=standby) as client:
        if standby:
            time.sleep(IMPORTS_S)
        return under_octavo(client, spec).first_step_s


def _ray_train(spec: JobSpec, folder: Path, peer: Environment) -> float:
    with ray_of(peer, folder, slots=RANKS) as joined:
        return under_ray_train(spec, folder, peer, joined).first_step_s


def _tell(turn: int, side: str, found: float | Failed) -> None:
    what = found.why if isinstance(found, Failed) else f"{found:.1f} s"
    print(f"round {turn}, {side}: {what}", flush=True)


def _ratios(told: Mapping[str, Sequence[float | Failed]]) -> list[Result]:
    """By rounds that have both: cold over each peer's, and each peer's over the warm one's.

    Failures and hangs are those of Octavo's side: no aim is met beside them. The peer's are told.
    """
    rows = []
    for peer in (TORCHRUN, RAY_TRAIN):
        no_slower = at_most(1.0) if peer == RAY_TRAIN else None
        compared = (
            (f"start, cold, over {peer}'s", COLD, COLD, peer, no_slower),
            (f"start of {peer} over standby's", WARM, peer, WARM, at_least(3.0)),
        )
        for name, own, over, under, aim in compared:
            if peer not in told or own not in told:
                continue
            ratios = [
                a / b
                for a, b in zip(told[over], told[under], strict=True)
                if not isinstance(a, Failed) and not isinstance(b, Failed)
            ]
            notes = filter(None, (why(told[own]), why(told[peer], of=f"{peer}:")))
            counts = {"failures": failures(told[own]), "hangs": hangs(told[own])}
            note = "; ".join(notes)
            row = measured(name, "the same", ratios, "×", aim=aim, note=note, **counts)
            rows.append(row)
    return rows


def _who(side: str) -> str:
    return OCTAVO if side in (COLD, WARM) else side


def _name(what: str, side: str) -> str:
    return f"{what}, {side.removeprefix('octavo, ')}" if _who(side) == OCTAVO else what


if __name__ == "__main__":
    main()
