"""How long recovery takes, with real ranks on this machine, from the supervisor's own events.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.bench_recovery

Prints, in seconds and in steps of the same run: from the decision to the first replayed
step recorded after a rollback in place; and from the news of a rank's SIGKILL to the next
step recorded, with standby workers and without. Two ranks, two layers of width 64.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import ray

from tests.cluster.supervised import SupervisedJob, small_spec

SURGES = (60, 120)
"""Twice: a layer that fails again after its return stays in BF16, where nothing saturates."""
KILL_AT = 453
"""Late enough for standby workers to have done their imports; three steps after a snapshot."""


def measure(title: str, **sections: Any) -> None:
    """Run one job and print its recoveries."""
    with tempfile.TemporaryDirectory() as folder:
        tmp = Path(folder)
        training = small_spec(tmp).training.model_dump() | {"steps": sections.pop("steps")}
        spec = small_spec(tmp, training=training, **sections)
        with SupervisedJob(spec, tmp / "job") as job:
            told = job.wait(300)
    step_s = statistics.median(record.step_time_s for record in told["steps"])
    details = [event.detail for event in told["events"] if event.kind == "recovered"]
    seconds = [detail["time_to_recover_s"] for detail in details]
    listed = ", ".join(f"{value:.3f}" for value in seconds)
    lost = [detail["steps_lost"] for detail in details]
    print(
        f"{title}: {listed} s (median {statistics.median(seconds) / step_s:.1f} steps of "
        f"{1000 * step_s:.1f} ms; steps lost: {lost})",
        flush=True,
    )


def main() -> None:
    """All three."""
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        namespace="octavo",
        log_to_driver=False,
    )
    surges = [{"kind": "weight_surge", "step": step, "layer": 1, "factor": 64} for step in SURGES]
    measure(
        "rollback in place, detection to first replayed step",
        steps=240,
        drills=surges,
        recovery={"calm_steps": 20, "horizon": 40},
        resources={"standby": False},
    )
    kill = [{"kind": "kill_rank", "step": KILL_AT, "rank": 1}]
    for standby in (True, False):
        measure(
            f"rank killed, {'with' if standby else 'without'} standby, to the next step",
            steps=KILL_AT + 20,
            drills=kill,
            resources={"standby": standby},
        )
    ray.shutdown()


if __name__ == "__main__":
    main()
