"""A job of several attempts is one run to W&B: synced from its folders, and written online.

Against ``wandb_stand_in``, which is no W&B: that a real server takes it the same way isn't shown.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from monitoring import metrics
from tests.unit.wandb_stand_in import WandbStandIn

JOB = "demo-sync01"
WANDB = Path(sys.executable).with_name("wandb")
ROOT = Path(__file__).parents[2]

ATTEMPT = """
import dataclasses, sys
from pathlib import Path
from monitoring.config import WandbConfig
from monitoring.wandb_run import WandbRun
from tests.unit.monitoring_traces import healthy_trace
from tests.unit.test_monitoring_wandb_run import action_row, checkpoint, incident_row
folder, mode, attempt = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
layers = ("layers.0.mlp.down",)
steps = healthy_trace(12, layers=layers)
again = [
    dataclasses.replace(r, attempt=2, time=r.time + 9.0)
    for r in healthy_trace(20, layers=layers, first=8)
]
run = WandbRun(WandbConfig(mode=mode), "demo-sync01", folder, {"name": "demo"})
if attempt == 1:
    run.start()
    run.log_start({"attempt": 1, "step": 0, "tier": "seed"})
    for record in steps:
        run.log_step(record)
    run.log_checkpoint(8, checkpoint(folder, 8))
    run.log_incident(incident_row(11))
    run.log_action(action_row(11, 8) | {"kind": "restart", "in_place": False})
    assert run.finish({"state": "paused"}, timeout=120)
else:
    restart = action_row(11, 8) | {"kind": "restart", "in_place": False}
    run.start(steps, [incident_row(11)], [restart])
    run.log_start({"attempt": 2, "step": 8, "tier": "disk"})
    for record in again:
        run.log_step(record)
    run.log_checkpoint(20, checkpoint(folder, 20))
    assert run.finish({"state": "succeeded", "steps": 20}, timeout=120)
assert not run.disabled and run.mode == mode
"""


def run_attempts(folder: Path, mode: str, env: dict[str, str]) -> None:
    for attempt in ("1", "2"):
        command = [sys.executable, "-c", ATTEMPT, str(folder), mode, attempt]
        subprocess.run(command, check=True, env=env, timeout=120, cwd=folder)


def environment(folder: Path, server: WandbStandIn) -> dict[str, str]:
    """A login of its own, and nothing of the one at home."""
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "WANDB_BASE_URL": server.url,
        "WANDB_API_KEY": "0" * 40,
    }


def check(server: WandbStandIn) -> None:
    """One run with all that both attempts told."""
    assert set(server.runs) == set(server.history) == {JOB}
    lines = [line for _, line in sorted(server.history[JOB].items())]
    steps = [line[metrics.STEP] for line in lines if metrics.LOSS in line]
    assert steps == [*range(12), *range(8, 20)], "each step of each attempt, once"
    assert [line[metrics.ATTEMPT] for line in lines if metrics.LOSS in line] == [1] * 12 + [2] * 12
    assert any(metrics.ACTIONS_TABLE in line for line in lines)
    made = [one["input"] for one in server.asked("CreateArtifact")]
    checkpoints = [one for one in made if one["artifactTypeName"] == "checkpoint"]
    aliases = [{alias["alias"] for alias in one["aliases"]} for one in checkpoints]
    assert [{"step-8", "attempt-1"} <= aliases[0], {"step-20", "attempt-2"} <= aliases[-1]] == [
        True
    ] * 2
    assert {one["runName"] for one in checkpoints} == {JOB}
    titles = [one["title"] for one in server.asked("NotifyScriptableRunAlert")]
    told = ("loss spike at step 11", "paused", "succeeded")
    assert titles == [f"{JOB}: {what}" for what in told]
    assert "restart to step 8" in server.runs[JOB]["notes"]


def test_syncing_the_folders_of_all_attempts_gives_one_run(tmp_path: Path) -> None:
    with WandbStandIn() as server:
        env = environment(tmp_path, server)
        run_attempts(tmp_path, "offline", env)
        assert (server.operations, server.telemetry) == ([], 0), "offline nobody is asked or told"
        folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
        assert len(folders) == 2
        command = [WANDB, "sync", *folders]
        # In a folder of its own: the command leaves a log where it runs.
        done = subprocess.run(
            command, capture_output=True, text=True, env=env, timeout=120, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
    check(server)


def test_written_online_it_is_one_run_as_well_with_the_lineage_of_its_checkpoints(
    tmp_path: Path,
) -> None:
    with WandbStandIn() as server:
        run_attempts(tmp_path, "online", environment(tmp_path, server))
    check(server)
    # What the second attempt went on from is asked for, to be drawn as its input.
    asked = [str(variables) for _, variables in server.operations]
    assert any(f"{JOB}-checkpoint:step-8" in one for one in asked)
