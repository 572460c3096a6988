"""How a job is brought to its end: its ranks stop, what they had to tell comes in, the end is told.

Promises: ranks have a bounded time to end, which is told as it begins, and their last reports to
come in; the report is written once the end is stored; what only the ranks hold is not given up for
a pause.
"""

from __future__ import annotations

from collections.abc import Sequence

from launch.commands import Stop
from launch.rank_group import RankEnd
from orchestrator.events import Notice
from orchestrator.lifecycle import Cause, JobState
from orchestrator.recovery.controls import Control
from orchestrator.recovery.last_steps import missed
from orchestrator.saved.checkpoint_shelf import STORAGE_S
from orchestrator.supervision import notices
from orchestrator.supervision.attempt import ranks_told
from orchestrator.supervision.ending import Ending, unsaved, why_no_checkpoint
from orchestrator.supervision.inbox import Inbox
from orchestrator.supervision.job_in_hand import JobInHand
from orchestrator.supervision.lost_ranks import first_causes
from orchestrator.supervision.phases import Over, Phase, Stopping

DRAIN_S = 10.0
"""Seconds that the last reports may take after the ranks have ended."""


class JobEnd:
    """Of one job; ``inbox``: where its ranks' reports come in."""

    def __init__(self, job: JobInHand, inbox: Inbox) -> None:
        self._job = job
        self._inbox = inbox

    def stop(
        self,
        state: JobState,
        cause: Cause,
        reason: str,
        control: Control | None = None,
    ) -> None:
        """Stop the ranks after a checkpoint; at once where there is nothing to save."""
        job = self._job
        nothing_new = job.phase is Phase.LAUNCHING or not job.attempt.trains
        if nothing_new or any(end.how != "done" for end in job.group.ended()):
            self.finish(state, cause, reason)
            return
        job.attempt.ended_since = None
        job.post(Stop(reason, checkpoint=True))
        began = job.clock()
        time = job.saves.stop_time(job.world, job.attempt.step_times)
        # The controller waits as long before it ends a cancelled job by force.
        job.journal.happened(notices.stopping(time), began)
        job.standing = Stopping(Ending(state, cause, reason, began, time, control))

    def watch(self, ending: Ending, now: float, *, cancelled: bool) -> str | None:
        """End the job once its ranks have stopped; ``cancelled``: whatever is lost with that.

        Why it has to go on instead, where a pause would lose what was trained; else None.
        """
        job = self._job
        ended = job.group.ended()
        failed = [end for end in ended if end.how != "done"]
        if failed:
            told = ranks_told([end.rank for end in first_causes(failed)])
            note = f" (no checkpoint: {told} ended before it was written)"
        elif len(ended) == job.world:
            # They have stopped: what is waited for from here on is the storage.
            final = cancelled or ending.control is None
            if not self.drained(ended, now, DRAIN_S if final else STORAGE_S):
                return None
            late = missed(ended, job.attempt.under_way)
            note = f" ({late}: an older checkpoint is what a resume starts from)" if late else ""
            if job.shelf.awaits_storage and not job.all_on_disk():
                note = f" ({why_no_checkpoint(ended, job.shelf)})"
        else:
            waited, heard = now - ending.began, job.attempt.heard > ending.began
            if not (late := ending.time.late(waited, heard=heard)):
                return None
            if heard:
                job.saves.cut_off(waited)
            note = f" (ended without a checkpoint: {late})"
        if ending.control is not None:
            if not note and job.attempt.facts.step + 1 == job.spec.training.steps:
                self.complete(ended)
                return None
            if not cancelled and not job.all_on_disk():
                return note or why_no_checkpoint(ended, job.shelf)
        self.finish(ending.state, ending.cause, f"{ending.message.rstrip('.')}{note}.")
        return None

    def drained(self, ended: Sequence[RankEnd], now: float, storage_s: float = STORAGE_S) -> bool:
        """Whether all that the ended ranks had to report is here, or won't come any more.

        ``storage_s``: how long a storage is waited for that fails to make a checkpoint of it.
        """
        job = self._job
        attempt = job.attempt
        attempt.ended_since = attempt.ended_since or job.clock()
        steps = max((end.result.step for end in ended if end.result), default=0)
        # A rank's last reports come before its end, and may have come since the pass began.
        complete = attempt.facts.step + 1 >= steps and not job.shelf.waiting()
        complete = complete and self._inbox.empty
        patience = storage_s if job.shelf.awaits_storage else DRAIN_S
        return complete or now - attempt.ended_since > patience

    def complete(self, ended: Sequence[RankEnd]) -> None:
        """All steps are done."""
        job = self._job
        steps = job.spec.training.steps
        done = f"All {steps} steps are done." if steps > 1 else "Its one step is done."
        newest = job.attempt.facts.step
        if newest + 1 < steps:
            gap = notices.unrecorded(newest + 1, steps - 1)
            job.journal.happened(gap, job.clock())
            done = f"{done} {gap.message}"
        on_disk = job.on_disk()
        if lost := unsaved(ended, job.shelf, steps, job.attempt.resume.job, on_disk):
            # The weights are what the job was for.
            self.finish(JobState.FAILED, Cause.ERROR, f"{done} {lost}")
        else:
            self.finish(JobState.SUCCEEDED, Cause.STEPS_DONE, done)

    def finish(self, state: JobState, cause: Cause, message: str) -> None:
        """The job's end, and then its report: a job that is another's gets none from us. Raises
        FencedError."""
        job = self._job
        job.group.close()
        job.tell(job.copy_troubles.rest())
        job.journal.happened(Notice("ended", message), job.clock(), (state, cause))
        job.journal.flush()
        job.journal.write_report(state)
        job.standing = Over()
