"""What a pass, a list and a step cost the store, counted: it must not grow with what is there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.api.jobs import job_json
from orchestrator.lifecycle import Cause, JobState
from orchestrator.placement.fair_queue import Ticket, turns
from orchestrator.placement.placement import need_of
from orchestrator.protocol import SupervisorBatch
from orchestrator.store.database import Store
from orchestrator.store.errors import StoreUnavailableError
from tests.unit.control_plane import ControlPlane
from tests.unit.test_fair_queue import tickets


@dataclass
class Said:
    """What the database was asked."""

    statements: list[str] = field(default_factory=list)
    plans: list[str] = field(default_factory=list)

    def of(self, table: str, *verbs: str) -> list[str]:
        """Statements that begin with one of ``verbs`` and name the table."""
        return [s for s in self.statements if s.startswith(verbs) and f" {table}" in s]


@contextmanager
def listening(store: Store, *, plans: bool = False) -> Iterator[Said]:
    """All that is asked meanwhile; ``plans``: with how SQLite goes about it."""
    said = Said()

    def heard(_c: Any, cursor: Any, statement: str, parameters: Any, _x: Any, many: bool) -> None:
        told = " ".join(statement.split())
        said.statements.append(told)
        if plans and told.startswith("SELECT"):
            rows = cursor.connection.execute(f"EXPLAIN QUERY PLAN {statement}", parameters)
            said.plans += [str(row[-1]) for row in rows]

    sa.event.listen(store._engine, "before_cursor_execute", heard)
    try:
        yield said
    finally:
        sa.event.remove(store._engine, "before_cursor_execute", heard)


STEP = {"timeline": 0, "step": 0, "batch": 0, "loss": 1.0, "drills": []}


class Together:
    """Jobs that run, and supervisors of all of them that report at the same moment."""

    def __init__(self, folder: Path, jobs: int = 6) -> None:
        self.plane = ControlPlane(folder, *(4 for _ in range(jobs)))
        self.jobs = [self.plane.submit(f"job{number}") for number in range(jobs)]
        self.plane.steps(2 * jobs)

    def told(self, batches: dict[str, SupervisorBatch]) -> tuple[int, dict[str, Any]]:
        """How often the store was committed, and what each was answered, or what it raised."""
        return self.at_once(batches, lambda job: self.plane.controller.report(job, 1, batches[job]))

    def at_once(self, names: Iterable[str], do: Callable[[str], Any]) -> tuple[int, dict[str, Any]]:
        """The same of anything that is stored, once for each of ``names``."""
        store = self.plane.store
        commits: list[object] = []
        heard = commits.append
        answers: dict[str, Any] = {}

        def tell(name: str) -> None:
            try:
                answers[name] = do(name)
            except Exception as error:
                answers[name] = error

        sa.event.listen(store._engine, "commit", heard)
        threads = [threading.Thread(target=tell, args=(name,)) for name in names]
        with store._writing:
            # Somebody writes, so that all wait.
            for thread in threads:
                thread.start()
            deadline = time.monotonic() + 30
            while len(store._together._waiting) < len(threads):
                assert time.monotonic() < deadline, "they do not come"
                time.sleep(0.001)
        for thread in threads:
            thread.join(30)
        sa.event.remove(store._engine, "commit", heard)
        return len(commits), answers


@pytest.fixture
def together(tmp_path: Path) -> Together:
    return Together(tmp_path)


@pytest.fixture
def queue(tmp_path: Path) -> Callable[[int], ControlPlane]:
    """A cluster that one job has, and so many behind it."""

    def made(waiting: int) -> ControlPlane:
        folder = tmp_path / str(waiting)
        folder.mkdir()
        plane = ControlPlane(folder, 4)
        for number in range(waiting + 1):
            plane.submit(f"job{number}", by=f"user{number % 7}")
        plane.steps(4)
        return plane

    return made


class TestPass:
    def test_over_a_queue_in_which_nothing_changed_it_looks_at_no_job(
        self, queue: Callable[[int], ControlPlane]
    ) -> None:
        counts = []
        for waiting in (3, 30):
            plane = queue(waiting)
            with listening(plane.store) as said:
                plane.steps(3)
            assert said.of("jobs", "SELECT", "UPDATE", "INSERT") == []
            counts.append(len(said.statements))
        assert counts[0] == counts[1]

    def test_after_a_submission_it_reads_that_job_and_writes_only_to_it(
        self, queue: Callable[[int], ControlPlane], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plane = queue(30)
        read: list[str] = []
        query = plane.store.tended._query
        monkeypatch.setattr(
            plane.store.tended,
            "_query",
            lambda which: [read.append(row.id) or row for row in query(which)],  # type: ignore[func-returns-value]
        )
        new = plane.submit("new")
        with listening(plane.store) as said:
            plane.steps(1)
        assert set(read) == {new}
        assert len(said.of("jobs", "UPDATE")) == 1
        assert plane.controller.waits.reason_of(plane.store.job(new)).startswith("waits behind job")

    def test_that_starts_a_job_writes_to_none_of_those_that_go_on_waiting(
        self, queue: Callable[[int], ControlPlane]
    ) -> None:
        updates = []
        for waiting in (3, 30):
            plane = queue(waiting)
            (running,) = plane.supervisors.alive
            attempt = plane.store.job(running).attempt
            over = SupervisorBatch(1, transition=(JobState.CANCELLED, Cause.ENDED))
            plane.controller.cancel(running, "enough")
            assert plane.controller.report(running, attempt, over).accepted
            plane.supervisors.done.add(running)
            with listening(plane.store) as said:
                plane.steps(4)
            assert len(plane.supervisors.started) == 2
            updates.append(len(said.of("jobs", "UPDATE")))
        assert updates[0] == updates[1]

    def test_those_behind_are_told_once_behind_whom_and_shown_behind_whom_now(
        self, queue: Callable[[int], ControlPlane]
    ) -> None:
        plane = queue(3)
        last = plane.store.jobs()[-1]
        (first_told,) = plane.told(last.id, "waiting")
        assert (
            first_told == plane.controller.waits.reason_of(last) == f"waits behind {ahead(plane)}"
        )
        (running,) = plane.supervisors.alive
        plane.controller.cancel(running, "enough")
        plane.supervisors.alive.pop(running)
        plane.steps(5)
        now = plane.controller.waits.reason_of(plane.store.job(last.id))
        assert now == f"waits behind {ahead(plane)}" != first_told
        assert plane.told(last.id, "waiting") == [first_told]

    def test_it_sees_what_was_written_since_whoever_wrote_it(
        self, queue: Callable[[int], ControlPlane]
    ) -> None:
        plane = queue(2)
        waiting = [row for row in plane.store.jobs() if row.state is JobState.QUEUED]
        plane.store.change(waiting[0].id, Cause.CANCEL_ASKED, "no more", plane.now)
        assert waiting[0].id not in {row.id for row in plane.store.jobs_to_tend()}
        plane.groups.total["node1"] = 4
        plane.steps(3)
        assert waiting[1].id in plane.supervisors.alive

    def test_a_look_that_fails_loses_nothing(
        self, queue: Callable[[int], ControlPlane], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plane = queue(1)
        new = plane.submit("new")

        def away(which: object) -> None:
            raise StoreUnavailableError("the store is away")

        with monkeypatch.context() as patched:
            patched.setattr(plane.store.tended, "_query", away)
            with pytest.raises(StoreUnavailableError):
                plane.store.jobs_to_tend()
        assert new in {row.id for row in plane.store.jobs_to_tend()}

    def test_it_says_whether_a_job_moved(self, queue: Callable[[int], ControlPlane]) -> None:
        plane = queue(2)
        assert not plane.controller.step(plane.now)
        plane.groups.total["node1"] = 4
        assert plane.controller.step(plane.now + 1)

    def test_many_jobs_that_ask_for_the_same_are_looked_at_once(
        self, queue: Callable[[int], ControlPlane], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plane = queue(30)
        asked: list[object] = []
        import orchestrator.nodes.sight as sight

        fit = sight.fit
        monkeypatch.setattr(sight, "fit", lambda *a: asked.append(a[0]) or fit(*a))
        plane.submit("new")
        plane.steps(1)
        # One for the queue, and one where the first of it is to be placed.
        assert 1 <= len(asked) <= 2

    def test_no_spec_is_read_again_for_a_job_whose_row_has_changed(
        self, queue: Callable[[int], ControlPlane], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plane = queue(3)
        (running,) = plane.supervisors.alive
        known = {row.id: row.asks for row in plane.store.jobs_to_tend()}
        monkeypatch.setattr("orchestrator.store.rows.asks_of", lambda spec: pytest.fail("again"))
        plane.store.wait(running, "said something else", plane.now)
        again = {row.id: row.asks for row in plane.store.jobs_to_tend()}
        assert again == known
        assert again[running].need == need_of(plane.store.job(running).spec)


def ahead(plane: ControlPlane) -> str:
    """The job whose reason says what is missing."""
    rows = [row for row in plane.store.jobs() if row.state is JobState.QUEUED]
    (first,) = [row.id for row in rows if row.reason.startswith("needs ")]
    return first


class TestLists:
    def test_a_page_is_found_by_an_index_and_not_sorted(
        self, queue: Callable[[int], ControlPlane]
    ) -> None:
        plane = queue(12)
        middle = plane.store.jobs()[5].id
        for narrowed in ({}, {"by": "user1"}, {"states": [JobState.QUEUED]}):
            with listening(plane.store, plans=True) as said:
                plane.store.pages.jobs(middle, 5, **narrowed)  # type: ignore[arg-type]
            page = said.plans[-1]
            assert page.startswith("SEARCH jobs USING INDEX ix_jobs_"), said.plans
            assert not any("TEMP B-TREE" in plan for plan in said.plans)

    def test_a_job_is_found_by_id_name_or_beginning_without_going_over_all(
        self, queue: Callable[[int], ControlPlane]
    ) -> None:
        plane = queue(12)
        some = plane.store.jobs()[5]
        for word in (some.id, some.name, some.id[:-2]):
            with listening(plane.store, plans=True) as said:
                assert plane.store.pages.job(word).id == some.id
            assert said.plans and not any(plan.startswith("SCAN") for plan in said.plans)

    def test_going_over_jobs_reads_no_spec_as_a_whole(
        self, queue: Callable[[int], ControlPlane], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        plane = queue(5)
        planned = {row.id: row.spec.training.steps for row in plane.store.jobs()}
        monkeypatch.setattr("orchestrator.store.rows.stored_spec", lambda text: pytest.fail(text))
        shown = [job_json(row) for row in plane.store.pages.jobs(None, 10)]
        assert {row["id"]: row["steps"] for row in shown} == planned
        assert len(plane.controller.numbers().jobs) == 6


class TestSubmissions:
    def test_those_that_come_at_once_wait_for_the_disk_once(self, together: Together) -> None:
        spec = together.plane.store.job(together.jobs[0]).spec
        names = [f"late-{number:06x}" for number in range(5)]

        def add(name: str) -> str:
            return together.plane.store.add_job(name, spec, "/jobs", "a.yaml", 1.0, by=name)

        commits, answers = together.at_once(names, add)
        assert commits == 1 and answers == {name: name for name in names}

    def test_the_same_key_that_comes_twice_at_once_is_one_job(self, together: Together) -> None:
        spec = together.plane.store.job(together.jobs[0]).spec

        def add(name: str) -> str:
            return together.plane.store.add_job(name, spec, "/jobs", "a.yaml", 1.0, key="once")

        commits, answers = together.at_once(["late-00000a", "late-00000b"], add)
        assert commits == 1 and len(set(answers.values())) == 1
        assert len(together.plane.store.jobs()) == len(together.jobs) + 1


class TestSteps:
    def test_a_batch_of_steps_leaves_what_detectors_learnt_where_it_is(
        self, queue: Callable[[int], ControlPlane]
    ) -> None:
        plane = queue(0)
        (job,) = plane.supervisors.alive
        step = STEP
        learnt = {"past": "x" * 10_000}
        first = SupervisorBatch(1, steps=(step,), detector_state=learnt)
        assert plane.controller.report(job, 1, first).accepted
        with listening(plane.store) as said:
            second = SupervisorBatch(2, steps=({**step, "step": 1},))
            assert plane.controller.report(job, 1, second).accepted
        assert not any("detector_state" in statement for statement in said.statements)
        assert plane.store.attempts.resume_state(job).detector_state == learnt
        again = SupervisorBatch(3, steps=({**step, "step": 2},), detector_state={"past": "y"})
        assert plane.controller.report(job, 1, again).accepted
        assert plane.store.attempts.resume_state(job).detector_state == {"past": "y"}

    def test_batches_of_many_jobs_that_come_at_once_wait_for_the_disk_once(
        self, together: Together
    ) -> None:
        batches = {job: SupervisorBatch(1, steps=(STEP,)) for job in together.jobs}
        commits, answers = together.told(batches)
        assert commits == 1 and all(answer.accepted for answer in answers.values())
        assert {row.step for row in together.plane.store.jobs()} == {0}

    def test_a_batch_that_cannot_be_stored_takes_no_other_with_it(self, together: Together) -> None:
        batches = {job: SupervisorBatch(1, steps=(STEP,)) for job in together.jobs}
        broken = together.jobs[2]
        batches[broken] = SupervisorBatch(1, steps=({**STEP, "lr": float("nan")},))
        late = SupervisorBatch(2, steps=(STEP,))
        batches[together.jobs[3]] = late
        commits, answers = together.told(batches)
        assert commits == 1
        assert isinstance(answers[broken], ValueError)
        assert answers[together.jobs[3]].reason == "batch 1 comes before 2"
        rows = {row.id: row.step for row in together.plane.store.jobs()}
        assert [job for job, step in rows.items() if step == -1] == [broken, together.jobs[3]]

    def test_where_the_disk_fails_everybody_is_told_and_nothing_is_stored(
        self, together: Together, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        full = StoreUnavailableError("the disk is full")
        calls: list[object] = []

        def fails(*some: object) -> None:
            calls.append(some)
            if len(calls) == 3:
                raise full

        monkeypatch.setattr("orchestrator.store.attempts.store_batch", fails)
        batches = {job: SupervisorBatch(1, steps=(STEP,)) for job in together.jobs}
        commits, answers = together.told(batches)
        assert commits == 0 and set(answers.values()) == {full}
        monkeypatch.undo()
        _, answers = together.told(batches)
        assert all(answer.accepted for answer in answers.values()), "they tell it again"

    def test_what_an_older_octavo_stored_of_detectors_is_taken_up(
        self, queue: Callable[[int], ControlPlane]
    ) -> None:
        plane = queue(0)
        (job,) = plane.supervisors.alive
        with plane.store._engine.begin() as db:
            db.exec_driver_sql("UPDATE jobs SET detector_state = '{\"past\": 1}'")
        assert plane.store.attempts.resume_state(job).detector_state == {"past": 1}


def as_it_is_defined(
    waiting: list[Ticket], holding: list[Ticket], served_at: dict[str, float]
) -> list[str]:
    """The order of ``turns``, each looked for among all users."""
    held = {t.user: 0 for t in waiting}
    for ticket in holding:
        held[ticket.user] = held.get(ticket.user, 0) + ticket.slots
    served = dict(served_at)
    newest = max(served.values(), default=0.0)
    left = sorted(waiting, key=lambda t: (t.since, t.job))
    order = []
    while left:
        top = max(t.priority for t in left)
        firsts: dict[str, Ticket] = {}
        for ticket in left:
            if ticket.priority == top:
                firsts.setdefault(ticket.user, ticket)
        chosen = min(
            firsts.values(), key=lambda t: (held[t.user], served.get(t.user, 0.0), t.since, t.job)
        )
        left.remove(chosen)
        order.append(chosen.job)
        held[chosen.user] += max(chosen.slots, 1)
        newest = served[chosen.user] = newest + 1.0
    return order


@given(
    st.lists(tickets, max_size=12),
    st.lists(tickets, max_size=4),
    st.dictionaries(st.sampled_from("abc"), st.floats(0, 100), max_size=3),
)
def test_turns_are_as_they_are_defined(
    waiting: list[Ticket], holding: list[Ticket], served_at: dict[str, float]
) -> None:
    found = [ticket.job for ticket in turns(waiting, holding, served_at)]
    assert found == as_it_is_defined(waiting, holding, served_at)
