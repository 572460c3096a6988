"""A supervisor that can't be started: how often it is tried, and what the job comes to."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import ray

from orchestrator.controller.supervisor_start import NOT_STARTED, TRIES
from orchestrator.controller.supervisors import LastWords, lies_outside
from orchestrator.events import EventDraft
from orchestrator.protocol import ResumeState
from orchestrator.recovery.controls import Control
from tests.unit.control_plane import ControlPlane, running, tell

TAKEN = "The name octavo-supervisor-toy (namespace=octavo) is already taken."


class Starts:
    """Fails as often as a test says."""

    def __init__(self, plane: ControlPlane, failures: int = 1000) -> None:
        self.plane = plane
        self.left = failures
        self.tried: list[tuple[float, int]] = []
        """When, and which attempt."""
        self._start = plane.supervisors.start
        plane.supervisors.start = self  # type: ignore[method-assign]

    def __call__(self, resume: ResumeState) -> None:
        self.tried.append((self.plane.now, resume.attempt))
        if self.left:
            self.left -= 1
            raise ValueError(TAKEN)
        self._start(resume)


@pytest.mark.parametrize("restarts", [False, True])
def test_it_is_tried_more_and_more_rarely_and_then_the_job_is_paused(
    plane: ControlPlane, restarts: bool
) -> None:
    starts = Starts(plane)
    job = plane.submit()
    for _ in range(600):
        plane.steps(1)
        if restarts and plane.now % 100 < 0.5:
            plane.controller = plane.new_controller()
    times = [time for time, _ in starts.tried]
    assert len(times) == TRIES
    if not restarts:
        assert times[-1] - times[-2] >= 60.0 > 10.0 > times[3] - times[2]
    assert {attempt for _, attempt in starts.tried} == {1} and plane.store.job(job).attempt == 1
    row = plane.store.job(job)
    assert (row.state.word, row.nodes) == ("paused", ())
    last = f"Its supervisor could not be started ({TRIES} of {TRIES} tries): ValueError: {TAKEN}"
    assert row.reason == last == plane.told(job, NOT_STARTED)[-1]
    assert len(plane.told(job, NOT_STARTED)) == TRIES and plane.told(job, "controller_error") == []


def test_after_a_few_failures_it_goes_on_with_the_same_attempt(plane: ControlPlane) -> None:
    Starts(plane, failures=3)
    job = plane.submit()
    plane.steps(30)
    assert [resume.attempt for resume in plane.supervisors.started] == [1]
    assert len(plane.told(job, "attempt")) == 1 and plane.state(job) == "starting"


def test_a_resumed_job_is_tried_as_often_again(plane: ControlPlane) -> None:
    starts = Starts(plane)
    job = plane.submit()
    plane.steps(600)
    assert plane.state(job) == "paused"
    starts.left = 2
    plane.controller.resume(job, "resumed by alice")
    plane.steps(20)
    assert plane.state(job) == "starting"
    assert [resume.attempt for resume in plane.supervisors.started] == [2]


def test_where_its_nodes_have_changed_it_is_another_attempt(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, 4, 4)
    Starts(plane, failures=1)
    job = plane.submit()
    plane.steps(2)
    plane.groups.dead.add(plane.store.job(job).nodes[0].node_id)
    plane.steps(10)
    assert [(r.attempt, r.nodes) for r in plane.supervisors.started] == [
        (2, plane.store.job(job).nodes)
    ]


@pytest.mark.parametrize("tells", [False, True])
def test_one_that_started_at_the_second_try_and_is_lost_is_followed_by_the_next_attempt(
    plane: ControlPlane, tells: bool
) -> None:
    job = running(plane)
    Starts(plane, failures=1)
    plane.supervisors.done.add(job)
    plane.steps(20)
    assert [resume.attempt for resume in plane.supervisors.started] == [1, 2]
    if tells:
        tell(plane, job, events=(EventDraft("preflight", plane.now, "Preflight passed.", {}),))
    plane.supervisors.done.add(job)
    plane.steps(20)
    assert [resume.attempt for resume in plane.supervisors.started] == [1, 2, 3]
    assert plane.told(job, "controller_error") == []


def test_a_try_that_the_controller_died_in_may_have_begun_a_supervisor(plane: ControlPlane) -> None:
    starts = Starts(plane, failures=1)
    job = plane.submit()
    plane.steps(1)
    begun = plane.supervisors.start

    def dies(resume: ResumeState) -> None:
        begun(resume)
        raise SystemExit

    plane.supervisors.start = dies  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        plane.steps(20)
    plane.supervisors.start = starts  # type: ignore[method-assign]
    plane.controller = plane.new_controller()
    plane.supervisors.done.add(job)
    plane.steps(20)
    assert [resume.attempt for resume in plane.supervisors.started] == [1, 2]


def test_supervisors_that_die_before_they_tell_anything_end_in_a_pause(plane: ControlPlane) -> None:
    job = running(plane)
    Starts(plane, failures=1)
    plane.supervisors.done.add(job)
    for _ in range(600):
        plane.steps(1)
        if job in plane.supervisors.alive:
            plane.supervisors.done.add(job)
    assert plane.state(job) == "paused"
    assert len(plane.supervisors.started) < 10


def test_what_may_pass_is_waited_for_longer_each_time_and_ends_in_a_pause(
    plane: ControlPlane,
) -> None:
    job = running(plane)
    told = "OSError: [Errno 24] Too many open files"
    plane.supervisors.words = LastWords(told, raised=True, outside=True)
    began, started = plane.now, []
    plane.supervisors.done.add(job)
    for _ in range(2000):
        plane.steps(1)
        if job in plane.supervisors.alive:
            started.append(plane.now - began)
            plane.supervisors.done.add(job)
    assert plane.state(job) == "paused" and told in plane.store.job(job).reason
    gaps = [later - earlier for earlier, later in pairwise([0.0, *started])]
    assert len(gaps) == 2 and gaps[0] >= 30 and gaps[1] >= 120


def test_a_resume_ends_the_rest_before_it(plane: ControlPlane) -> None:
    job = running(plane)
    plane.supervisors.words = LastWords("OSError: no", raised=True, outside=True)
    plane.supervisors.done.add(job)
    plane.steps(2)
    assert plane.state(job) == "recovering" and len(plane.supervisors.started) == 1
    plane.store.controls.ask(job, Control("p", "pause", "alice", plane.now))
    plane.steps(4)
    assert plane.state(job) == "paused"
    plane.controller.resume(job, "resumed by alice")
    plane.steps(4)
    assert len(plane.supervisors.started) == 2


@pytest.mark.parametrize(
    ("error", "outside"),
    [
        (OSError(24, "Too many open files"), True),
        (MemoryError(), True),
        (RuntimeError("can't start new thread"), True),
        (ray.exceptions.RaySystemError(RuntimeError("GCS")), True),
        (ValueError("no such layer"), False),
        (KeyError("rank"), False),
    ],
)
def test_an_error_of_the_job_itself_does_not_pass(error: Exception, outside: bool) -> None:
    assert lies_outside(error) is outside


def test_nodes_that_change_with_each_try_begin_no_new_row_of_tries(tmp_path: Path) -> None:
    plane = ControlPlane(tmp_path, 4, 4)
    starts = Starts(plane)
    job = plane.submit()
    for _ in range(600):
        tried = len(starts.tried)
        plane.steps(1)
        if len(starts.tried) > tried and plane.store.job(job).nodes:
            plane.groups.dead.clear()
            plane.groups.dead.add(plane.store.job(job).nodes[0].node_id)
    assert plane.state(job) == "paused"
    assert len(starts.tried) == TRIES and len({attempt for _, attempt in starts.tried}) > 1


def test_what_a_person_asks_for_meanwhile_is_done_at_once(plane: ControlPlane) -> None:
    Starts(plane)
    job = plane.submit()
    plane.steps(100)
    plane.store.controls.ask(job, Control("p", "pause", "alice", plane.now))
    plane.steps(2)
    assert plane.state(job) == "paused"
    assert plane.store.job(job).reason.startswith("paused by alice")
