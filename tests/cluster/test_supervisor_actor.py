"""The supervisor actor with real ranks: it recovers in place, restarts, stops, takes over."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from monitoring.job_view import split_timelines
from monitoring.records import StepRecord
from orchestrator.actions import Action
from tests.cluster.processes import runs
from tests.cluster.supervised import SupervisedJob, small_spec

pytestmark = pytest.mark.usefixtures("local_ray")

LAYER = "layers.1.mlp.down"


def losses(steps: list[StepRecord]) -> list[tuple[int, str]]:
    """(step, loss to the last bit) of the steps that led to the end."""
    kept, _ = split_timelines(steps)
    return [(record.step, record.loss.hex()) for record in kept]


def rank_pids() -> set[int]:
    """This Ray's living rank processes."""
    return pids_of("Worker")


def pids_of(actor: str) -> set[int]:
    """This Ray's living processes of actors of a class."""
    pids = set()
    for child in psutil.Process().children(recursive=True):
        # It may end between being listed and being asked; a zombie has ended.
        with contextlib.suppress(psutil.NoSuchProcess):
            if any(f"ray::{actor}" in part for part in child.cmdline()[:1]):
                pids.add(child.pid)
    return pids


def kinds(actions: list[Action]) -> list[str]:
    return [action.kind for action in actions]


def test_a_surge_is_answered_in_place_and_a_frozen_relay_is_left(tmp_path: Path) -> None:
    spec = small_spec(
        tmp_path,
        drills=[{"kind": "weight_surge", "step": 33, "layer": 1, "factor": 64}],
        recovery={"calm_steps": 12},
        training=_steps(tmp_path, 100_000),  # it is stopped when it has shown what it must
        resources={"standby": False},
        merge_reports_from=2,
    )
    with SupervisedJob(spec, tmp_path) as job:
        job.wait_until(lambda told: told["actions"][1:] and not _latest(told).high_precision_layers)
        (relay,) = pids_of("RelayActor")
        psutil.Process(relay).suspend()  # one that is dead is found out at once
        heard = _latest(job.told()).step
        job.wait_for_step(heard + 100)  # more than can have been under way
        ray.get(job.supervisor.stop.remote("enough"))
        told = job.wait()
        psutil.Process(relay).resume()
        assert kinds(told["actions"]) == ["layer_fallback", "return_to_fp8"]
        fallback = told["actions"][0]
        assert fallback.in_place and fallback.to_step <= 33 and LAYER in fallback.precision
        assert told["attempt"] == 1
        kept, abandoned = split_timelines(told["steps"])
        assert [record.step for record in kept] == list(range(len(kept)))
        assert abandoned and not kept[-1].high_precision_layers
        assert any(LAYER in record.high_precision_layers for record in kept)
        assert not set(fallback.skip_batches) & {record.batch for record in kept}
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert summary["state"] == "cancelled" and summary["steps"] == len(kept)
        assert (tmp_path / "report.html").stat().st_size > 1000
    assert not rank_pids()


def test_a_killed_rank_costs_the_steps_since_the_snapshot_and_no_bit(tmp_path: Path) -> None:
    undisturbed = small_spec(tmp_path, training=_steps(tmp_path, 40), resources={"standby": False})
    with SupervisedJob(undisturbed, tmp_path / "a") as job:
        expected = losses(job.wait()["steps"])
    disturbed = small_spec(
        tmp_path,
        training=_steps(tmp_path, 40),
        drills=[{"kind": "kill_rank", "step": 23, "rank": 1}],
        merge_reports_from=2,
    )
    with SupervisedJob(disturbed, tmp_path / "b") as job:
        told = job.wait()
    (action,) = told["actions"]
    assert action.kind == "restart" and action.incidents[0].ranks == (1,)
    assert told["attempt"] == 2
    started = [e.detail for e in told["events"] if e.kind == "attempt_started"]
    assert [(d["step"], d["tier"]) for d in started] == [(0, "seed"), (20, "memory")]
    assert losses(told["steps"]) == expected


def test_a_stop_leaves_a_checkpoint_that_the_next_attempt_starts_from(tmp_path: Path) -> None:
    spec = small_spec(tmp_path, training=_steps(tmp_path, 400))
    with SupervisedJob(spec, tmp_path) as job:
        job.wait_for_step(12)
        ray.get(job.supervisor.stop.remote("cancelled by a user"))
        told = job.wait(60)
        assert told["states"][-1] == ("cancelled", "ENDED")
        (made,) = [e for e in told["events"] if e.kind == "checkpoint_written"]
        step = made.detail["step"]
        assert (tmp_path / "checkpoints" / f"step-{step:08d}" / "manifest.json").exists()
        assert max(r.step for r in told["steps"]) == step - 1


def test_a_supervisor_that_dies_takes_its_ranks_along_and_the_next_goes_on(
    tmp_path: Path,
) -> None:
    spec = small_spec(
        tmp_path,
        training=_steps(tmp_path, 60),
        resources={"standby": False},
        merge_reports_from=2,
    )
    with SupervisedJob(spec, tmp_path) as job:
        job.wait_for_step(22)
        before = rank_pids()
        assert len(before) == 2
        ray.kill(job.supervisor)
        end = time.monotonic() + 20
        while any(runs(pid) for pid in before):
            assert time.monotonic() < end, "the ranks outlive their supervisor"
            time.sleep(0.1)
        told = job.told()
        job.supervise(ray.get(job.controller.next_attempt.remote("scripted-000001", 1, "lost")))
        told = job.wait()
        assert told["states"][-1] == ("succeeded", "STEPS_DONE"), told["events"]
        started = [e.detail for e in told["events"] if e.kind == "attempt_started"]
        assert started[-1]["tier"] == "memory" and started[-1]["step"] >= 20
        assert "unrecorded" not in {e.kind for e in told["events"]}, "the ranks went on alone"
        recorded = [(r.attempt, r.step) for r in told["steps"]]
        assert {step for _, step in recorded} == set(range(60)), recorded


def test_an_error_in_the_job_fails_it_with_what_the_ranks_raised(tmp_path: Path) -> None:
    spec = small_spec(tmp_path, resources={"standby": False})
    Path(spec.data.source).unlink()
    with SupervisedJob(spec, tmp_path) as job:
        told = job.wait()
        assert kinds(told["actions"]) == ["restart", "fail"]
        assert told["states"][-1] == ("failed", "ERROR")
        assert "text.py" in told["actions"][-1].reason


def _steps(tmp_path: Path, steps: int) -> dict[str, object]:
    return small_spec(tmp_path).training.model_dump() | {"steps": steps}


def _latest(told: dict[str, Any]) -> StepRecord:
    """The step that was told last."""
    latest: StepRecord = told["steps"][-1]
    return latest
