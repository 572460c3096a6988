"""Links that fail with the same node again: it is at fault, and not who joined it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from launch.preflight import Failure, Limits, Link, Verdict, blame, far_ends
from orchestrator.events import EventDraft
from orchestrator.lifecycle import Cause, JobState
from orchestrator.placement.checks import Checked, laid
from orchestrator.supervision.preflight_gate import told
from tests.unit.control_plane import ControlPlane, running, tell, where
from tests.unit.test_preflight_blame import left_out

LIMITS = Limits(5.0, None)


def links(new: Collection[int], old: Collection[int], parted: Collection[int]) -> list[Link]:
    """Each newcomer meets all others, and has no link with those that are parted."""
    found = []
    for one in new:
        for other in [*old, *(n for n in new if n > one)]:
            error = "timed out" if other in parted or one in parted else ""
            found += [Link(one, other, 900.0, error), Link(other, one, 900.0, error)]
    return found


class TestFarEnds:
    def test_who_is_named_for_a_few_links_says_with_whom(self) -> None:
        few = links([0], range(1, 9), {3})
        assert far_ends(few, blame(few, [0], LIMITS), LIMITS) == {0: (3,)}
        two = links([0], [1], {1})
        assert far_ends(two, blame(two, [0], LIMITS), LIMITS) == {0: (1,)}

    def test_who_is_named_for_most_links_is_at_fault_itself(self) -> None:
        most = links([0], range(1, 9), {1, 2, 3, 4, 5})
        assert far_ends(most, blame(most, [0], LIMITS), LIMITS) == {}

    def test_an_end_that_is_named_itself_explains_nothing(self) -> None:
        told = links([0, 1], range(2, 9), {0})
        assert list(blame(told, [0, 1], LIMITS)) == [0]
        assert far_ends(told, {0, 1}, LIMITS) == {}

    def test_a_link_that_is_too_slow_has_an_end_as_well(self) -> None:
        slow = [Link(0, n, 40.0 if n == 2 else 900.0) for n in (1, 2, 3)]
        limits = Limits(5.0, 100.0)
        assert far_ends(slow, blame(slow, [0], limits), limits) == {0: (2,)}


def joined(attempt: int, node: str, *ends: str) -> Checked:
    why = Failure("1 of its 8 links failed: timed out", False, "links")
    return Checked(attempt, float(attempt), ("old", node), {node: why}, {node: ends})


class TestLaid:
    def test_the_second_that_fails_with_the_same_node_accuses_it_and_clears_the_first(self) -> None:
        first = laid([joined(1, "n1", "old")])
        assert (list(first.failed), first.cleared) == (["n1"], frozenset())
        second = laid([joined(1, "n1", "old"), joined(2, "n2", "old")])
        told = "2 of its 2 links failed: with one node after the other: timed out"
        assert second.failed == {"old": Failure(told, False, "links")}
        assert second.cleared == {(1, "n1"), (2, "n2")}

    def test_the_same_newcomer_twice_is_at_fault_itself(self) -> None:
        again = laid([joined(1, "n1", "old"), joined(2, "n1", "old")])
        assert (list(again.failed), again.cleared) == (["n1"], frozenset())

    def test_an_end_that_is_named_itself_later_clears_who_was_named_before(self) -> None:
        itself = Failure("3 of its 3 links failed: timed out", False, "links")
        now = Checked(2, 2.0, ("old", "n2"), {"old": itself})
        found = laid([joined(1, "n1", "old"), now])
        assert (found.failed, found.cleared) == ({"old": itself}, {(1, "n1")})
        full = Checked(2, 2.0, ("old", "n2"), {"old": Failure("0 GB free for /jobs", True, "disk")})
        assert laid([joined(1, "n1", "old"), full]).cleared == frozenset()

    def test_newcomers_that_fail_with_others_stay_accused(self) -> None:
        apart = laid([joined(1, "n1", "old"), joined(2, "n2", "other")])
        assert list(apart.failed) == ["n2"]
        both = laid([joined(1, "n1", "old"), joined(2, "n2", "old", "other")])
        assert list(both.failed) == ["n2", "old"] and both.cleared == {(1, "n1")}


def meets(plane: ControlPlane, job: str, new: Sequence[str], parted: Collection[str]) -> bool:
    """The attempt's preflight, whether it passes; where not, the next one begins."""
    seats = sorted(plane.store.job(job).nodes, key=lambda seat: seat.node_id not in new)
    nodes = [seat.node_id for seat in seats]
    newcomers = [i for i, node in enumerate(nodes) if node in new]
    old = [i for i in range(len(nodes)) if i not in newcomers]
    found = links(newcomers, old, [i for i, node in enumerate(nodes) if node in parted])
    named = blame(found, newcomers, LIMITS)
    verdict = Verdict(
        failed={nodes[i]: failure for i, failure in named.items()},
        seconds=0.2,
        nodes=len(nodes),
        far_ends={
            nodes[i]: tuple(nodes[end] for end in ends)
            for i, ends in far_ends(found, named, LIMITS).items()
        },
    )
    notice = told(verdict, {seat.node_id: seat.node_ip for seat in seats})
    event = EventDraft(notice.kind, plane.now, notice.message, notice.detail)
    if not named:
        tell(plane, job, events=(event,), transition=(JobState.RUNNING, Cause.FIRST_STEP))
        return True
    tell(plane, job, events=(event,), transition=(JobState.RECOVERING, Cause.RANK_LOST))
    plane.now += 1
    plane.controller.next_attempt(job, plane.store.job(job).attempt, "preflight failed")
    return False


def a_node_dies(plane: ControlPlane, job: str) -> None:
    plane.groups.dead.add("node0")
    tell(plane, job, transition=(JobState.RECOVERING, Cause.RANK_LOST))
    plane.controller.next_attempt(job, plane.store.job(job).attempt, "a node died")


def test_an_old_node_that_takes_no_new_link_costs_the_cluster_itself_and_no_newcomer(
    tmp_path: Path,
) -> None:
    for new_supervisor in (False, True):
        folder = tmp_path / str(new_supervisor)
        folder.mkdir()
        plane = ControlPlane(folder, *[4] * 9)
        job = running(plane, num_nodes=4, training={"train_batch_size": 32})
        a_node_dies(plane, job)
        assert where(plane, job) == ["node4", "node1", "node2", "node3"]
        assert not meets(plane, job, ["node4"], {"node2"})
        assert left_out(plane) == {"node4": "preflight"}
        # What one preflight can't see is found again by a controller and a supervisor that are new.
        plane.controller = plane.new_controller()
        new = where(plane, job) if new_supervisor else ["node5"]
        assert not meets(plane, job, new, {"node2"})
        assert left_out(plane) == {"node2": "preflight"}
        (back,) = plane.told(job, "node_released")
        assert back.startswith("Node 10.0.0.5 (node4) is released by the controller, for the node")
        assert where(plane, job) == ["node5", "node1", "node6", "node3"]
        assert meets(plane, job, ["node5", "node6"], {"node2"})
        assert plane.told(job, "nodes_alike") == []


def test_of_two_nodes_the_one_that_is_part_of_each_failing_link_is_left_out(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, *[4] * 9)
    job = plane.submit(num_nodes=2)
    plane.steps(2)
    assert not meets(plane, job, ["node0", "node1"], {"node0"})
    assert left_out(plane) == {"node1": "preflight"}
    assert not meets(plane, job, ["node0", "node2"], {"node0"})
    assert left_out(plane) == {"node0": "preflight"}
    assert meets(plane, job, where(plane, job), {"node0"})


def test_a_network_that_is_down_costs_the_cluster_no_node(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, *[4] * 9)
    job = plane.submit(num_nodes=2)
    plane.steps(2)
    every = {f"node{i}" for i in range(9)}
    for _ in range(3):
        assert not meets(plane, job, where(plane, job), every)
    assert set(left_out(plane).values()) == {"unfit"}
    assert len(plane.told(job, "nodes_alike")) == 1
