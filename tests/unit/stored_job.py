"""A scripted job (``scripted_job``) whose records are in a real store, to be replayed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator.controller.lost_supervisor import supervisor_lost
from orchestrator.controller.supervisors import LastWords
from orchestrator.events import EventDraft
from orchestrator.lifecycle import Cause, JobState
from orchestrator.node_slot import NodeSlot
from orchestrator.protocol import (
    Acknowledgement,
    JobHistory,
    PastMark,
    ResumeState,
    SupervisorBatch,
)
from orchestrator.replay.job_trace import JobTrace, trace_of_store
from orchestrator.spec.job import JobSpec
from orchestrator.store.database import Store
from orchestrator.supervision.notices import decided, seen
from tests.unit.scripted_job import WORLD, Bench, Script, ScriptedRanks, spec

JOB = "scripted-000001"


class StoringController:
    """The real store behind the questions of a supervisor."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def report(self, job: str, attempt: int, batch: SupervisorBatch) -> Acknowledgement:
        return self.store.attempts.record(job, attempt, batch, 0.0)

    def next_attempt(self, job: str, attempt: int, reason: str) -> ResumeState:
        return self.store.attempts.begin(job, reason, 0.0, after=attempt)

    def history(self, job: str, after: PastMark | None = None) -> JobHistory:
        return self.store.past.history(job, after)


class StoredJob(Bench):
    """A supervisor between scripted ranks and a real store."""

    def __init__(self, folder: Path, script: Script | None = None, **sections: Any) -> None:
        self.store = Store(f"sqlite:///{folder}/store.db")
        self.spec: JobSpec = spec(**sections)
        self.store.add_job(JOB, self.spec, str(folder), "job.yaml", 0.0)
        self.store.grant(JOB, "", [NodeSlot("00" * 28, "127.0.0.1", 0, WORLD)], 0.0)
        self.controller = StoringController(self.store)  # type: ignore[assignment]
        self.ranks = ScriptedRanks(script or Script())
        self.now = 1000.0
        self.pauses: list[float] = []
        self.take_over(self.store.attempts.begin(JOB, "first start", 0.0))

    def lose_supervisor(self) -> None:
        """The supervisor is gone with its ranks; the controller decides, and starts another."""
        self.supervision._journal.flush(10.0)
        self.supervision.close()
        action = supervisor_lost(
            self.store.job(JOB), self.store.past.actions(JOB), self.now, LastWords()
        )
        assert action is not None
        told = tuple(
            EventDraft(n.kind, self.now, n.message, n.detail)
            for n in (seen(action.incidents[0]), decided(action))
        )
        row = action.incidents[0].to_json()
        lost = (JobState.RECOVERING, Cause.SUPERVISOR_LOST)
        batch = SupervisorBatch(
            0, events=told, incidents=(row,), actions=(action,), transition=lost
        )
        self.store.attempts.decide(JOB, batch, self.now)
        self.ranks.running = False
        self.ranks.ends = {}
        self.ranks.closed = False
        self.take_over(self.store.attempts.begin(JOB, action.reason, self.now))

    def trace(self, *, goes_on: bool = False) -> JobTrace:
        """All that is stored; as of a job at rest, or of one that goes on."""
        if self.supervision.phase.value != "over":
            assert self.supervision._journal.flush(10.0)
        row = self.store.job(JOB)
        return trace_of_store(self.store, row if goes_on else replace(row, state=JobState.PAUSED))

    def close(self) -> None:
        super().close()
        self.store.close()


def with_step(trace: JobTrace, step: int, **changes: Any) -> JobTrace:
    """``trace`` with other values in every record of ``step``."""
    steps = tuple(replace(r, **changes) if r.step == step else r for r in trace.steps)
    return replace(trace, steps=steps)
