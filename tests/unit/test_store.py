"""The store: fencing, transactions, and a resume state from records alone."""

from __future__ import annotations

import json
import pickle
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import OperationalError

from monitoring.records import Incident, StepRecord
from orchestrator.actions import Action, PassedOver
from orchestrator.events import EventDraft
from orchestrator.lifecycle import Cause, JobState, TransitionRefused
from orchestrator.node_slot import NodeSlot
from orchestrator.protocol import Acknowledgement, FencedError, SupervisorBatch
from orchestrator.recovery.resume import NEWEST_STEPS
from orchestrator.spec.errors import Source
from orchestrator.spec.job import JobSpec, spec_of
from orchestrator.store.database import Store
from orchestrator.store.errors import StoreUnavailableError
from orchestrator.store.rows import UnknownJobError
from orchestrator.supervision.journal import Journal
from orchestrator.supervision.outbox import ControllerUnreachableError, Outbox

JOB = "toy-00000a"
NODE = NodeSlot("ab" * 28, "127.0.0.1", 0, 4)


def toy_spec(**changes: Any) -> JobSpec:
    data = {"name": "toy", "slots_per_node": 4, "parallelism": {"pipeline": 2}, **changes}
    return spec_of(Source("toy.yaml", data, {}), check_data=False)


class Unreachable:
    """A controller that is away."""

    def report(self, job: str, attempt: int, batch: SupervisorBatch) -> Acknowledgement:
        raise ControllerUnreachableError("away")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path}/store.db")
    yield store
    store.close()


def started(store: Store, job: str = JOB, **changes: Any) -> str:
    store.add_job(job, toy_spec(**changes), f"/jobs/{job}", "toy.yaml", 1.0)
    store.grant(job, "cd" * 18, [NODE], 2.0)
    store.attempts.begin(job, "first", 3.0)
    return job


def step(number: int, **changes: Any) -> dict[str, Any]:
    record = StepRecord(
        attempt=1,
        timeline=0,
        step=number,
        time=10.0 + number,
        batch=number,
        loss=5.0 - number / 10,
        grad_norm=1.0,
        lr=1e-3,
        tokens=512,
        step_time_s=0.1,
    )
    return replace(record, **changes).to_json()


def event(message: str) -> EventDraft:
    return EventDraft("told", 5.0, message, {"n": 1})


def action(kind: Any, **changes: Any) -> Action:
    values: dict[str, Any] = {"attempt": 1, "timeline": 0, "step": 9, "time": 9.0, "reason": kind}
    return Action(kind=kind, **{**values, **changes})


def test_a_job_is_stored_as_submitted_and_survives_reopening(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/store.db"
    first = Store(url)
    started(first)
    first.close()
    row = Store(url).job(JOB)
    assert row.spec == toy_spec()
    assert (row.state, row.attempt, row.nodes) == (JobState.STARTING, 1, (NODE,))
    assert (row.submitted_at, row.started_at, row.ended_at) == (1.0, 2.0, None)


def test_an_unknown_job_is_named(store: Store) -> None:
    with pytest.raises(UnknownJobError, match="'none-000000'"):
        store.job("none-000000")
    assert not store.attempts.record("none-000000", 1, SupervisorBatch(1), 1.0).accepted


def test_a_batch_of_an_older_attempt_is_refused_whole(store: Store) -> None:
    job = started(store)
    store.attempts.begin(job, "rank lost", 4.0)
    late = SupervisorBatch(
        1, events=(event("late"),), steps=(step(0),), actions=(action("skip_step"),)
    )
    answer = store.attempts.record(job, 1, late, 5.0)
    assert not answer.accepted
    assert "attempt 1 is over, 2 is current" in answer.reason
    assert store.past.steps(job) == [] and store.past.actions(job) == []
    assert "late" not in [e["message"] for e in store.past.events(job)]
    assert store.attempts.record(job, 2, replace(late, steps=(step(0, attempt=2),)), 5.0).accepted


def test_a_batch_sent_twice_is_stored_once_and_acknowledged_twice(store: Store) -> None:
    job = started(store)
    batch = SupervisorBatch(1, steps=(step(0), step(1)))
    assert store.attempts.record(job, 1, batch, 5.0).accepted
    assert store.attempts.record(job, 1, batch, 6.0).accepted
    assert [s["step"] for s in store.past.steps(job)] == [0, 1]


def test_a_batch_ahead_of_a_lost_one_is_refused_and_taken_later(store: Store) -> None:
    job = started(store)
    assert store.attempts.record(job, 1, SupervisorBatch(2), 5.0).reason == "batch 1 comes before 2"
    assert store.attempts.record(job, 1, SupervisorBatch(1), 5.0).accepted
    assert store.attempts.record(job, 1, SupervisorBatch(2), 5.0).accepted


def test_a_batch_with_a_transition_that_is_not_allowed_stores_nothing(store: Store) -> None:
    job = started(store)
    bad = SupervisorBatch(1, steps=(step(0),), transition=(JobState.PAUSED, Cause.RECOVERED))
    answer = store.attempts.record(job, 1, bad, 5.0)
    assert not answer.accepted and "recovered" in answer.reason
    wrong_target = replace(bad, transition=(JobState.FAILED, Cause.FIRST_STEP))
    assert not store.attempts.record(job, 1, wrong_target, 5.0).accepted
    assert store.past.steps(job) == []
    assert store.job(job).state is JobState.STARTING


def test_a_failure_in_the_middle_of_a_batch_leaves_nothing_behind(store: Store) -> None:
    job = started(store)
    unstorable = step(1) | {"loss": float("nan")}
    before = store.past.events(job)
    with pytest.raises(ValueError, match="not JSON compliant"):
        store.attempts.record(
            job, 1, SupervisorBatch(1, events=(event("a"),), steps=(step(0), unstorable)), 5.0
        )
    assert store.past.events(job) == before
    assert store.attempts.record(job, 1, SupervisorBatch(1, events=(event("a"),)), 5.0).accepted


def test_a_late_first_step_does_not_undo_a_cancellation_but_its_records_are_kept(
    store: Store,
) -> None:
    job = started(store)
    store.change(job, Cause.CANCEL_ASKED, "asked", 4.0)
    late = SupervisorBatch(1, steps=(step(0),), transition=(JobState.RUNNING, Cause.FIRST_STEP))
    assert store.attempts.record(job, 1, late, 5.0).accepted
    assert store.job(job).state is JobState.CANCELLING
    assert len(store.past.steps(job)) == 1


def test_nothing_is_recorded_after_a_job_ended(store: Store) -> None:
    job = started(store)
    done = SupervisorBatch(1, steps=(step(0),), transition=(JobState.SUCCEEDED, Cause.STEPS_DONE))
    assert store.attempts.record(job, 1, done, 7.0).accepted
    row = store.job(job)
    assert (row.state, row.ended_at, row.step) == (JobState.SUCCEEDED, 7.0, 0)
    answer = store.attempts.record(job, 1, SupervisorBatch(2, steps=(step(1),)), 8.0)
    assert not answer.accepted and "succeeded" in answer.reason
    with pytest.raises(TransitionRefused):
        store.change(job, Cause.CANCEL_ASKED, "too late", 9.0)
    with pytest.raises(TransitionRefused):
        store.attempts.begin(job, "again", 9.0)


def test_a_supervisor_begins_an_attempt_only_after_its_own(store: Store) -> None:
    job = started(store)
    second = store.attempts.begin(job, "rank lost", 4.0, after=1)
    assert second.attempt == 2
    assert store.attempts.begin(job, "rank lost", 4.5, after=1).attempt == 2, "its answer was lost"
    with pytest.raises(FencedError, match="attempt 1 is over, 2 is current"):
        store.attempts.begin(job, "rank died", 5.0, after=1)
    assert store.attempts.record(job, 2, SupervisorBatch(1, steps=(step(0),)), 6.0).accepted
    with pytest.raises(FencedError):
        store.attempts.begin(job, "rank lost", 7.0, after=1)
    assert [row["attempt"] for row in store.attempts.of(job)] == [1, 2]


def test_no_attempt_begins_without_nodes_or_while_cancelling(store: Store) -> None:
    store.add_job(JOB, toy_spec(), "/jobs/x", "toy.yaml", 1.0)
    with pytest.raises(TransitionRefused):
        store.attempts.begin(JOB, "first", 2.0)
    store.grant(JOB, "pg", [NODE], 2.0)
    store.change(JOB, Cause.CANCEL_ASKED, "asked", 3.0)
    with pytest.raises(TransitionRefused):
        store.attempts.begin(JOB, "first", 4.0)
    assert store.attempts.of(JOB) == []


def test_event_ids_only_grow_and_pages_join_without_gap_or_overlap(store: Store) -> None:
    started(store)
    started(store, "toy-00000b")
    for n in range(1, 6):
        for job in (JOB, "toy-00000b"):
            batch = SupervisorBatch(n, events=(event(f"{job} {n}"),), steps=(step(n),))
            assert store.attempts.record(job, 1, batch, 5.0).accepted
    everything = store.past.events(JOB)
    ids = [e["id"] for e in everything]
    assert ids == sorted(set(ids))
    paged: list[dict[str, Any]] = []
    while page := store.past.events(JOB, after=paged[-1]["id"] if paged else 0, limit=2):
        assert len(page) <= 2
        paged += page
    assert paged == everything
    assert {e["job"] for e in everything} == {JOB}


def test_waiting_is_told_once_as_long_as_its_reason_stays(store: Store) -> None:
    store.add_job(JOB, toy_spec(), "/jobs/x", "toy.yaml", 1.0)
    for reason in ("needs 4, 2 free", "needs 4, 2 free", "needs 4, 3 free"):
        store.wait(JOB, reason, 2.0)
    told = [e["message"] for e in store.past.events(JOB) if e["kind"] == "waiting"]
    assert told == ["needs 4, 2 free", "needs 4, 3 free"]
    assert store.job(JOB).reason == "needs 4, 3 free"


def test_steps_and_incidents_and_actions_come_back_without_loss(store: Store) -> None:
    job = started(store)
    record = step(3, loss=float("nan"), grad_norm=float("inf"), skipped=True, nonfinite_ranks=(1,))
    incident = Incident("nonfinite", "nonfinite", 1, 0, 3, 3, 5.0, "NaN", {"loss": float("nan")})
    decision = action(
        "rollback",
        incidents=(incident,),
        to_step=0,
        skip_batches=(1, 2),
        passed_over=(PassedOver("skip_step", "twice"),),
    )
    batch = SupervisorBatch(1, (), (record,), (incident.to_json(),), (decision,))
    assert store.attempts.record(job, 1, batch, 5.0).accepted
    (stored,) = store.past.steps(job)
    assert {k: v for k, v in stored.items() if k != "id"} == record
    assert StepRecord.from_json({k: v for k, v in stored.items() if k != "id"}).skipped
    assert str(store.past.incidents(job)) == str([incident])
    assert str(store.past.actions(job)) == str([decision])
    assert store.job(job).loss is None


def test_the_next_supervisors_report_begins_with_the_job(store: Store, tmp_path: Path) -> None:
    started(store)
    told = SupervisorBatch(sequence=1, events=(event("hello"),), steps=(step(0), step(1)))
    assert store.attempts.record(JOB, 1, told, 20.0).accepted
    resume = store.attempts.begin(JOB, "supervisor lost", 21.0)
    outbox = Outbox(Unreachable(), JOB, resume.attempt)
    journal = Journal(resume, outbox, history=store.past.history(JOB))
    journal.recorded(StepRecord.from_json(step(2, attempt=2)))
    view = journal.view(JobState.RUNNING)
    assert [(record.attempt, record.step) for record in view.steps] == [(1, 0), (1, 1), (2, 2)]
    assert "hello" in [told["message"] for told in view.events]
    journal.close()


def test_the_resume_state_is_the_sum_of_the_stored_actions(store: Store) -> None:
    job = started(store, drills=[{"kind": "weight_surge", "step": 2, "layer": 1, "factor": 9}])
    layer, other = "layers.1.mlp.down", "layers.0.mlp.down"
    made = (
        action("rollback", to_step=5, skip_batches=(7, 6)),
        action("layer_fallback", timeline=1, to_step=5, precision={layer: "bf16", other: "bf16"}),
        action("return_to_fp8", timeline=2, precision={other: "fp8"}),
        action("lower_lr", timeline=2, to_step=4, lr_scale=0.5, skip_batches=(8,)),
        action("restart", timeline=3, to_step=4, in_place=False),
    )
    batch = SupervisorBatch(
        1,
        steps=(step(0), step(2, drills=(0,)), step(1, timeline=1)),
        actions=made,
        detector_state={"window": [1, 2]},
    )
    assert store.attempts.record(job, 1, batch, 5.0).accepted
    resume = store.attempts.begin(job, "rank lost", 6.0)
    assert (resume.attempt, resume.timeline, resume.step) == (2, 3, 1)
    assert resume.ledger == (6, 7, 8)
    assert resume.precision == {layer: "bf16"}
    assert resume.lr_scale == 0.5
    assert resume.fired_drills == (0,)
    assert resume.actions == made
    assert resume.detector_state == {"window": [1, 2]}
    assert resume.nodes == (NODE,)
    assert resume.spec == store.job(job).spec


def test_the_next_attempt_knows_the_batch_that_each_of_the_newest_steps_had_last(
    store: Store,
) -> None:
    job = started(store)
    again = [step(n, timeline=1, batch=n + 2) for n in range(590, 595)]
    batch = SupervisorBatch(1, steps=(*(step(n) for n in range(600)), *again))
    assert store.attempts.record(job, 1, batch, 5.0).accepted
    known = store.attempts.begin(job, "lost", 5.0).batches
    assert (known[589], known[590], known[594], known[595]) == (589, 592, 596, 595)
    assert len(known) == NEWEST_STEPS - len(again) and 0 not in known


def test_a_drill_that_killed_its_rank_does_not_fire_again(store: Store) -> None:
    drills = [
        {"kind": "kill_rank", "step": 20, "rank": 1},
        {"kind": "kill_rank", "step": 20, "rank": 2},
        {"kind": "kill_rank", "step": 500, "rank": 1},
    ]
    job = started(store, drills=drills)
    died = Incident("rank_died", "supervisor", 1, 0, 18, 18, 5.0, "rank 1 died", ranks=(1,))
    assert store.attempts.record(
        job, 1, SupervisorBatch(1, incidents=(died.to_json(),)), 5.0
    ).accepted
    assert store.attempts.begin(job, "rank died", 6.0).fired_drills == (0,)


def test_writers_in_many_threads_lose_nothing(store: Store) -> None:
    jobs = [started(store, f"toy-{n:06x}") for n in range(4)]

    def write(job: str) -> None:
        for n in range(1, 21):
            assert store.attempts.record(job, 1, SupervisorBatch(n, steps=(step(n),)), 5.0).accepted

    threads = [threading.Thread(target=write, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for job in jobs:
        assert [s["step"] for s in store.past.steps(job)] == list(range(1, 21))


def test_step_records_are_kept_small_and_older_plain_ones_are_still_read(
    store: Store, tmp_path: Path
) -> None:
    job = started(store)
    stats = [0.123456, 57344.0, 0.25, 1.5, 0.0]
    tensors = {f"layers.{i}.mlp.down/{role}": stats for i in range(9) for role in ("input", "w")}
    wide = step(0) | {"tensors": tensors}
    store.attempts.record(job, 1, SupervisorBatch(1, steps=(wide,)), 4.0)
    with sqlite3.connect(f"{tmp_path}/store.db") as db:
        ((size,),) = db.execute("select length(body) + length(tensors) from steps")
        plain = json.dumps(step(1))
        db.execute(
            "insert into steps (job, attempt, timeline, step, drills, body) values (?,1,0,1,'',?)",
            (job, plain),
        )
    assert size < len(json.dumps(wide)) / 2
    first, second = store.past.steps(job)
    assert first == {"id": first["id"], **wide}
    assert second == {"id": second["id"], **step(1)}


class TestPassingTrouble:
    def test_a_store_that_somebody_holds_is_told_apart_and_works_afterwards(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("orchestrator.store.engine.BUSY_MS", 50)
        store = Store(f"sqlite:///{tmp_path}/store.db")
        other = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailableError, match="locked"):
            store.add_job(JOB, toy_spec(), str(tmp_path), "toy.yaml", 1.0)
        other.execute("ROLLBACK")
        other.close()
        store.add_job(JOB, toy_spec(), str(tmp_path), "toy.yaml", 1.0)
        assert [row.id for row in store.jobs_to_tend()] == [JOB]

    def test_a_fault_of_ours_is_none(self, tmp_path: Path) -> None:
        store = Store(f"sqlite:///{tmp_path}/store.db")
        with pytest.raises(OperationalError, match="no such table"), store._read() as db:
            db.exec_driver_sql("SELECT * FROM nowhere")

    def test_it_survives_the_way_between_processes(self) -> None:
        error = pickle.loads(pickle.dumps(StoreUnavailableError("the store can't be used")))
        assert str(error) == "the store can't be used"
