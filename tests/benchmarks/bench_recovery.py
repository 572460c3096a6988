"""How long recovery takes, with real ranks on this machine, from the supervisor's own events.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.bench_recovery [--out DIR]

Rows, in seconds and in steps of the same run: what a rollback in place costs beyond the steps
that it replays, which is the time from the decision to the record of the first replayed step less
that step's own (the aim is two steps at most); and from the news of a rank's SIGKILL to the next
step recorded, with standby workers and without. Two ranks; two layers of width 64, whose steps
are all overhead, and in place also the demo's model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray

from orchestrator.spec.job import JobSpec
from tests.benchmarks.results import Aim, Result, add_arguments, at_most, measured, report
from tests.cluster.supervised import SupervisedJob, small_spec

SURGES = (60, 120)
"""Twice: a layer that fails again after its return stays in BF16, where nothing saturates."""
KILL_AT = 453
"""Late enough for standby workers to have done their imports; three steps after a snapshot."""
AIM_STEPS = at_most(2)
"""That a rollback in place costs beyond the steps that it replays."""


def run(spec: JobSpec, folder: Path) -> dict[str, Any]:
    """All that a job told to its end."""
    with SupervisedJob(spec, folder) as job:
        return job.wait(600)


def rows_of(
    title: str,
    setting: str,
    seconds: Sequence[float],
    told: dict[str, Any],
    aim: Aim | None = None,
) -> list[Result]:
    """The same in seconds and in steps, and the steps lost; ``aim``: of the steps."""
    step_s = statistics.median(record.step_time_s for record in told["steps"])
    lost = [event.detail["steps_lost"] for event in told["events"] if event.kind == "recovered"]
    steps = [value / step_s for value in seconds]
    note = f"of {1000 * step_s:.1f} ms"
    return [
        measured(title, setting, seconds, "s"),
        measured(f"{title}, in steps", setting, steps, "", aim=aim, note=note),
        measured(f"{title}: steps lost", setting, lost, ""),
    ]


def recoveries(told: dict[str, Any]) -> list[float]:
    """Seconds from each decision to the next new record."""
    events = (event for event in told["events"] if event.kind == "recovered")
    return [event.detail["time_to_recover_s"] for event in events]


def in_place(setting: str, **sections: Any) -> list[Result]:
    """What rollbacks in place cost beyond the steps that they replay."""
    surges = [{"kind": "weight_surge", "step": step, "layer": 1, "factor": 64} for step in SURGES]
    with tempfile.TemporaryDirectory() as folder:
        tmp = Path(folder)
        training = small_spec(tmp).training.model_dump() | {"steps": 240}
        sections["training"] = training | sections.get("training", {})
        spec = small_spec(
            tmp,
            drills=surges,
            recovery={"calm_steps": 20, "horizon": 40},
            resources={"standby": False},
            **sections,
        )
        told = run(spec, tmp / "job")
    first: dict[int, float] = {}
    for record in told["steps"]:
        first.setdefault(record.timeline, record.step_time_s)
    replayed = [seconds for timeline, seconds in sorted(first.items()) if timeline > 0]
    beyond = [s - own for s, own in zip(recoveries(told), replayed, strict=True)]
    title = "rollback in place, beyond the replayed steps"
    return rows_of(title, setting, beyond, told, AIM_STEPS)


def killed(setting: str, standby: bool) -> list[Result]:
    """From the news of a rank's death to the next new step."""
    with tempfile.TemporaryDirectory() as folder:
        tmp = Path(folder)
        training = small_spec(tmp).training.model_dump() | {"steps": KILL_AT + 20}
        kill = [{"kind": "kill_rank", "step": KILL_AT, "rank": 1}]
        spec = small_spec(tmp, training=training, drills=kill, resources={"standby": standby})
        told = run(spec, tmp / "job")
    return rows_of("rank killed, to the next step", setting, recoveries(told), told)


def main() -> int:
    """Print the table; the number of runs that came to nothing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    asked = parser.parse_args()
    began = time.monotonic()
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        namespace="octavo",
        log_to_driver=False,
    )
    demo: dict[str, Any] = {
        "model": {"hidden_size": 128, "num_layers": 6, "num_heads": 4, "num_kv_heads": 2},
        "training": {"seq_len": 128, "train_batch_size": 16, "gradient_accumulation_steps": 2},
    }
    runs: dict[str, Callable[[str], list[Result]]] = {
        "small model": in_place,
        "demo model": partial(in_place, **demo),
        "small model, with standby": partial(killed, standby=True),
        "small model, without standby": partial(killed, standby=False),
    }
    rows: list[Result] = []
    failed = 0
    for setting, measure in runs.items():
        try:
            rows += measure(setting)
        except Exception as error:
            failed += 1
            hung = isinstance(error, TimeoutError)
            counts: dict[str, Any] = {"failures": int(not hung), "hangs": int(hung)}
            rows.append(measured("recovery", setting, (), "s", **counts, note=str(error)[:200]))
    ray.shutdown()
    report("bench_recovery", rows, asked.out, seconds=time.monotonic() - began)
    return failed


if __name__ == "__main__":
    sys.exit(main())
