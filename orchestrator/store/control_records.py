"""What people ask of jobs, as the store takes it and tells what became of it.

Promises: what is asked twice under one key is stored once; what can't be done is refused at once
and not stored; what is stored gets its answer, here for a job that waits, else from its supervisor
or from the end of its run.
"""

from __future__ import annotations

from orchestrator.lifecycle import Cause, JobState, next_state, state_named
from orchestrator.recovery.controls import Control, in_vain, put_off
from orchestrator.store.controls import (
    ControlConflictError,
    ControlRefusedError,
    ControlRow,
    UnknownControlError,
    add_control,
    open_controls,
    stored_control,
    stored_controls,
)
from orchestrator.store.engine import Reads, Writes
from orchestrator.store.rows import stored_job
from orchestrator.store.transitions import set_state


class ControlRecords:
    """The controls of a store; ``writing`` and ``reading`` are its transactions."""

    def __init__(self, writing: Writes, reading: Reads) -> None:
        self._writing = writing
        self._reading = reading

    def ask(self, job: str, control: Control, attempt: int | None = None) -> ControlRow:
        """Store a control; asked again under its key, the one that is there.

        Raises ``ControlConflictError`` for a key that asked for something else, and
        ``ControlRefusedError`` for a job that isn't running, or whose ``attempt`` for which it is
        asked has been followed by another. The pause of a queued job is
        done at once; what is asked of a paused one waits for its resume.
        """
        with self._writing(job) as db:
            row = stored_job(db, job)
            if (known := stored_control(db, job, control.key)) is not None:
                if not known.control.same_order(control):
                    raise ControlConflictError(control.key)
                return known
            state = state_named(row["state"])
            if refused := in_vain(job, state, control.kind):
                raise ControlRefusedError(refused)
            if attempt not in (None, row["attempt"]):
                raise ControlRefusedError(f"attempt {attempt} of {job} is over")
            waits = f"done first once the job is resumed (`octavo resume {job}`)"
            add_control(db, job, control, waits if put_off(state, control.kind) else "")
            if state is JobState.QUEUED:
                told = f"paused by {control.by} while it waited for nodes"
                after = next_state(state, Cause.PAUSE_ASKED)
                set_state(db, row, Cause.PAUSE_ASKED, after, told, control.time, {})
            found = stored_control(db, job, control.key)
        assert found is not None
        return found

    def knows(self, job: str, key: str) -> bool:
        """Whether something was asked of the job under this key."""
        with self._reading() as db:
            return stored_control(db, job, key) is not None

    def one(self, job: str, key: str) -> ControlRow:
        """What became of a control; raises ``UnknownControlError``."""
        with self._reading() as db:
            found = stored_control(db, job, key)
        if found is None:
            raise UnknownControlError(job, key)
        return found

    def of(self, job: str) -> list[ControlRow]:
        """All that was asked of a job, oldest first."""
        with self._reading() as db:
            return stored_controls(db, job)

    def open(self) -> dict[str, list[Control]]:
        """What waits for an answer, by job, oldest first."""
        found: dict[str, list[Control]] = {}
        with self._reading() as db:
            for row in open_controls(db):
                found.setdefault(row.job, []).append(row.control)
        return found
