"""An attempt's nodes are looked for by what the record says then, whatever came in between."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.digests import digest_of
from launch.keeper import Keeper
from launch.snapshots import SnapshotKey
from orchestrator.lifecycle import Cause, JobState, TransitionRefused
from orchestrator.nodes.desk import FILL_EVERY_S
from orchestrator.placement.quarantine import Quarantine
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
    settle = plane.controller.desk.settling.settle

    def meanwhile(row: JobRow, now: float) -> None:
        settle(row, now)
        plane.controller.desk.fill(plane.store.job(job), now + FILL_EVERY_S)

    monkeypatch.setattr(plane.controller.desk.settling, "settle", meanwhile)
    assert spares(plane, job) == []
    again = plane.controller.next_attempt(job, 1, "a node died")
    assert [node.node_id for node in again.nodes] == ["node0", "node2"]
    assert (where(plane, job), spares(plane, job)) == (["node0", "node2"], [])


def test_one_that_gave_its_nodes_back_as_an_attempt_is_asked_for_takes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = ControlPlane(tmp_path, 4, 4, 4)
    job = running(plane, num_nodes=2)
    settle = plane.controller.desk.settling.settle

    def meanwhile(row: JobRow, now: float) -> None:
        monkeypatch.undo()
        settle(row, now)
        tell(plane, job, transition=(JobState.PAUSED, Cause.PAUSE_ASKED))
        plane.supervisors.done.add(job)
        plane.steps(2)

    monkeypatch.setattr(plane.controller.desk.settling, "settle", meanwhile)
    with pytest.raises(TransitionRefused):
        plane.controller.next_attempt(job, 1, "a rank died")
    assert not plane.groups.held.get(job) and plane.store.job(job).nodes == ()


def test_a_node_that_was_left_since_the_pass_read_its_job_keeps_what_it_holds(
    tmp_path: Path,
) -> None:
    plane = ControlPlane(tmp_path, 4, 4, 4)
    job = running(plane, num_nodes=2)
    before = plane.store.job(job)
    holds = plane.groups.keepers[job] = {seat.bundle: Keeper() for seat in before.nodes}
    key = SnapshotKey(job, 1, 0, 5, 410)  # what the next attempt starts from
    holds[before.nodes[1].bundle].put(key, b"state", digest_of(b"state"))
    bad = Quarantine("node1", "10.0.0.2", "by_hand", "a bad NIC", "alice", "", plane.now, None)
    plane.store.nodes.quarantine(bad, [])
    tell(plane, job, transition=(JobState.RECOVERING, Cause.RANK_LOST))
    again = plane.controller.next_attempt(job, 1, "rank 5 died")
    assert [node.node_id for node in again.nodes] == ["node0", "node2"]
    plane.controller.desk.leave(before)
    assert plane.groups.held[job].keys() == {0, 1, 2}
    tell(plane, job, transition=(JobState.RUNNING, Cause.RECOVERED))
    plane.controller.desk.leave(plane.store.job(job))
    assert plane.groups.held[job].keys() == {0, 2}


@pytest.mark.parametrize("restarts", [False, True])
def test_a_spare_gets_no_number_of_a_seat_that_was_left_and_still_holds_copies(
    tmp_path: Path, restarts: bool
) -> None:
    plane = ControlPlane(tmp_path, 4, 4, 4)
    job = running(plane, num_nodes=3, resources={"min_nodes": 1, "spares": 1})
    before = plane.store.job(job)
    holds = plane.groups.keepers[job] = {seat.bundle: Keeper() for seat in before.nodes}
    holds[2].put(SnapshotKey(job, 1, 0, 9, 410), b"state", digest_of(b"state"))
    bad = Quarantine("node2", "10.0.0.3", "by_hand", "a bad NIC", "alice", "", plane.now, None)
    plane.store.nodes.quarantine(bad, [])
    tell(plane, job, transition=(JobState.RECOVERING, Cause.RANK_LOST))
    plane.controller.next_attempt(job, 1, "rank 9 died")
    if restarts:
        plane.controller = plane.new_controller()
    plane.groups.total["node3"] = 4
    plane.steps(10)
    held = {number: seat.node_id for number, seat in plane.groups.held[job].items()}
    assert held == {0: "node0", 1: "node1", 2: "node2", 3: "node3"}
    tell(plane, job, transition=(JobState.RUNNING, Cause.RECOVERED))
    plane.steps(300)
    held = {number: seat.node_id for number, seat in plane.groups.held[job].items()}
    assert held == {0: "node0", 1: "node1", 3: "node3"}
    assert {s.bundle for s in plane.store.job(job).nodes} == held.keys()
