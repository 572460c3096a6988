"""resources.min_nodes: fewer nodes when there is no other, and all of them again when there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.controller.growth import GROW_AFTER_S
from orchestrator.lifecycle import Cause, JobState
from orchestrator.node_slot import NodeSlot
from orchestrator.placement.placement import Barred, Mended, Need, NodeCapacity, Short
from orchestrator.placement.regroup import mend_some
from orchestrator.spec.errors import SpecError
from orchestrator.spec.job import parse_spec
from tests.unit.control_plane import ControlPlane, tell, where
from tests.unit.test_node_desk import incident

BATCH = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}


def elastic(plane: ControlPlane, **changes: Any) -> str:
    values = {"num_nodes": 2, "resources": {"min_nodes": 1}, "training": BATCH}
    return plane.submit(**{**values, **changes})


def trains(plane: ControlPlane, job: str) -> None:
    """The first attempt has done its first step."""
    plane.steps(2)
    tell(plane, job, transition=(JobState.RUNNING, Cause.FIRST_STEP))


def on_one_of_two(
    folder: Path, *, fixed: bool = True, preemptible: bool = True, spares: int = 0
) -> tuple[ControlPlane, str]:
    """Alice's job trains on one node of the two that it wants; the other is back and free."""
    plane = ControlPlane(folder, 4, 4, fixed=fixed)
    resources = {"min_nodes": 1, "preemptible": preemptible, "spares": spares}
    job = elastic(plane, by="alice", resources=resources)
    trains(plane, job)
    plane.groups.dead.add("node0")
    plane.controller.next_attempt(job, 1, "a node died")
    tell(plane, job, transition=(JobState.RECOVERING, Cause.RANK_LOST))
    tell(plane, job, transition=(JobState.RUNNING, Cause.FIRST_STEP))
    plane.groups.dead.clear()
    return plane, job


def stopped(plane: ControlPlane, job: str) -> None:
    """Its supervisor did as the queue asked."""
    tell(plane, job, transition=(JobState.QUEUED, Cause.PREEMPTED))
    plane.supervisors.done.add(job)


class TestSpec:
    @pytest.mark.parametrize(
        ("values", "told"),
        [
            ("num_nodes: 2\nresources: {min_nodes: 3}", "is more than num_nodes 2"),
            (
                "num_nodes: 3\nresources: {min_nodes: 2}\ntraining: {train_batch_size: 9}",
                "from 2 to 2 no number of nodes makes replicas that can share train_batch_size 9",
            ),
            ("num_nodes: 2\nresources: {min_nodes: 0}", "greater than or equal to 1"),
        ],
    )
    def test_what_could_never_happen_is_refused(self, values: str, told: str) -> None:
        with pytest.raises(SpecError, match=told):
            parse_spec(f"name: a\nslots_per_node: 1\n{values}\n", "job.yaml", check_data=False)


class TestNodes:
    def test_a_lost_node_without_another_leaves_fewer_replicas(self, tmp_path: Path) -> None:
        plane = ControlPlane(tmp_path, 4, 4)
        job = elastic(plane)
        trains(plane, job)
        assert plane.supervisors.started[0].spec.parallelism.data == 4
        plane.groups.dead.add("node0")
        again = plane.controller.next_attempt(job, 1, "a node died")
        assert [node.node_id for node in again.nodes] == ["node1"]
        assert (again.spec.num_nodes, again.spec.parallelism.data) == (1, 2)
        assert again.spec.training.train_batch_size == 16
        assert again.spec.training.gradient_accumulation_steps == 4
        assert plane.store.job(job).spec.num_nodes == 2, "what it asks for stays"
        (told,) = plane.told(job, "nodes_resized")
        assert told == "It goes on on 1 of 2 nodes, after 2: no other nodes are free."

    def test_the_next_attempt_has_all_of_them_when_they_are_there(self, tmp_path: Path) -> None:
        plane = ControlPlane(tmp_path, 4, 4)
        job = elastic(plane)
        trains(plane, job)
        plane.groups.dead.add("node0")
        plane.controller.next_attempt(job, 1, "a node died")
        plane.groups.dead.clear()
        again = plane.controller.next_attempt(job, 2, "a rank died")
        assert sorted(node.node_id for node in again.nodes) == ["node0", "node1"]
        assert again.spec == plane.store.job(job).spec
        assert "on 2 of 2 nodes" in plane.told(job, "nodes_resized")[1]

    def test_nodes_that_return_are_taken_without_a_fault(self, tmp_path: Path) -> None:
        plane = ControlPlane(tmp_path, 4, 4)
        job = elastic(plane)
        trains(plane, job)
        plane.groups.dead.add("node0")
        plane.controller.next_attempt(job, 1, "a node died")
        plane.steps(5)
        assert plane.supervisors.asked == []
        plane.groups.dead.clear()
        plane.steps(5)
        assert plane.supervisors.asked == [], "not so soon after it began"
        plane.steps(5, seconds=GROW_AFTER_S / 2)
        asked = {
            (job, c.kind, c.key) for job, controls in plane.supervisors.asked for c in controls
        }
        assert asked == {(job, "preempt", "grow-2")}

    def test_it_is_not_asked_to_where_another_user_would_be_given_the_nodes_first(
        self, tmp_path: Path
    ) -> None:
        plane, job = on_one_of_two(tmp_path)
        other = plane.submit("other", by="bob", num_nodes=2, training=BATCH)
        plane.steps(10, seconds=GROW_AFTER_S)
        assert plane.supervisors.asked == []
        assert (plane.state(job), plane.state(other)) == ("running", "queued")

    def test_one_that_waits_and_can_never_fit_does_not_keep_it_small(self, tmp_path: Path) -> None:
        plane, _ = on_one_of_two(tmp_path, fixed=False)
        plane.submit("huge", by="bob", num_nodes=3)
        plane.steps(5, seconds=GROW_AFTER_S)
        assert {c.key for _, controls in plane.supervisors.asked for c in controls} == {"grow-2"}

    def test_it_has_its_nodes_and_more_whoever_came_while_it_stopped(self, tmp_path: Path) -> None:
        plane, job = on_one_of_two(tmp_path)
        plane.steps(5, seconds=GROW_AFTER_S)
        other = plane.submit("other", by="bob", num_nodes=2, training=BATCH)
        plane.steps(2)
        assert not plane.store.job(other).reason.endswith("to give nodes back"), "it won't"
        stopped(plane, job)
        plane.steps(3)
        again = plane.supervisors.started[-1]
        assert (again.job, again.attempt, len(again.nodes)) == (job, 3, 2)
        assert (plane.state(job), plane.state(other)) == ("starting", "queued")

    @pytest.mark.parametrize("restarts", [False, True])
    def test_it_keeps_what_it_had_where_the_free_node_has_gone(
        self, tmp_path: Path, restarts: bool
    ) -> None:
        plane, job = on_one_of_two(tmp_path)
        plane.steps(5, seconds=GROW_AFTER_S)
        plane.submit("small", by="bob", training=BATCH)
        plane.submit("large", by="carol", num_nodes=2, training=BATCH)
        plane.steps(2)
        stopped(plane, job)
        if restarts:
            plane.controller = plane.new_controller()
        plane.steps(3)
        again = plane.supervisors.started[-1]
        assert (again.job, [node.node_id for node in again.nodes]) == (job, ["node1"])

    def test_a_more_important_job_that_came_meanwhile_has_its_nodes(self, tmp_path: Path) -> None:
        plane, job = on_one_of_two(tmp_path)
        plane.steps(5, seconds=GROW_AFTER_S)
        high = plane.submit("high", by="bob", num_nodes=2, resources={"priority": 5})
        plane.steps(2)
        stopped(plane, job)
        plane.steps(4)
        assert (plane.state(job), plane.state(high)) == ("queued", "starting")

    def test_one_that_must_not_be_preempted_has_them_all_the_same(self, tmp_path: Path) -> None:
        plane, job = on_one_of_two(tmp_path, preemptible=False)
        plane.steps(5, seconds=GROW_AFTER_S)
        plane.submit("high", by="bob", num_nodes=2, resources={"priority": 5})
        plane.steps(2)
        stopped(plane, job)
        plane.steps(4)
        assert (plane.state(job), len(plane.store.job(job).nodes)) == ("starting", 2)

    def test_a_job_that_finds_fewer_nodes_at_first_begins_there(self, tmp_path: Path) -> None:
        plane = ControlPlane(tmp_path, 4)
        job = elastic(plane)
        plane.steps(2)
        (started,) = plane.supervisors.started
        assert started.spec.parallelism.data == 2
        assert plane.state(job) == "starting"

    def test_without_the_key_it_waits(self, tmp_path: Path) -> None:
        plane = ControlPlane(tmp_path, 4, 4)
        job = elastic(plane, resources={})
        trains(plane, job)
        plane.groups.dead.add("node0")
        with pytest.raises(RuntimeError, match="needs 1 other node"):
            plane.controller.next_attempt(job, 1, "a node died")
        assert plane.store.job(job).state is not JobState.FAILED


class TestBadNode:
    """A node that is quarantined, where no other is free to take its place."""

    @pytest.mark.parametrize(
        ("kind", "ranks", "evidence", "times"),
        [
            ("replica_disagreement", (4, 5, 6, 7), {"outvoted": 1.0}, 1),
            ("rank_died", (4,), {}, 3),
        ],
    )
    def test_fewer_nodes_come_before_going_on_on_it(
        self,
        tmp_path: Path,
        kind: str,
        ranks: tuple[int, ...],
        evidence: dict[str, float],
        times: int,
    ) -> None:
        plane = ControlPlane(tmp_path, 4, 4, 4)
        batch = {**BATCH, "train_batch_size": 24}
        job = elastic(plane, num_nodes=3, resources={"min_nodes": 2}, training=batch)
        trains(plane, job)
        for attempt in range(1, times + 1):
            assert where(plane, job) == ["node0", "node1", "node2"]
            seen = incident(plane, job, kind, *ranks, **evidence)
            recovering = (JobState.RECOVERING, Cause.RANK_LOST)
            tell(plane, job, incidents=(seen.to_json(),), transition=recovering)
            plane.controller.next_attempt(job, attempt, kind)
            tell(plane, job, transition=(JobState.RUNNING, Cause.FIRST_STEP))
        assert where(plane, job) == ["node0", "node2"]
        plane.steps(5, seconds=GROW_AFTER_S)
        assert plane.supervisors.asked == [], "it doesn't want it back while it is left out"

    GROUP = tuple(NodeSlot(f"node{i}", f"10.0.0.{i}", i, 4) for i in range(3))
    CORRUPTS = Barred("replicas differed")
    SLOW = Barred("is slow", slow=True)

    @pytest.mark.parametrize(
        ("out", "counts", "stands"),
        [
            ({"node1": CORRUPTS}, (3, 2), ["node0", "node2"]),
            ({"node1": SLOW}, (3, 2), ["node0", "node1", "node2"]),
            ({"node1": SLOW, "node2": CORRUPTS}, (3, 2), ["node0", "node1"]),
            # None does without: as few of them as can be.
            ({"node0": CORRUPTS, "node1": CORRUPTS}, (3, 2), ["node0", "node2"]),
            ({"node1": CORRUPTS}, (3,), ["node0", "node1", "node2"]),
        ],
    )
    def test_which_nodes_it_goes_on_on(
        self, out: dict[str, Barred], counts: tuple[int, ...], stands: list[str]
    ) -> None:
        nodes = [NodeCapacity(seat.node_id, {"CPU": 4.0}, {"CPU": 0.0}) for seat in self.GROUP]
        plan = mend_some(self.GROUP, Need(3, 4, "CPU"), counts, nodes, barred=out)
        assert isinstance(plan, Mended)
        assert [seat.node_id for seat in plan.nodes] == stands
        dropped = {seat.node_id for seat in plan.dropped}
        assert dropped == {seat.node_id for seat in self.GROUP} - set(stands)


@settings(deadline=None, max_examples=150)
@given(
    working=st.integers(1, 4),
    spares=st.integers(0, 2),
    lost=st.sets(st.integers(0, 5)),
    barred=st.sets(st.integers(0, 5)),
    free=st.integers(0, 3),
    counts=st.sets(st.integers(1, 4), min_size=1),
)
def test_a_group_gets_the_largest_number_of_nodes_that_can_be_had(
    working: int, spares: int, lost: set[int], barred: set[int], free: int, counts: set[int]
) -> None:
    group = [
        NodeSlot(f"node{i}", f"10.0.0.{i}", i, 4, i >= working) for i in range(working + spares)
    ]
    nodes = [
        NodeCapacity(f"node{i}", {"CPU": 4.0}, {"CPU": 0.0})
        for i in range(working + spares)
        if i not in lost
    ]
    nodes += [NodeCapacity(f"free{i}", {"CPU": 4.0}, {"CPU": 4.0}) for i in range(free)]
    out = {f"node{i}": Barred("is slow", may_stay=False) for i in barred}
    usable = [s for s in group if s.bundle not in lost and s.node_id not in out]
    wanted = sorted(counts, reverse=True)
    plan = mend_some(group, Need(wanted[0], 4, "CPU"), wanted, nodes, lost=lost, barred=out)
    had = [n for n in wanted if n <= len(usable) + free]
    if not had:
        assert isinstance(plan, Short)
        return
    assert isinstance(plan, Mended)
    ranks = [seat for seat in plan.nodes if not seat.spare]
    assert len(ranks) == had[0]
    assert len({seat.node_id for seat in plan.nodes}) == len(plan.nodes)
    assert not {seat.node_id for seat in plan.nodes} & set(out)
    assert not {seat.bundle for seat in plan.nodes} & (lost & {s.bundle for s in group})
    kept = {seat.bundle for seat in plan.nodes}
    assert {s.bundle for s in group} == kept & {s.bundle for s in group} | {
        s.bundle for s in plan.dropped
    }
    assert all(old in group for old, _ in plan.moved)
