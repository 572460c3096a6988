"""The way from a supervisor to the controller: order, retries, refusals."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from orchestrator.events import EventDraft
from orchestrator.lifecycle import Cause, JobState
from orchestrator.protocol import Acknowledgement, FencedError, SupervisorBatch
from orchestrator.supervision.outbox import (
    NO_STATISTICS,
    ControllerUnreachableError,
    Outbox,
    Told,
)

RUNNING = (JobState.RUNNING, Cause.FIRST_STEP)
DONE = (JobState.SUCCEEDED, Cause.STEPS_DONE)


class Controller:
    """Keeps batches; breaks as told."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, SupervisorBatch]] = []
        self.open = threading.Event()
        self.open.set()
        self.answers: list[Any] = []
        self.calls = 0

    def report(self, job: str, attempt: int, batch: SupervisorBatch) -> Acknowledgement:
        self.open.wait(10)
        self.calls += 1
        answer = self.answers.pop(0) if self.answers else Acknowledgement(True)
        if isinstance(answer, Exception):
            raise answer
        if answer.accepted:
            self.batches.append((attempt, batch))
        return answer

    def next_attempt(self, job: str, attempt: int, reason: str) -> Any:
        raise NotImplementedError


@pytest.fixture
def controller() -> Controller:
    return Controller()


@pytest.fixture
def outbox(controller: Controller) -> Iterator[Outbox]:
    made = Outbox(controller, "job", 1)
    yield made
    controller.open.set()
    made.close()


def step(number: int) -> Told:
    return Told(step={"step": number})


def event(kind: str) -> Told:
    return Told(event=EventDraft(kind, 0.0, kind, {}))


def test_store_returns_when_all_that_was_told_before_is_stored(
    controller: Controller, outbox: Outbox
) -> None:
    outbox.tell(*(step(n) for n in range(1000)))
    assert outbox.store(event("decided"))
    told = [s["step"] for _, batch in controller.batches for s in batch.steps]
    assert told == list(range(1000))
    assert controller.batches[-1][1].events[-1].kind == "decided"


def test_store_says_when_it_did_not_happen_in_time(controller: Controller, outbox: Outbox) -> None:
    controller.open.clear()
    assert outbox.store(event("decided"), timeout_s=0.05) is False


def test_fast_steps_share_a_batch(controller: Controller, outbox: Outbox) -> None:
    outbox.tell(*(step(n) for n in range(100)))
    outbox.store()
    assert len(controller.batches) <= 2


def test_each_transition_has_a_batch_of_its_own_in_order(
    controller: Controller, outbox: Outbox
) -> None:
    controller.open.clear()
    outbox.tell(step(0))
    time.sleep(0.1)  # the thread waits in its first call now, all below is queued
    outbox.tell(Told(transition=RUNNING), step(1), Told(transition=DONE), event("late"))
    controller.open.set()
    outbox.store()
    assert [b.transition for _, b in controller.batches] == [None, RUNNING, DONE, None]
    assert [b.sequence for _, b in controller.batches] == [1, 2, 3, 4]


def test_a_batch_is_sent_again_with_its_number_until_it_is_acknowledged(
    controller: Controller, outbox: Outbox
) -> None:
    controller.answers = [ControllerUnreachableError("restarting")] * 2
    outbox.store(step(0))
    assert controller.calls == 3
    assert [b.sequence for _, b in controller.batches] == [1]


def test_a_refusal_is_final_and_whoever_waits_is_told(
    controller: Controller, outbox: Outbox
) -> None:
    controller.answers = [Acknowledgement(False, "attempt 1 is over")]
    with pytest.raises(FencedError, match="attempt 1 is over"):
        outbox.store(step(0))
    outbox.tell(step(1))
    time.sleep(0.1)
    assert controller.calls == 1 and outbox.refused == "attempt 1 is over"


def test_a_batch_that_breaks_the_controller_is_a_refusal(
    controller: Controller, outbox: Outbox
) -> None:
    controller.answers = [RuntimeError("no such table")]
    with pytest.raises(FencedError, match="no such table"):
        outbox.store(step(0))


def test_numbers_begin_again_with_the_next_attempt(controller: Controller, outbox: Outbox) -> None:
    outbox.store(step(0))
    outbox.begin(2)
    outbox.store(step(1))
    assert [(a, b.sequence) for a, b in controller.batches] == [(1, 1), (2, 1)]


def test_closing_sends_what_is_left(controller: Controller) -> None:
    box = Outbox(controller, "job", 1)
    box.tell(step(0))
    box.close()
    assert [b.steps for _, b in controller.batches] == [({"step": 0},)]


def test_while_the_controller_is_away_old_steps_keep_their_numbers_and_not_their_statistics(
    controller: Controller, outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("orchestrator.supervision.outbox.MOST_WHOLE", 10)
    controller.open.clear()
    outbox.tell(step(0), urgent=True)
    until_taken = threading.Event()
    while outbox._queue:  # the first one is on its way
        until_taken.wait(0.001)
    statistics = {"names": ["a"]}
    for number in range(1, 41):
        told = {"step": number, "loss": 1.0, "tensors": statistics}
        state = {"at": number} if number in (3, 7) else None
        outbox.tell(Told(step=told, detector_state=state))
        outbox.tell(Told(event=EventDraft("note", 0.0, str(number), {})))
    controller.open.set()
    assert outbox.store(timeout_s=10)
    batches = [batch for _, batch in controller.batches[1:]]
    steps = [row for batch in batches for row in batch.steps]
    assert [row["step"] for row in steps] == list(range(1, 41)), "none is lost"
    assert [row["step"] for row in steps if row["tensors"] == statistics] == list(range(36, 41))
    assert sum(len(batch.events) for batch in batches) == 40
    states = [batch.detector_state for batch in batches if batch.detector_state is not None]
    assert states == [{"at": 7}], "the newest one, however old"
    assert {"tensors": steps[0]["tensors"]} == NO_STATISTICS
