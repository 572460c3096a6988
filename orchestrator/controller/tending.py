"""A job that holds nodes: its supervisor, its loss, its end, and the nodes it stands on.

Promises: a call moves a job by one transition at most; a supervisor that is to end has a bounded
time for it; nodes go back once nothing on them would be lost.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.controller.growth import Growth
from orchestrator.controller.lost_supervisor import supervisor_lost
from orchestrator.controller.preemption import Preemption
from orchestrator.controller.seen import Seen
from orchestrator.controller.supervisor_start import SupervisorStart
from orchestrator.controller.supervisors import LastWords, Presence, Supervisors
from orchestrator.controller.waits import Waits
from orchestrator.events import EventDraft
from orchestrator.lifecycle import Cause, JobState
from orchestrator.nodes.desk import NodeDesk
from orchestrator.nodes.rescue import Rescue
from orchestrator.protocol import SupervisorBatch
from orchestrator.recovery.controls import STOPS
from orchestrator.recovery.restart_budget import rest_s
from orchestrator.store.database import Store
from orchestrator.store.rows import JobRow
from orchestrator.supervision import notices
from orchestrator.supervision.ending import end_of

CANCEL_GRACE_S = 60.0
"""Seconds that a cancelled job's supervisor has beside those that it gives its ranks to stop."""
KEPT = "starts anew with the nodes that it kept"
"""Of a job that the queue stopped, and for which nobody is there who would have its nodes."""
UNWRITTEN = "goes on when what the nodes' memory holds is on disk: its ranks are more or fewer now"
"""Of a job with resources.min_nodes."""
FINISH_GRACE_S = 60.0
"""Seconds that a supervisor has after the job's end for the report and W&B."""


class NoNodesError(RuntimeError):
    """The nodes of a job are gone and no others are free, or it is to go on on more or fewer, which
    its state isn't on disk for yet. Its supervisor ends; the controller starts another one.
    """


class Tending:
    """Of one controller."""

    def __init__(
        self,
        store: Store,
        desk: NodeDesk,
        supervisors: Supervisors,
        rescue: Rescue,
        preemption: Preemption,
        waits: Waits,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._desk = desk
        self._supervisors = supervisors
        self._rescue = rescue
        self._preemption = preemption
        self._growth = Growth(store, desk, preemption)
        self._start = SupervisorStart(store, supervisors)
        self._waits = waits
        self._clock = clock
        # When a wait of this process began, by (job, what). A restart begins it anew.
        self._since: dict[tuple[str, str], float] = {}
        self._stops: set[str] = set()

    def tend(self, row: JobRow, seen: Seen) -> bool:
        """A job that holds nodes: it has a supervisor, or gets one."""
        now = seen.now
        presence = self._supervisors.look(row.id, now)
        if row.state is JobState.CANCELLING:
            return self._tend_cancelling(row, presence, now)
        if presence is Presence.WORKING:
            if row.id in seen.asked:
                # Until it has answered: whichever supervisor has the job gets to know.
                self._supervisors.control(row.id, seen.asked[row.id])
            self._desk.leave(row)
            self._desk.settling.trains(row, now)
            self._desk.keep_up(row, now)
            self._growth.let_grow(row, seen)
            spares = self._desk.fill(row, now)
            if spares is not None:
                self._supervisors.spares(row.id, spares)
            return False
        if presence is Presence.DONE:
            words = self._supervisors.last_words(row.id)
            self._supervisors.kill(row.id)
            if not words.begun:
                # Nothing was lost with it: the next pass starts another one.
                return True
            # What it told last may have come since the pass began.
            if self._store.job(row.id).state is not row.state:
                return True
            return self._lost(row, now, words)
        if row.state is JobState.RUNNING:
            return self._lost(row, now, LastWords())
        if self._start.rests(row.id, now) or self.mend(row, seen):
            return self._stop_without_ranks(row, seen)
        why = "first start" if row.attempt == 0 else row.reason or "supervisor lost"
        self._start.start(row, why, now)
        return True

    def _stop_without_ranks(self, row: JobRow, seen: Seen) -> bool:
        """A job whose nodes are gone has no ranks that could stop: its state is what is on disk,
        and what the nodes that are left hold, which ``clear`` sees to. What would only have had it
        start anew on more nodes is in vain: it does."""
        stops = [c for c in seen.asked.get(row.id, ()) if c.kind in STOPS]
        asked = [control for control in stops if control.attempt is None]
        if asked:
            _, cause = end_of(asked[0])
            told = f"{cause.value} by {asked[0].by} while it waited for nodes"
            self._store.change(row.id, cause, told.replace("pause asked", "paused"), seen.now)
        return bool(asked)

    def _lost(self, row: JobRow, now: float, words: LastWords) -> bool:
        """Store the loss and its answer; the next pass starts the next attempt, if there is one."""
        waits = words.raised and words.told.startswith(NoNodesError.__name__)
        action = None
        before = self._store.past.actions(row.id)
        if not waits:
            action = supervisor_lost(row, before, now, words)
        if action is None:
            told = "the supervisor was lost after it had decided on the next attempt"
            if waits:
                told = words.told.removeprefix(f"{NoNodesError.__name__}: ")
            self._store.change(row.id, Cause.SUPERVISOR_LOST, told, now)
            return True
        if rest := rest_s((*before, action)):
            self._start.rest(row.id, now + rest)
        incident = action.incidents[0]
        both = (notices.seen(incident), notices.decided(action))
        transition = {
            "pause": (JobState.PAUSED, Cause.BUDGET_SPENT),
            "fail": (JobState.FAILED, Cause.ERROR),
        }.get(action.kind, (JobState.RECOVERING, Cause.SUPERVISOR_LOST))
        batch = SupervisorBatch(
            sequence=0,
            events=tuple(EventDraft(n.kind, now, n.message, n.detail) for n in both),
            incidents=(incident.to_json(),),
            actions=(action,),
            transition=transition,
        )
        self._store.attempts.decide(row.id, batch, now)
        return True

    def _tend_cancelling(self, row: JobRow, presence: Presence, now: float) -> bool:
        if presence is not Presence.WORKING:
            self._supervisors.kill(row.id)
            if self._store.job(row.id).state is JobState.CANCELLING:
                self._store.change(row.id, Cause.ENDED, row.reason, now)
            return True
        if row.id not in self._stops:
            self._stops.add(row.id)
            self._supervisors.stop(row.id, row.reason)
        waited = self._waited((row.id, "cancel"), now)
        if waited <= CANCEL_GRACE_S or waited <= (given := self._given_to_stop(row)):
            return False
        self._supervisors.kill(row.id)
        reason = f"{row.reason}; the ranks didn't end within {given:.0f} s"
        self._store.change(row.id, Cause.ENDED, reason, now)
        return True

    def _given_to_stop(self, row: JobRow) -> float:
        """Seconds: a last checkpoint may take minutes, which its supervisor says as it begins; one
        that has not said so by the end of the grace doesn't do what it is asked."""
        told = self._store.past.events_of_attempt(row.id, row.attempt, notices.STOPPING)
        return CANCEL_GRACE_S + sum(event["detail"]["given_s"] for event in told[-1:])

    def clear(self, row: JobRow, seen: Seen) -> bool:
        """A job that has ended, is paused, or was stopped by the queue: its nodes go back when its
        supervisor is done, and nothing that should not be lost is in their memory alone; of the
        last only where a more important job is there for them."""
        now = seen.now
        presence = self._supervisors.look(row.id, now)
        working = presence is Presence.WORKING
        if working and self._waited((row.id, "finish"), now) <= FINISH_GRACE_S:
            return False
        self._supervisors.kill(row.id)
        fate = self._preemption.fate(row, seen)
        if fate == "waits" or not self._rescue.over(row):
            return False
        if row.nodes:
            # No attempt follows that would: what the last one showed counts as well.
            self._desk.settling.settle(row, now)
        if fate == "kept":
            self._store.change(row.id, Cause.NODES_GRANTED, KEPT, now)
        else:
            self._desk.release(row)
        self._stops.discard(row.id)
        self._start.forget(row.id)
        self._since = {k: t for k, t in self._since.items() if k[0] != row.id}
        return True

    def mend(self, row: JobRow, seen: Seen | None = None) -> str:
        """See to it that every rank has a node; else what it waits for, which is told: of those
        that hold nodes in what a pass has ``seen``, less important ones make room."""
        now = self._clock()
        missing = self._desk.mend(row, now)
        if missing:
            room = "" if seen is None else self._room(row, seen, now)
            self._waits.one(row, f"{missing}; {room}" if room else missing, now)
        elif missing := self._unwritten(row, begins=seen is not None):
            self._waits.one(row, missing, now)
        return missing

    def _unwritten(self, row: JobRow, *, begins: bool) -> str:
        """What an attempt of more or fewer ranks waits for. ``begins``: it is seen to, in a pass,
        when no supervisor has the job's disk."""
        row = self._store.job(row.id)
        if not self._rescue.unwritten(row) or (begins and self._rescue.over(row)):
            return ""
        return UNWRITTEN

    def _room(self, row: JobRow, seen: Seen, now: float) -> str:
        others = [other for other in seen.holding if other.id != row.id]
        if not any(other.priority < row.priority for other in others):
            return ""
        return self._preemption.make_room(row, others, seen.asked, self._desk.sight(now))

    def _waited(self, key: tuple[str, str], now: float) -> float:
        return now - self._since.setdefault(key, now)
