"""The start of a job's supervisor, which may fail: its name isn't free yet, Ray is overworked.

Promises: each failure is told, and the next try comes after a rest that grows; an attempt is tried
again only while no supervisor can have had it, as its number is what fences two of them; after
``TRIES`` in a row the job is paused and says why. They are counted from what is stored.
"""

from __future__ import annotations

import logging
import os

from launch.rank_errors import in_one_line
from monitoring.secrets import secrets_of, without
from orchestrator.controller.supervisors import Supervisors
from orchestrator.events import EventDraft
from orchestrator.lifecycle import Cause
from orchestrator.protocol import ResumeState
from orchestrator.store.database import Store
from orchestrator.store.rows import JobRow

logger = logging.getLogger(__name__)

NOT_STARTED = "supervisor_not_started"
"""Kind of the event that tells of a failure."""
AGAIN = "supervisor_tried_again"
"""Kind of the event that comes before the next try: what comes after it is that try's."""
TRIES = 10
"""Failures in a row after which the job is paused: as long as a supervisor may take to answer."""
REST_S = 1.0
"""Seconds after the first failure; then twice as long."""
LONGEST_REST_S = 60.0
"""And no longer than this."""


class SupervisorStart:
    """Of one controller."""

    def __init__(self, store: Store, supervisors: Supervisors) -> None:
        self._store = store
        self._supervisors = supervisors
        # Of this process: a controller that restarts tries at once.
        self._not_before: dict[str, float] = {}

    def rests(self, job: str, now: float) -> bool:
        """Whether it failed a short while ago."""
        return now < self._not_before.get(job, now)

    def rest(self, job: str, until: float) -> None:
        """Don't start it before: what ended the one before it may pass."""
        self._not_before[job] = until

    def forget(self, job: str) -> None:
        """Whoever resumes it has seen to what it rested for."""
        self._not_before.pop(job, None)

    def start(self, row: JobRow, reason: str, now: float) -> None:
        """Start the supervisor of the job's next attempt, which begins for ``reason``; of the
        present one where that failed."""
        self.forget(row.id)
        failures = self._failures(row)
        resume = self._begun(row, reason, now, again=failures > 0)
        if failures:
            told = f"Its supervisor is started again (try {failures + 1} of {TRIES})."
            self._store.note(row.id, EventDraft(AGAIN, now, told, {"try": failures + 1}))
        try:
            self._supervisors.start(resume)
        except Exception as error:
            logger.exception("the supervisor of %s can't be started", row.id)
            why = without(in_one_line(error), secrets_of(os.environ))
            self._failed(row, failures + 1, why, now)

    def _begun(self, row: JobRow, reason: str, now: float, *, again: bool) -> ResumeState:
        attempts = self._store.attempts
        # Its record says where its ranks run, and the job may have been mended since.
        if again and attempts.seats_of(row) == self._store.job(row.id).nodes:
            reason = attempts.of(row.id)[-1]["reason"]
            return attempts.begin(row.id, reason, now, after=row.attempt - 1)
        return attempts.begin(row.id, reason, now)

    def _failures(self, row: JobRow) -> int:
        """How often the start has failed in a row; 0 unless a failure is the last that is known of
        it: a try whose end isn't told may have begun a supervisor."""
        kinds = ("state", "attempt", AGAIN, NOT_STARTED)
        told = [e["kind"] for e in self._store.past.newest_events(row.id, kinds, 3 * TRIES)]
        if told[-1:] != [NOT_STARTED]:
            return 0
        failures, after = 0, ""
        for kind in reversed(told):
            # One that began for a further try, elsewhere, belongs to the row.
            if kind == "state" or (kind == "attempt" and after != AGAIN):
                break
            failures += kind == NOT_STARTED
            after = kind
        return failures

    def _failed(self, row: JobRow, times: int, why: str, now: float) -> None:
        told = f"Its supervisor could not be started ({times} of {TRIES} tries): {why}"
        self._store.note(row.id, EventDraft(NOT_STARTED, now, told, {"tries": times}))
        if times < TRIES:
            self._not_before[row.id] = now + min(REST_S * 2.0 ** (times - 1), LONGEST_REST_S)
            return
        fails = row.spec.recovery.on_exhausted == "fail"
        cause = Cause.ERROR if fails else Cause.BUDGET_SPENT
        self._store.change(row.id, cause, told, now)
