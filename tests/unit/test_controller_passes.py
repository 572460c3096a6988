"""The controller pass by pass, with stand-ins for nodes and supervisors."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from monitoring.job_view import JobView
from monitoring.summary import summarize
from orchestrator.controller.supervisors import LastWords
from orchestrator.controller.tending import CANCEL_GRACE_S, FINISH_GRACE_S, NoNodesError
from orchestrator.events import EventDraft
from orchestrator.lifecycle import Cause, JobState, TransitionRefused
from orchestrator.placement.placement import Need, NodeCapacity, fit
from orchestrator.protocol import SupervisorBatch
from orchestrator.spec.errors import SpecError
from orchestrator.supervision.notices import stopping
from orchestrator.supervision.stop_time import StopTime
from tests.unit.control_plane import ControlPlane


def report(plane: ControlPlane, job: str, state: JobState, cause: Cause, sequence: int = 1) -> None:
    attempt = plane.store.job(job).attempt
    batch = SupervisorBatch(sequence, transition=(state, cause))
    assert plane.controller.report(job, attempt, batch).accepted


def running(plane: ControlPlane, name: str = "toy", **changes: object) -> str:
    job = plane.submit(name, **changes)
    plane.steps(2)
    report(plane, job, JobState.RUNNING, Cause.FIRST_STEP)
    return job


def test_a_job_takes_one_transition_a_pass_until_it_has_a_supervisor(plane: ControlPlane) -> None:
    job = plane.submit()
    assert plane.state(job) == "queued"
    plane.steps()
    assert (plane.state(job), plane.supervisors.started) == ("starting", [])
    plane.steps()
    (resume,) = plane.supervisors.started
    assert (resume.job, resume.attempt, resume.step) == (job, 1, -1)
    assert [n.slots for n in resume.nodes] == [4]
    plane.steps(5)
    assert len(plane.supervisors.started) == 1


def test_of_two_jobs_on_slots_for_one_the_second_waits_and_says_why(plane: ControlPlane) -> None:
    first, second = plane.submit("one"), plane.submit("two")
    plane.steps(3)
    assert (plane.state(first), plane.state(second)) == ("starting", "queued")
    waiting = plane.store.job(second)
    assert waiting.reason == "needs 1 node with 4 CPU slots; free now: 0 CPU slots"
    plane.steps(5)
    assert len(plane.told(second, "waiting")) == 1
    report(plane, first, JobState.SUCCEEDED, Cause.STEPS_DONE)
    plane.supervisors.done.add(first)
    plane.steps(3)
    assert (plane.state(first), plane.state(second)) == ("succeeded", "starting")


def test_the_queue_goes_by_priority_then_age(plane: ControlPlane) -> None:
    busy = running(plane)
    old = plane.submit("old")
    plane.submit("young")
    urgent = plane.submit("urgent", resources={"priority": 5})
    plane.steps()
    assert plane.controller.waits.reason_of(plane.store.job(old)) == f"waits behind {urgent}"
    assert plane.told(old, "waiting") == [f"waits behind {urgent}"]
    order = []
    for job in (busy, urgent, old):
        order.append(job)
        sequence = 2 if job == busy else 1
        report(plane, job, JobState.SUCCEEDED, Cause.STEPS_DONE, sequence)
        plane.supervisors.done.add(job)
        plane.steps(4)
    assert [r.job for r in plane.supervisors.started] == [
        busy,
        urgent,
        old,
        plane.store.jobs()[2].id,
    ]


def test_what_can_never_fit_fails_at_once_on_a_fixed_cluster(plane: ControlPlane) -> None:
    busy = running(plane)
    wide = plane.submit("wide", slots_per_node=8)
    many = plane.submit("many", num_nodes=2)
    gpus = {"slots_per_node": None, "gpus_per_node": 1, "parallelism": {}}
    gpu = plane.submit("gpu", **gpus)
    plane.steps(3)
    assert plane.state(busy) == "running"
    for job, says in ((wide, "largest of 1 has 4"), (many, "has 1 such of 1"), (gpu, "has 0")):
        row = plane.store.job(job)
        assert row.state is JobState.FAILED
        assert row.reason.startswith("can never fit: needs ") and says in row.reason


def test_what_needs_more_nodes_waits_where_they_may_come_and_lets_others_pass(
    tmp_path: Path,
) -> None:
    plane = ControlPlane(tmp_path, 4, fixed=False)
    wide, small = plane.submit("wide", slots_per_node=8), plane.submit("small")
    plane.steps(3)
    assert (plane.state(wide), plane.state(small)) == ("queued", "starting")
    plane.groups.total["node1"] = 8
    plane.steps(2)
    assert plane.state(wide) == "starting"


def test_a_dead_supervisor_is_replaced_with_the_next_attempt(plane: ControlPlane) -> None:
    job = running(plane)
    plane.supervisors.done.add(job)
    plane.steps()
    assert plane.state(job) == "recovering"
    plane.steps()
    assert [r.attempt for r in plane.supervisors.started] == [1, 2]
    late = SupervisorBatch(2, transition=(JobState.SUCCEEDED, Cause.STEPS_DONE))
    assert not plane.controller.report(job, 1, late).accepted
    report(plane, job, JobState.RUNNING, Cause.FIRST_STEP)


def test_a_lost_supervisor_is_an_incident_with_an_action_that_every_reader_sees(
    plane: ControlPlane,
) -> None:
    job = running(plane)
    plane.supervisors.done.add(job)
    plane.steps()
    (incident,) = plane.store.past.incidents(job)
    (action,) = plane.store.past.actions(job)
    assert (incident.kind, incident.detector, incident.attempt) == (
        "supervisor_lost",
        "controller",
        1,
    )
    assert (action.kind, action.in_place, action.incidents) == ("restart", False, (incident,))
    assert plane.told(job, "incident") == [
        "The supervisor of attempt 1 was lost, and its ranks with it."
    ]
    assert plane.told(job, "restart") == [action.reason]
    plane.steps()
    (resume,) = plane.supervisors.started[1:]
    assert resume.actions == (action,)
    rows = {"incidents": [incident.to_json()], "actions": [action.to_json()]}
    summary = summarize(JobView(job, "running", {}, **rows))
    assert [i["kind"] for i in summary["incidents"]] == ["supervisor_lost"]
    assert ([a["kind"] for a in summary["actions"]], summary["restarts"]) == (["restart"], 1)


def test_a_supervisor_that_raises_twice_without_a_step_fails_the_job_with_what_it_raised(
    plane: ControlPlane,
) -> None:
    job = running(plane)
    plane.supervisors.words = LastWords("ValueError: no such thing.", raised=True)
    for _ in range(2):
        plane.supervisors.done.add(job)
        plane.steps(2)
    assert [a.kind for a in plane.store.past.actions(job)] == ["restart", "fail"]
    row = plane.store.job(job)
    assert row.state is JobState.FAILED
    assert row.reason.endswith("was lost, and its ranks with it: ValueError: no such thing.")


def test_a_reason_is_told_once_and_kept_with_the_job(plane: ControlPlane) -> None:
    job = running(plane)
    plane.supervisors.done.add(job)
    plane.steps(2)
    (action,) = plane.store.past.actions(job)
    told = [e["message"] for e in plane.store.past.events(job)]
    assert sum("The supervisor of attempt 1" in message for message in told) == 2
    assert told[-1] == "attempt 2: Restart from the newest state that all ranks have"
    assert plane.told(job, "state")[-1] == "recovering: supervisor lost"
    assert plane.store.job(job).reason == action.reason


def test_a_supervisor_lost_after_it_decided_on_a_restart_is_not_counted_twice(
    plane: ControlPlane,
) -> None:
    job = running(plane)
    plane.supervisors.done.add(job)
    plane.steps()
    decided = plane.store.past.actions(job)[0]
    plane.steps()
    own = replace(decided, attempt=2)
    moved = (JobState.RECOVERING, Cause.RANK_LOST)
    assert plane.controller.report(
        job, 2, SupervisorBatch(1, actions=(own,), transition=moved)
    ).accepted
    plane.supervisors.done.add(job)
    plane.steps(2)
    assert plane.store.past.actions(job) == [decided, own]
    assert [r.attempt for r in plane.supervisors.started] == [1, 2, 3]


def test_supervisors_that_keep_dying_end_the_job_within_its_budget(plane: ControlPlane) -> None:
    job = plane.submit(recovery={"max_restarts": 2})
    for _ in range(12):
        plane.steps()
        if job in plane.supervisors.alive:
            plane.supervisors.done.add(job)
    row = plane.store.job(job)
    assert row.state is JobState.PAUSED
    assert "The supervisor of attempt 3 was lost" in row.reason
    why = [p.why for p in plane.store.past.actions(job)[-1].passed_over if p.rung == "restart"]
    assert why == ["2 of recovery.max_restarts = 2 are used"]
    assert [r.attempt for r in plane.supervisors.started] == [1, 2, 3]
    assert plane.groups.held == {}


def test_a_new_controller_adopts_what_runs(plane: ControlPlane) -> None:
    job = running(plane)
    waiting = plane.submit("next")
    plane.controller = plane.new_controller()
    plane.steps(5)
    assert plane.state(job) == "running"
    assert [r.attempt for r in plane.supervisors.started] == [1]
    assert plane.state(waiting) == "queued"


def test_a_controller_that_died_before_starting_the_supervisor_starts_the_next_attempt(
    plane: ControlPlane,
) -> None:
    job = plane.submit()
    plane.steps()
    plane.store.attempts.begin(job, "first start", plane.now)
    plane.controller = plane.new_controller()
    plane.steps()
    assert [r.attempt for r in plane.supervisors.started] == [2]


def test_a_cluster_that_was_lost_is_taken_anew(plane: ControlPlane) -> None:
    job = running(plane)
    plane.groups.held.clear()
    plane.supervisors.alive.clear()
    plane.steps(2)
    (seat,) = plane.supervisors.started[-1].nodes
    assert plane.groups.held == {job: {seat.bundle: seat}}
    assert plane.store.job(job).nodes == (seat,)


def test_no_attempt_is_given_to_a_supervisor_whose_nodes_are_gone(plane: ControlPlane) -> None:
    job = running(plane)
    plane.groups.held.clear()
    plane.groups.total = {"node0": 2}
    with pytest.raises(NoNodesError, match="needs 1 other node with 4 CPU slots in place of"):
        plane.controller.next_attempt(job, 1, "rank lost")
    assert plane.store.job(job).attempt == 1


def test_cancelling_asks_once_then_waits_for_the_supervisor(plane: ControlPlane) -> None:
    job = running(plane)
    plane.controller.cancel(job, "asked by me")
    plane.controller.cancel(job, "asked again")
    plane.steps(4)
    assert plane.supervisors.stopped == [(job, "asked by me")]
    assert plane.state(job) == "cancelling"
    report(plane, job, JobState.CANCELLED, Cause.ENDED, 2)
    plane.supervisors.done.add(job)
    plane.steps()
    assert plane.groups.held == {}
    with pytest.raises(TransitionRefused):
        plane.controller.cancel(job, "again")


def test_a_supervisor_that_does_not_end_is_ended(plane: ControlPlane) -> None:
    job = running(plane)
    plane.controller.cancel(job, "asked")
    plane.steps(2)
    plane.steps(2, seconds=CANCEL_GRACE_S)
    row = plane.store.job(job)
    assert row.state is JobState.CANCELLED
    assert "didn't end within" in row.reason
    assert plane.supervisors.alive == {}


def test_a_last_checkpoint_has_the_time_that_its_supervisor_told(plane: ControlPlane) -> None:
    job = running(plane)
    plane.controller.cancel(job, "asked")
    plane.steps(2)
    told = stopping(StopTime(75.0, 400.0, 10**10))
    batch = SupervisorBatch(2, events=(EventDraft(told.kind, 0.0, told.message, told.detail),))
    assert plane.controller.report(job, 1, batch).accepted
    plane.steps(1, seconds=400.0)
    assert plane.state(job) == "cancelling"
    plane.steps(1, seconds=CANCEL_GRACE_S)
    row = plane.store.job(job)
    assert row.state is JobState.CANCELLED and "didn't end within 460 s" in row.reason


def test_a_queued_job_is_cancelled_at_once(plane: ControlPlane) -> None:
    running(plane)
    job = plane.submit("next")
    assert plane.controller.cancel(job, "asked").state is JobState.CANCELLED


def test_nodes_go_back_when_the_supervisor_has_finished_its_report(plane: ControlPlane) -> None:
    job = running(plane)
    report(plane, job, JobState.SUCCEEDED, Cause.STEPS_DONE, 2)
    plane.steps(3)
    assert plane.groups.held
    plane.steps(2, seconds=FINISH_GRACE_S)
    assert plane.groups.held == {}
    assert plane.store.job(job).placement_group == ""


def test_a_paused_job_gives_its_nodes_back_and_resumes_with_the_next_attempt(
    plane: ControlPlane,
) -> None:
    job = running(plane)
    report(plane, job, JobState.PAUSED, Cause.BUDGET_SPENT, 2)
    plane.supervisors.done.add(job)
    plane.controller.resume(job, "looked at")
    plane.steps(3)
    assert [r.attempt for r in plane.supervisors.started] == [1, 2]
    assert len(plane.groups.held) == 1


def test_a_cancelled_job_goes_on_with_the_next_attempt_when_it_is_resumed(
    plane: ControlPlane,
) -> None:
    job = running(plane)
    plane.controller.cancel(job, "changed my mind")
    report(plane, job, JobState.CANCELLED, Cause.ENDED, 2)
    plane.supervisors.done.add(job)
    plane.steps(3)
    assert (plane.state(job), plane.groups.held) == ("cancelled", {})
    plane.controller.resume(job, "after all")
    plane.steps(3)
    assert plane.state(job) == "starting"
    assert [r.attempt for r in plane.supervisors.started] == [1, 2]


def test_what_can_never_fit_fails_at_once_also_behind_a_job_that_waits(
    plane: ControlPlane,
) -> None:
    running(plane)
    waiting = plane.submit("waiting", slots_per_node=4)
    too_big = plane.submit("toobig", slots_per_node=400)
    plane.steps(3)
    assert (plane.state(waiting), plane.state(too_big)) == ("queued", "failed")


def test_one_jobs_exception_is_told_once_and_does_not_stop_the_others(plane: ControlPlane) -> None:
    bad = plane.submit("bad", resources={"priority": 9}, slots_per_node=2)
    good = plane.submit("good", slots_per_node=2)
    plane.groups.broken.add(bad)
    plane.steps(4)
    assert plane.state(good) == "starting"
    assert plane.told(bad, "controller_error") == [
        "the controller can't go on with this job: the node is on fire"
    ]
    plane.groups.broken.clear()
    plane.steps(1)
    assert plane.state(bad) == "starting"


def test_an_unwritable_job_directory_is_an_error_of_the_spec_before_anything_is_stored(
    plane: ControlPlane, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SpecError) as refused:
        plane.submit(checkpoint={"storage_path": str(tmp_path / "file" / "jobs")})
    (problem,) = refused.value.problems
    assert problem.key == "checkpoint.storage_path"
    assert "can't be made" in problem.message
    assert plane.store.jobs() == []


def test_a_disk_that_is_full_leaves_no_directory_of_a_job_that_was_not_taken_in(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    spec = {"name": "a", "slots_per_node": 4}
    with monkeypatch.context() as patched, pytest.raises(SpecError, match="No space left"):
        patched.setattr(Path, "write_text", full)
        plane.controller.intake.submit(spec, "job.yaml")
    assert list(plane.jobs_dir.iterdir()) == [] and plane.store.jobs() == []


def test_an_id_that_is_drawn_twice_is_drawn_again_and_its_first_job_stays_as_it_is(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = plane.submit()
    folder = Path(plane.store.job(job).job_dir)
    (folder / "checkpoints").mkdir()
    taken = job.rpartition("-")[2]
    drawn = iter([taken, taken, "fff000"])
    with monkeypatch.context() as patched:
        patched.setattr("secrets.token_hex", lambda _: next(drawn))
        assert plane.submit().endswith("-fff000")
    assert (folder / "checkpoints").is_dir() and (folder / "spec.yaml").is_file()
    with monkeypatch.context() as patched, pytest.raises(SpecError, match="all names"):
        patched.setattr("secrets.token_hex", lambda _: taken)
        plane.submit()
    assert (folder / "checkpoints").is_dir()


def test_a_submitted_job_has_its_directory_with_the_completed_spec(plane: ControlPlane) -> None:
    job = plane.submit()
    folder = Path(plane.store.job(job).job_dir)
    assert folder == plane.jobs_dir / job
    assert "train_micro_batch_size_per_gpu: 4" in (folder / "spec.yaml").read_text()
    assert (folder / "logs").is_dir()


@pytest.mark.parametrize(
    ("need", "now", "ever", "says"),
    [
        (Need(1, 4, "CPU"), True, True, ""),
        (Need(2, 4, "CPU"), False, True, "free now: 6, 2 CPU slots"),
        (Need(3, 2, "CPU"), False, False, "has 2 such of 3"),
        (Need(1, 9, "CPU"), False, False, "the largest of 3 has 8"),
        (Need(1, 1, "GPU"), True, True, ""),
        (Need(1, 2, "GPU"), False, False, "needs 1 node with 2 GPUs; the largest of 3 has 1"),
    ],
)
def test_fit_says_what_is_missing_in_numbers(need: Need, now: bool, ever: bool, says: str) -> None:
    nodes = [
        NodeCapacity("a", {"CPU": 8.0}, {"CPU": 6.0}),
        NodeCapacity("b", {"CPU": 4.0}, {"CPU": 2.0}),
        NodeCapacity("c", {"CPU": 1.0, "GPU": 1.0}, {"CPU": 0.0, "GPU": 1.0}),
    ]
    answer = fit(need, nodes)
    assert (answer.now, answer.ever) == (now, ever)
    assert says in answer.reason and bool(says) == bool(answer.reason)


def test_a_cluster_without_nodes_fits_nothing() -> None:
    assert "largest of 0 has 0" in fit(Need(1, 1, "CPU"), []).reason


def test_a_supervisor_that_nobody_told_to_run_costs_no_restart(plane: ControlPlane) -> None:
    job = plane.submit()
    plane.steps(2)
    plane.supervisors.done.add(job)
    plane.supervisors.words = LastWords(begun=False)
    plane.controller = plane.new_controller()
    plane.steps(2)
    assert plane.store.past.actions(job) == []
    assert plane.state(job) == "starting"
    assert [resume.attempt for resume in plane.supervisors.started] == [1, 2]
