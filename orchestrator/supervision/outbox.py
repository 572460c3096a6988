"""What a supervisor tells the controller: in order, without loss, without stopping training.

Promises: batches are numbered within the attempt and sent again until acknowledged, so
that a restarting controller loses nothing and stores nothing twice; ``store`` returns only
when all that was told before it is durable. When the controller refuses a batch, the
attempt is no longer ours: ``refused`` says why, and nothing is sent any more. While it is away for
long, steps keep their numbers and the older ones lose their statistics: memory is bounded by what
``MOST_WHOLE`` of them take, and some hundred bytes a step beyond.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from monitoring.tensor_stats import NO_TENSORS, TensorColumns
from orchestrator.actions import Action
from orchestrator.events import EventDraft
from orchestrator.lifecycle import Cause, JobState
from orchestrator.protocol import ControllerPort, FencedError, StepContext, SupervisorBatch
from orchestrator.recovery.controls import ControlAnswer

logger = logging.getLogger(__name__)

LINGER_S = 0.05
"""Seconds that steps wait for each other, so that fast steps share a transaction."""
RETRY_S = (0.1, 2.0)
"""Shortest and longest wait between tries."""
MOST_ITEMS = 256
"""Things told in one batch at most."""
MOST_WHOLE = 1024
"""Things that wait with all that was told of them: with 1,000 tensors a step has 400 kB."""
NO_STATISTICS: Mapping[str, Any] = {"tensors": TensorColumns.of(NO_TENSORS).to_json()}


class ControllerUnreachableError(ConnectionError):
    """The controller did not answer: it is restarting, or its node is cut off."""


@dataclass(frozen=True, slots=True)
class Told:
    """One thing to tell."""

    event: EventDraft | None = None
    step: Mapping[str, Any] | None = None
    context: StepContext | None = None
    incident: Mapping[str, Any] | None = None
    action: Action | None = None
    answer: ControlAnswer | None = None
    transition: tuple[JobState, Cause] | None = None
    detector_state: Mapping[str, Any] | None = None


class Outbox:
    """A queue and the thread that empties it."""

    def __init__(self, controller: ControllerPort, job: str, attempt: int) -> None:
        self._controller = controller
        self._job = job
        self._attempt = attempt
        self._sequence = 0
        self._queue: deque[Told] = deque()
        self._light = 0
        """Of the queue, how many of the oldest have lost what is heavy."""
        self._states = 0
        """How many of the others have a state of the detectors."""
        self._changed = threading.Condition()
        self._added = self._stored = 0
        self._urgent = False
        self._closed = False
        self.refused: str | None = None
        """Why the controller refused a batch; None while it takes them."""
        self._thread = threading.Thread(target=self._send_all, name="outbox", daemon=True)
        self._thread.start()

    def tell(self, *told: Told, urgent: bool = False) -> int:
        """Queue; returns at once, with the number of things told so far."""
        with self._changed:
            self._queue.extend(told)
            self._states += sum(one.detector_state is not None for one in told)
            self._lighten()
            self._added += len(told)
            self._urgent |= urgent
            self._changed.notify_all()
            return self._added

    def store(self, *told: Told, timeout_s: float | None = None) -> bool:
        """Queue and wait until it and all before it are stored. False: not within the time.

        Raises FencedError when the controller refuses.
        """
        upto = self.tell(*told, urgent=True)
        with self._changed:
            self._changed.wait_for(
                lambda: self._stored >= upto or self.refused is not None, timeout_s
            )
            if self.refused is not None:
                raise FencedError(self.refused)
            return self._stored >= upto

    def begin(self, attempt: int) -> None:
        """Speak for another attempt from now on; all told before has been stored."""
        with self._changed:
            assert self._stored == self._added, "store() before the attempt changes"
            self._attempt = attempt
            self._sequence = 0

    def close(self, timeout_s: float = 5.0) -> None:
        """Send what is left, for ``timeout_s`` at most, and end the thread."""
        with self._changed:
            self._urgent = True
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)

    def _lighten(self) -> None:
        while len(self._queue) - self._light > MOST_WHOLE:
            told = self._queue[self._light]
            if told.step is not None:
                told = replace(told, step={**told.step, **NO_STATISTICS})
            if told.detector_state is not None:
                self._states -= 1
                if self._states:
                    # A newer one is on its way.
                    told = replace(told, detector_state=None)
            self._queue[self._light] = told
            self._light += 1

    def _send_all(self) -> None:
        while (chunk := self._next_chunk()) is not None:
            self._sequence += 1
            if not self._send(batch_of(self._sequence, chunk)):
                return
            with self._changed:
                self._stored += len(chunk)
                self._changed.notify_all()

    def _next_chunk(self) -> list[Told] | None:
        """What goes in the next batch; None when there is nothing more to come."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            if not self._queue:
                return None
            if not self._urgent:
                self._changed.wait_for(lambda: self._urgent, LINGER_S)
            chunk: list[Told] = []
            while self._queue and len(chunk) < MOST_ITEMS:
                told = self._queue.popleft()
                if self._light:
                    self._light -= 1
                else:
                    self._states -= told.detector_state is not None
                chunk.append(told)
                if told.transition is not None:
                    break  # a batch has one transition, after all that came before it
            self._urgent = bool(self._queue) and self._urgent
            return chunk

    def _send(self, batch: SupervisorBatch) -> bool:
        """Until it is acknowledged; False when it was refused."""
        wait = RETRY_S[0]
        while True:
            try:
                answer = self._controller.report(self._job, self._attempt, batch)
            except ControllerUnreachableError as error:
                logger.warning("the controller does not answer (%s); trying again", error)
                time.sleep(wait)
                wait = min(2 * wait, RETRY_S[1])
                continue
            except Exception as error:
                reason = f"the controller failed on a batch: {error}"
                logger.exception("the controller failed on batch %d", batch.sequence)
            else:
                if answer.accepted:
                    return True
                reason = answer.reason
            with self._changed:
                self.refused = reason
                self._changed.notify_all()
            return False


def batch_of(sequence: int, told: list[Told]) -> SupervisorBatch:
    """One batch of what was told, each kind in its order; at most one transition."""
    states = [t.detector_state for t in told if t.detector_state is not None]
    transitions = [t.transition for t in told if t.transition is not None]
    return SupervisorBatch(
        sequence=sequence,
        events=tuple(t.event for t in told if t.event is not None),
        steps=tuple(t.step for t in told if t.step is not None),
        contexts=tuple(t.context for t in told if t.context is not None),
        incidents=tuple(t.incident for t in told if t.incident is not None),
        actions=tuple(t.action for t in told if t.action is not None),
        answers=tuple(t.answer for t in told if t.answer is not None),
        transition=transitions[-1] if transitions else None,
        detector_state=states[-1] if states else None,
    )
