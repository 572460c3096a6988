"""Which of the jobs on fewer nodes than they want starts anew on more, and how often in vain."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from orchestrator.controller.growth import GROW_AFTER_S, GROW_REST_S
from orchestrator.events import EventDraft
from orchestrator.lifecycle import Cause, JobState
from orchestrator.node_slot import NodeSlot
from orchestrator.recovery.controls import Control
from orchestrator.store.rows import JobRow
from tests.unit.control_plane import ControlPlane, tell, where
from tests.unit.test_min_nodes import elastic, on_one_of_two

FIRST_STEP = (JobState.RUNNING, Cause.FIRST_STEP)


class Course:
    """What supervisors do of their own: they stop where they are asked to, and train."""

    def __init__(self, plane: ControlPlane, jobs: list[str]) -> None:
        self.plane = plane
        self.jobs = jobs
        self.stops: list[tuple[float, str]] = []
        """When which job stopped."""
        self.fails: Callable[[str], bool] = lambda job: False
        """Whether what a job starts on fails its checks."""

    def run(self, seconds: float, every: float = 5.0) -> list[str]:
        """Who stopped meanwhile."""
        began = len(self.stops)
        until = self.plane.now + seconds
        while self.plane.now < until:
            self.plane.steps(1, every)
            for job in self.jobs:
                self._turn(job)
        return [job for _, job in self.stops[began:]]

    def _turn(self, job: str) -> None:
        plane, row = self.plane, self.plane.store.job(job)
        if row.state is JobState.RUNNING and plane.store.controls.open().get(job):
            tell(plane, job, transition=(JobState.QUEUED, Cause.PREEMPTED))
            plane.supervisors.done.add(job)
            self.stops.append((plane.now, job))
        elif row.state is JobState.STARTING and job in plane.supervisors.alive:
            if self.fails(job):
                failed = {"node0": {"reason": "0.1 GB free for /local", "for_this_job": True}}
                event = EventDraft("preflight_failed", plane.now, "It failed", {"failed": failed})
                recovering = (JobState.RECOVERING, Cause.RANK_LOST)
                tell(plane, job, events=(event,), transition=recovering)
                plane.controller.next_attempt(job, row.attempt, "preflight failed")
            tell(plane, job, transition=FIRST_STEP)


def half_of_each(folder: Path, jobs: int) -> tuple[Course, list[str]]:
    """Jobs of as many users, each on one of two nodes that it wants; and which ones are gone."""
    plane = ControlPlane(folder, *[4] * (2 * jobs))
    names = [elastic(plane, by=f"user{number}") for number in range(jobs)]
    plane.steps(2 * jobs)
    gone = sorted(where(plane, job)[1] for job in names)
    plane.groups.dead |= set(gone)
    for job in names:
        tell(plane, job, transition=FIRST_STEP)
        tell(plane, job, transition=(JobState.RECOVERING, Cause.RANK_LOST))
        plane.controller.next_attempt(job, 1, "a node died")
        tell(plane, job, transition=FIRST_STEP)
    course = Course(plane, names)
    assert course.run(2 * GROW_AFTER_S) == []
    return course, gone


def test_of_several_one_is_asked_for_each_node_that_comes_back(tmp_path: Path) -> None:
    course, gone = half_of_each(tmp_path, 3)
    stopped: list[str] = []
    for node in gone[:2]:
        course.plane.groups.dead.discard(node)
        stopped += course.run(3 * GROW_AFTER_S)
    assert len(stopped) == len(set(stopped)) == 2
    assert all(len(where(course.plane, job)) == 2 for job in stopped)


def test_two_that_come_back_at_once_are_for_two_of_them(tmp_path: Path) -> None:
    course, gone = half_of_each(tmp_path, 3)
    course.plane.groups.dead -= set(gone[1:])
    stopped = course.run(2 * GROW_AFTER_S)
    assert len(stopped) == len(set(stopped)) == 2
    assert all(len(where(course.plane, job)) == 2 for job in stopped)


def test_one_that_has_ended_and_writes_its_report_takes_none(tmp_path: Path) -> None:
    course, gone = half_of_each(tmp_path, 2)
    ended, other = course.jobs
    tell(course.plane, ended, transition=(JobState.SUCCEEDED, Cause.STEPS_DONE))
    course.plane.groups.dead.discard(gone[0])
    assert course.run(20.0) == [other]


def test_nobody_stops_for_a_node_that_ray_does_not_grant(tmp_path: Path) -> None:
    plane, job = on_one_of_two(tmp_path)
    plane.groups.unwilling.add("node0")
    course = Course(plane, [job])
    assert course.run(7200.0, every=60.0) == []
    assert plane.groups.held[job].keys() == {seat.bundle for seat in plane.store.job(job).nodes}
    plane.groups.unwilling.clear()
    assert course.run(GROW_REST_S + GROW_AFTER_S) == [job]
    assert len(where(plane, job)) == 2


@pytest.mark.parametrize("restarts", [False, True])
def test_where_it_got_nothing_it_is_tried_more_and_more_rarely(
    tmp_path: Path, restarts: bool
) -> None:
    plane, job = on_one_of_two(tmp_path)
    course = Course(plane, [job])
    course.fails = lambda job: len(where(plane, job)) == 2
    for _ in range(12):
        course.run(1800.0, every=60.0)
        if restarts:
            plane.controller = plane.new_controller()
    times = [time for time, _ in course.stops]
    rests = [after - before for before, after in pairwise(times)]
    assert 4 <= len(times) <= 6
    assert all(after >= 1.8 * before for before, after in pairwise(rests))
    # It gets something by it: the next time it is asked as soon as at first.
    course.fails = lambda job: False
    course.run(6 * 3600.0, every=60.0)
    assert len(where(plane, job)) == 2
    plane.groups.dead.add("node0")
    tell(plane, job, transition=(JobState.RECOVERING, Cause.RANK_LOST))
    plane.controller.next_attempt(job, plane.store.job(job).attempt, "a node died")
    tell(plane, job, transition=FIRST_STEP)
    plane.groups.dead.clear()
    assert course.run(2 * GROW_AFTER_S) == [job]


def test_more_nodes_than_it_tried_in_vain_are_tried_at_once(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, 4, 4, 4)
    plane.groups.dead |= {"node0", "node2"}
    batch = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 1}
    job = elastic(plane, num_nodes=3, training=batch)
    course = Course(plane, [job])
    course.fails = lambda job: "node0" in where(plane, job)
    course.run(10.0)
    plane.groups.dead.discard("node0")
    assert course.run(3 * GROW_AFTER_S) == [job]
    assert where(plane, job) == ["node1"], "in vain"
    # The node is left out no more, and would make it no larger than it was when it failed.
    assert course.run(2 * GROW_AFTER_S) == []
    plane.groups.dead.clear()
    course.fails = lambda job: False
    assert course.run(2 * GROW_AFTER_S) == [job]
    assert len(where(plane, job)) == 3


def test_it_grows_onto_a_spare_that_it_holds(tmp_path: Path) -> None:
    plane, job = on_one_of_two(tmp_path, spares=1)
    course = Course(plane, [job])
    plane.steps(2, seconds=5.0)
    assert len(plane.store.job(job).nodes) == 2
    assert course.run(2 * GROW_AFTER_S) == [job]
    assert len(where(plane, job)) == 2


def test_a_persons_key_that_begins_alike_is_no_growth(tmp_path: Path) -> None:
    plane, job = on_one_of_two(tmp_path)
    control = Control("grow-up", "exchange", "alice", plane.now, to="bf16")
    plane.store.controls.ask(job, control)
    assert Course(plane, [job]).run(0.0) == []
    plane.steps(3, seconds=GROW_AFTER_S)
    assert plane.told(job, "controller_error") == []
    assert {c.key for _, asked in plane.supervisors.asked for c in asked} == {"grow-up", "grow-2"}


@pytest.mark.parametrize("when", ["before Ray is tried", "after"])
def test_one_that_starts_anew_as_it_is_about_to_be_asked_keeps_what_it_starts_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    plane, job = on_one_of_two(tmp_path)
    plane.now += 2 * GROW_AFTER_S
    try_out = plane.controller.desk.try_out

    def meanwhile(row: JobRow, seats: Sequence[NodeSlot], now: float) -> Sequence[NodeSlot] | None:
        monkeypatch.undo()
        tried = try_out(row, seats, now) if when == "after" else []
        plane.controller.next_attempt(job, row.attempt, "a rank died")
        return tried if when == "after" else try_out(row, seats, now)

    monkeypatch.setattr(plane.controller.desk, "try_out", meanwhile)
    plane.steps(1)
    row = plane.store.job(job)
    assert (row.attempt, len(row.nodes)) == (3, 2)
    assert plane.groups.held[job].keys() == {seat.bundle for seat in row.nodes}
    assert plane.told(job, "controller_error") == []
    assert plane.store.controls.open() == {}, "it stands on all that it wants"


def test_one_that_starts_anew_between_the_look_at_it_and_the_asking_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane, job = on_one_of_two(tmp_path)
    plane.now += 2 * GROW_AFTER_S
    ask = plane.store.controls.ask

    def meanwhile(name: str, control: Control, *more: int) -> object:
        monkeypatch.undo()
        plane.controller.next_attempt(job, plane.store.job(job).attempt, "a rank died")
        return ask(name, control, *more)

    monkeypatch.setattr(plane.store.controls, "ask", meanwhile)
    plane.steps(1)
    row = plane.store.job(job)
    assert (row.attempt, len(row.nodes)) == (3, 2)
    assert plane.store.controls.of(job) == [], "the new attempt would end for it"


def test_what_ends_an_attempt_for_more_nodes_names_it(tmp_path: Path) -> None:
    plane, job = on_one_of_two(tmp_path)
    plane.now += 2 * GROW_AFTER_S
    plane.steps(1)
    ((control,),) = plane.store.controls.open().values()
    assert control.attempt == plane.store.job(job).attempt
    assert plane.store.controls.of(job)[0].control == control


def test_one_that_lost_its_nodes_meanwhile_waits_for_others_and_not_in_the_queue(
    tmp_path: Path,
) -> None:
    plane, job = on_one_of_two(tmp_path)
    plane.now += 2 * GROW_AFTER_S
    plane.steps(1)
    assert job in plane.store.controls.open()
    plane.groups.dead |= {"node0", "node1"}
    plane.supervisors.done.add(job)
    plane.steps(4)
    assert plane.state(job) == "recovering"


def test_one_that_ends_as_it_is_about_to_be_asked_has_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane, job = on_one_of_two(tmp_path)
    plane.now += 2 * GROW_AFTER_S
    ask = plane.store.controls.ask

    def meanwhile(name: str, control: Control, attempt: int) -> object:
        tell(plane, job, transition=(JobState.SUCCEEDED, Cause.STEPS_DONE))
        return ask(name, control, attempt)

    monkeypatch.setattr(plane.store.controls, "ask", meanwhile)
    plane.steps(1)
    assert (plane.state(job), plane.told(job, "controller_error")) == ("succeeded", [])
