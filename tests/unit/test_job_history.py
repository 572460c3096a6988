"""A job's past as its next supervisor is told it: in pages for the report, apart for decisions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from monitoring.records import Incident, StepRecord
from orchestrator.events import EventDraft
from orchestrator.protocol import JobHistory, PastMark, SupervisorBatch, whole_history
from orchestrator.saved.restore import newest_written
from orchestrator.store.database import Store
from orchestrator.store.tables import events, steps
from orchestrator.supervision.outbox import ControllerUnreachableError
from orchestrator.supervision.supervision import Supervision
from orchestrator.supervision.supervisor import history
from tests.unit.stored_job import JOB, StoredJob
from tests.unit.test_store import started, step

TENSORS = {"layers.0.mlp.down/input": [0.5, 1.0, 0.0, 0.0, 0.0]}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path}/store.db")
    yield store
    store.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[StoredJob]:
    job = StoredJob(tmp_path, training={"steps": 40})
    yield job
    job.close()


def told(store: Store, count: int) -> str:
    """A job of that many steps, a third as many incidents and twice as many events."""
    job = started(store)
    seen = [Incident("nonfinite", "nonfinite", 1, 0, n, n, 5.0, f"NaN {n}") for n in range(count)]
    batch = SupervisorBatch(
        1,
        tuple(EventDraft("told", 5.0, f"event {n}", {"n": n}) for n in range(2 * count)),
        tuple(step(n) | {"tensors": TENSORS} for n in range(count)),
        tuple(incident.to_json() for incident in seen[: count // 3]),
    )
    assert store.attempts.record(job, 1, batch, 5.0).accepted
    return job


class TestPages:
    def test_they_join_without_a_gap_or_an_overlap(self, store: Store) -> None:
        job = told(store, 12)
        whole = store.past.history(job)
        assert [row["step"] for row in whole.steps] == list(range(12))
        assert [row["message"] for row in whole.incidents] == [f"NaN {n}" for n in range(4)]
        assert [e["detail"] for e in whole.events if e["kind"] == "told"] == [
            {"n": n} for n in range(24)
        ]
        for size in (1, 3, 12, 500):
            pages = partial(store.past.history, job, page=size)
            assert whole_history(pages) == whole

    def test_none_has_more_than_its_size_and_the_steps_are_the_newest(self, store: Store) -> None:
        job = told(store, 12)
        sizes: list[int] = []

        def page(after: PastMark | None) -> JobHistory:
            found = store.past.history(job, after, newest=7, page=3)
            sizes.append(max(map(len, (found.steps, found.incidents, found.events))))
            return found

        assert [row["step"] for row in whole_history(page).steps] == list(range(5, 12))
        assert max(sizes) == 3


class TestWithoutStatistics:
    def test_they_are_not_even_read(self, store: Store) -> None:
        job = told(store, 3)
        with store._write(job) as db:
            db.execute(sa.update(steps).values(tensors="no JSON"))
        light = store.past.history(job).steps
        assert [StepRecord.from_json(row).step for row in light] == [0, 1, 2]
        assert all(row["tensors"] == {} for row in light)
        with pytest.raises(json.JSONDecodeError):
            store.past.steps(job)

    def test_of_a_step_of_an_older_octavo_they_are_left_out(self, store: Store) -> None:
        job = told(store, 1)
        wide = step(0) | {"tensors": TENSORS}
        with store._write(job) as db:
            db.execute(sa.update(steps).values(body=json.dumps(wide), tensors=None))
        (light,) = store.past.history(job).steps
        assert light == wide | {"tensors": {}}
        (whole,) = store.past.newest_steps(job, 1)
        assert whole == wide


class Asked:
    """A controller that answers to what it has; ``away``: times that it doesn't before."""

    def __init__(self, store: Store, away: int) -> None:
        self._store = store
        self.away = away

    def history(self, job: str, after: PastMark | None = None) -> JobHistory:
        if self.away > 0:
            self.away -= 1
            raise ControllerUnreachableError("Get timed out")
        return self._store.past.history(job, after, page=5)


class TestTheNextSupervisor:
    def test_asks_again_until_it_is_told_the_past(self, store: Store) -> None:
        job = told(store, 12)
        pauses: list[float] = []
        past = history(Asked(store, 6), job, pauses.append)  # type: ignore[arg-type]
        assert len(past.steps) == 12 and len(past.incidents) == 4
        assert pauses == sorted(pauses) and len(pauses) == 6

    def test_tells_of_a_past_that_cannot_be_read(self, job: StoredJob) -> None:
        job.train(3)
        job.supervision._journal.flush(10.0)
        with job.store._write(JOB) as db:
            db.execute(sa.update(steps).values(body="no JSON"))
        past = history(job.controller, JOB)  # type: ignore[arg-type]
        assert past.steps == () and "JSONDecodeError" in past.unread
        supervision = Supervision(
            job.store.attempts.begin(JOB, "lost", 0.0),
            job.controller,
            job.ranks,
            clock=lambda: job.now,
            history=past,
        )
        supervision.close()
        (event,) = [e for e in job.store.past.events(JOB) if e["kind"] == "past_unread"]
        assert "summary.json" in event["message"] and "JSONDecodeError" in event["message"]

    def test_never_begins_at_the_seed_what_was_saved_whatever_it_knows_of_the_past(
        self, job: StoredJob, tmp_path: Path
    ) -> None:
        job.train(12)
        job.ranks._write_checkpoint()
        job.train(5)
        (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
        job.ranks.held.clear()
        job.lose_supervisor()
        job.step()
        row = job.store.job(JOB)
        assert (row.state.word, len(job.ranks.attempts)) == ("paused", 1)
        assert "a checkpoint of step 12 was written" in row.reason

    def test_is_told_the_newest_checkpoints_with_what_it_starts_from(self, store: Store) -> None:
        job = started(store)
        drafts = [
            EventDraft("checkpoint_written", float(n), "written", {"step": n}) for n in range(3)
        ]
        other = EventDraft("told", 9.0, "beside", {})
        batch = SupervisorBatch(1, (*drafts, other))
        assert store.attempts.record(job, 1, batch, 5.0).accepted
        resume = store.attempts.begin(job, "lost", 6.0)
        assert [event["detail"]["step"] for event in resume.written] == [0, 1, 2]

    def test_a_clock_that_is_set_back_hides_no_checkpoint(self, store: Store) -> None:
        job = started(store)
        ahead = 3600.0
        told = (
            EventDraft("checkpoint_written", ahead, "written", {"step": 50}),
            EventDraft("rollback", ahead + 60, "it went back", {"step": 70, "to_step": 50}),
            EventDraft("checkpoint_written", 300.0, "written", {"step": 100}),
        )
        assert store.attempts.record(job, 1, SupervisorBatch(1, told), 5.0).accepted
        assert newest_written(store.attempts.begin(job, "lost", 6.0).written) == 100


def test_the_newest_events_of_a_kind_come_oldest_first(store: Store) -> None:
    job = told(store, 4)
    found: list[dict[str, Any]] = store.past.newest_events(job, ("told",), 3)
    assert [row["detail"]["n"] for row in found] == [5, 6, 7]
    newest = store.past.newest_event(job, ("told",))
    assert newest == found[-1]
    with store._read() as db:
        assert db.execute(sa.select(sa.func.count()).select_from(events)).scalar_one() > 8
