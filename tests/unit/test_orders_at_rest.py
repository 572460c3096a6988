"""What was decided on an order is what its answer says, though the job comes to rest with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.lifecycle import Cause, JobState
from orchestrator.recovery.controls import Control
from tests.unit.control_plane import ControlPlane, running, tell
from tests.unit.scripted_job import LAYERS
from tests.unit.stored_job import JOB, StoredJob


def order(kind: str, key: str, **what: Any) -> Control:
    return Control(key=key, kind=kind, by="alice", time=5.0, **what)  # type: ignore[arg-type]


PRECISION = order("precision", "k1", to="bf16", layers=(LAYERS[0],))


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (PRECISION, "in force where the job goes on"),
        (order("exchange", "k1", to="bf16"), "in force where the job goes on"),
        (order("rollback", "k1", to_step=5), "goes on from step 5 or before"),
    ],
)
def test_an_order_that_a_pause_follows_at_once_is_done_and_told_so(
    tmp_path: Path, asked: Control, told: str
) -> None:
    job = StoredJob(tmp_path)
    job.train(13)
    for control in (asked, order("pause", "k2")):
        job.store.controls.ask(JOB, control)
    job.supervision.ask([asked, order("pause", "k2")])
    for _ in range(4):
        job.step()
        job.ranks.train()
    job.supervision._journal.flush(10.0)
    assert job.store.job(JOB).state.word == "paused"
    rows = {row.control.key: row for row in job.store.controls.of(JOB)}
    assert {key: row.state for key, row in rows.items()} == {"k1": "applied", "k2": "applied"}
    assert (
        told in rows["k1"].message
        or "In force" in rows["k1"].message
        or (asked.kind == "rollback" and "step 5" in rows["k1"].message)
    )


def test_of_several_quarantines_the_one_that_lasts_is_shown_and_none_is_forgotten(
    tmp_path: Path,
) -> None:
    plane = ControlPlane(tmp_path, 4, 4)
    roll = plane.controller.roll
    roll.quarantine("node0", "bad fan", "bob", None, 1000.0)
    roll.quarantine("node0", "look at it", "alice", 10.0, 1000.0)
    for _ in range(1001):
        roll.quarantine("node1", "look at it", "alice", 1.0, 1000.0)
    for now in (1005.0, 2000.0):
        (view,) = [v for v in roll.view(now) if v.node_id == "node0"]
        assert view.quarantine is not None and view.quarantine.reason == "Bad fan."


def test_a_job_whose_nodes_went_back_is_resumed_while_ray_is_away(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = running(plane)
    tell(plane, job, transition=(JobState.PAUSED, Cause.BUDGET_SPENT))
    plane.supervisors.done.add(job)
    plane.steps(5)

    def away() -> None:
        raise ConnectionError("the GCS is away")

    monkeypatch.setattr(plane.groups, "capacities", away)
    assert plane.controller.resume(job, "go on").state is JobState.QUEUED
