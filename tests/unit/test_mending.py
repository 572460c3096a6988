"""An attempt's nodes are looked for by what the record says then, whatever came in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.lifecycle import Cause, JobState, TransitionRefused
from orchestrator.nodes.desk import FILL_EVERY_S
from orchestrator.store.rows import JobRow
from tests.unit.control_plane import ControlPlane, running, spares, tell, where


def test_a_spare_that_is_taken_as_an_attempt_is_asked_for_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = ControlPlane(tmp_path, 4, 4, 4)
    plane.groups.dead.add("node2")
    job = running(plane, num_nodes=2, resources={"spares": 1})
    plane.groups.dead |= {"node1"}
    plane.groups.dead.discard("node2")
    settle = plane.controller.desk.settle

    def meanwhile(row: JobRow, now: float) -> None:
        settle(row, now)
        plane.controller.desk.fill(plane.store.job(job), now + FILL_EVERY_S)

    monkeypatch.setattr(plane.controller.desk, "settle", meanwhile)
    assert spares(plane, job) == []
    again = plane.controller.next_attempt(job, 1, "a node died")
    assert [node.node_id for node in again.nodes] == ["node0", "node2"]
    assert (where(plane, job), spares(plane, job)) == (["node0", "node2"], [])


def test_one_that_gave_its_nodes_back_as_an_attempt_is_asked_for_takes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = ControlPlane(tmp_path, 4, 4, 4)
    job = running(plane, num_nodes=2)
    settle = plane.controller.desk.settle

    def meanwhile(row: JobRow, now: float) -> None:
        monkeypatch.undo()
        settle(row, now)
        tell(plane, job, transition=(JobState.PAUSED, Cause.PAUSE_ASKED))
        plane.supervisors.done.add(job)
        plane.steps(2)

    monkeypatch.setattr(plane.controller.desk, "settle", meanwhile)
    with pytest.raises(TransitionRefused):
        plane.controller.next_attempt(job, 1, "a rank died")
    assert not plane.groups.held.get(job) and plane.store.job(job).nodes == ()
