"""Who of the queue is given nodes, who holds up those behind, and who is let past."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.lifecycle import Cause, JobState
from orchestrator.nodes.sight import Sight
from orchestrator.placement.quarantine import Quarantine
from tests.unit.control_plane import ControlPlane, running, tell

BATCH = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 1}


def elastic(plane: ControlPlane, priority: int = 0) -> str:
    """Alice's job, that asks for four nodes and can do with two."""
    resources = {"min_nodes": 2, "priority": priority}
    return plane.submit("elastic", by="alice", num_nodes=4, resources=resources, training=BATCH)


def ended(plane: ControlPlane, job: str) -> None:
    tell(plane, job, transition=(JobState.SUCCEEDED, Cause.STEPS_DONE))
    plane.supervisors.done.add(job)


class TestFewerNodesThanItAsksFor:
    """``resources.min_nodes`` in the queue."""

    def test_what_fits_on_fewer_waits_for_them_and_does_not_fail(self, tmp_path: Path) -> None:
        plane = ControlPlane(tmp_path, 4, 4, 4)
        busy = running(plane, "busy", by="bob", num_nodes=2)
        job = elastic(plane)
        plane.steps(2)
        assert plane.state(job) == "queued"
        assert plane.store.job(job).reason == (
            "needs 4 nodes with 4 CPU slots, at least 2; free now: 4, 0, 0 CPU slots"
        )
        ended(plane, busy)
        plane.steps(3)
        assert (plane.state(job), len(plane.store.job(job).nodes)) == ("starting", 3)

    def test_what_would_fit_on_no_number_of_them_fails_at_once(self, tmp_path: Path) -> None:
        plane = ControlPlane(tmp_path, 4)
        job = elastic(plane)
        plane.steps(2)
        assert plane.state(job) == "failed"
        assert plane.store.job(job).reason.endswith("at least 2; the cluster has 1 such of 1")

    def test_it_holds_up_those_behind_it_until_it_has_as_many_as_it_needs(
        self, tmp_path: Path
    ) -> None:
        plane = ControlPlane(tmp_path, 4, 4, 4, fixed=False)
        busy = [
            running(plane, f"busy{i}", by="bob", resources={"preemptible": False}) for i in "ab"
        ]
        plane.groups.dead.add("node2")
        job = elastic(plane, priority=50)
        later = [plane.submit(f"later{i}", by="bob") for i in range(3)]
        plane.steps(3)
        for one in busy:
            ended(plane, one)
            plane.steps(4)
        assert (plane.state(job), len(plane.store.job(job).nodes)) == ("starting", 2)
        assert {plane.state(one) for one in later} == {"queued"}

    def test_room_is_made_for_the_least_that_it_needs(self, tmp_path: Path) -> None:
        plane = ControlPlane(tmp_path, 4, 4, 4, 4)
        low = [
            running(plane, f"low{i}", by="bob", resources={"preemptible": i < 3}) for i in range(4)
        ]
        job = elastic(plane, priority=50)
        plane.steps(2)
        asked = set(plane.store.controls.open())
        assert asked == {low[1], low[2]}, "the youngest, and no more"
        for one in asked:
            tell(plane, one, transition=(JobState.QUEUED, Cause.PREEMPTED))
            plane.supervisors.done.add(one)
        plane.steps(4)
        assert (plane.state(job), len(plane.store.job(job).nodes)) == ("starting", 2)
        assert {plane.state(low[i]) for i in (0, 3)} == {"running"}


@pytest.mark.parametrize("lasts", [None, 7 * 86400.0])
def test_what_cannot_fit_before_a_quarantine_ends_holds_up_nobody(
    tmp_path: Path, lasts: float | None
) -> None:
    plane = ControlPlane(tmp_path, 4, 4, 4, 4)
    plane.controller.roll.quarantine("10.0.0.4", "Its RAM is replaced", "ops", lasts, plane.now)
    big = plane.submit("big", by="alice", num_nodes=4, resources={"priority": 5})
    small = [plane.submit(f"small{i}", by="bob") for i in range(2)]
    plane.steps(4)
    assert [plane.state(one) for one in small] == ["starting", "starting"]
    (told,) = plane.told(big, "waiting")
    assert told == (
        "needs 4 nodes with 4 CPU slots; 3 of 4 such can be used; "
        "left out: 10.0.0.4 (node3) (Its RAM is replaced)"
    )
    assert plane.store.controls.open() == {}, "nobody makes room in vain"


def test_nor_does_it_take_its_users_turn(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, 4, 4)
    plane.controller.roll.quarantine("10.0.0.2", "Its RAM is replaced", "ops", None, plane.now)
    big = plane.submit("big", by="alice", num_nodes=2)
    next_one = plane.submit("next-one", by="alice")
    of_bob = plane.submit("of-bob", by="bob")
    plane.steps(2)
    states = [plane.state(job) for job in (big, next_one, of_bob)]
    assert states == ["queued", "starting", "queued"], "both hold nothing, and hers is older"


def test_nor_does_what_is_left_out_for_one_job_alone_hold_up_another(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, 4, 4)
    mine, other = (plane.submit(name, num_nodes=2) for name in ("mine", "other"))
    entry = Quarantine("node0", "10.0.0.1", "unfit", "It is full.", "", mine, plane.now, None)
    sight = Sight(plane.groups.capacities(), [entry], plane.now)
    assert not sight.fit(plane.store.job(mine)).once_free
    assert sight.fit(plane.store.job(other)).once_free


def test_it_holds_them_up_again_when_the_quarantine_has_ended(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, 4, 4, 4, 4)
    big = plane.submit("big", by="alice", num_nodes=4)
    plane.controller.roll.quarantine("10.0.0.4", "Its RAM is replaced", "ops", None, plane.now)
    small = [plane.submit(f"small{i}", by="bob") for i in range(2)]
    plane.steps(4)
    plane.controller.roll.release("10.0.0.4", "ops", plane.now)
    later = plane.submit("later", by="carol", resources={"priority": -1})
    plane.steps(3)
    assert plane.state(later) == "queued"
    for one in small:
        ended(plane, one)
    plane.steps(4)
    assert (plane.state(big), plane.state(later)) == ("starting", "queued")
