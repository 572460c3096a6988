"""A job's stored records through detectors and recovery policy again. Pure: no clock, no I/O.

Promises: with the job's own policy the stored incidents and actions come out to the last
digit, since the same detectors, facts, snapshot book and ladder read the same records in the
same order; where they don't, the difference is told. With another policy each step says what
it would have done: the same, something else, something new, or nothing.

What is given, because no policy decides it: lost ranks and supervisors (the incidents, not
their answers), what a person asked for, the measurement of ``communication_data_type: auto``.

What holds after the first decision that differs, ``verdicts.ASSUMPTION`` says: nobody trained what
would have followed it. A clock reading is no input of a decision; an action that was never
taken has the time of its step.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from launch.commands import SnapshotReport
from monitoring.records import Incident, StepRecord
from orchestrator.actions import Action, History
from orchestrator.controller.lost_supervisor import blind_history
from orchestrator.protocol import ResumeState, StepContext
from orchestrator.recovery.detector_bank import new_bank
from orchestrator.recovery.evidence import LOST_RANK
from orchestrator.recovery.job_facts import JobFacts
from orchestrator.recovery.policy import decide, exchange_to_fp8, return_to_fp8
from orchestrator.recovery.resume import NEWEST_STEPS, batches_of, standing
from orchestrator.replay.job_trace import Begun, JobTrace
from orchestrator.replay.verdicts import Replayed, Stretch, judge, paired
from orchestrator.saved.snapshot_book import SnapshotBook
from orchestrator.spec.config import RecoveryConfig
from orchestrator.spec.job import JobSpec


def replay(trace: JobTrace, spec: JobSpec | None = None) -> Replayed:
    """Go through the records of ``trace``; ``spec``: the job's own, with another policy."""
    return _Replay(trace, spec or trace.spec, strict=spec is None).run()


class _Replay:
    """The records' course, and beside it what the policy made of it."""

    def __init__(self, trace: JobTrace, spec: JobSpec, *, strict: bool) -> None:
        self._trace = trace
        self._spec = spec
        self._strict = strict
        self._policy: RecoveryConfig = spec.recovery
        self._bank = new_bank(spec)
        self._saved: str | None = None
        """What the store has of the detectors' state."""
        self._contexts = {(c.attempt, c.timeline, c.step): c for c in trace.contexts}
        self._course: list[Action] = []
        """Stored actions so far."""
        self._own: list[Action] = []
        """What the policy would have done so far; of the same number and kinds until it departs."""
        self._facts: JobFacts | None = None
        self._newest: StepRecord | None = None
        self._stretches: list[Stretch] = []
        self._reached: int = -1
        self._assumed = False
        self._records = 0
        self._used: deque[tuple[int, int]] = deque(maxlen=NEWEST_STEPS)
        """Step and batch of the newest records."""

    def run(self) -> Replayed:
        """Through all attempts, as far as there are records."""
        steps = iter(self._trace.steps)
        record = next(steps, None)
        for begun in self._trace.attempts:
            actions = deque(a for a in self._trace.actions if a.attempt == begun.attempt)
            self._begin(begun)
            while record is not None and record.attempt == begun.attempt:
                self._before(record, actions)
                self._step(record, actions)
                record = next(steps, None)
            while actions and not (record is None and self._is_ahead(actions[0])):
                self._between(actions.popleft())
        return Replayed(
            job=self._trace.job,
            records=self._records,
            stretches=tuple(s for s in self._stretches if s.first is not None or s.decisions),
            unanswered=self._unanswered(),
            goes_on=self._trace.goes_on,
            not_kept=self._trace.not_kept,
            decided_by=self._trace.decided_by,
        )

    def _is_ahead(self, stored: Action) -> bool:
        """Whether it answers a record that is not among those read: the job goes on."""
        place = (stored.attempt, stored.timeline, stored.step)
        given = stored.asked is not None or stored.kind == "exchange_chosen"
        lost = any(i.kind in LOST_RANK for i in stored.incidents)
        return self._trace.goes_on and place > self._read and not given and not lost

    @property
    def _read(self) -> tuple[int, int, int]:
        """Attempt, timeline and step of the newest record that was read."""
        newest = self._newest
        return (newest.attempt, newest.timeline, newest.step) if newest else (0, 0, -1)

    # Attempts.

    def _begin(self, begun: Begun) -> None:
        """What ``Supervision`` does for an attempt: facts from the store, detectors rewound."""
        spec, before = self._trace.spec, self._facts
        stand = standing(spec, self._course)
        newest = self._newest
        facts = JobFacts(
            ResumeState(
                job=self._trace.job,
                spec=spec,
                job_dir="",
                attempt=begun.attempt,
                timeline=max(stand.timeline, newest.timeline if newest else 0),
                step=newest.step if newest else -1,
                actions=tuple(self._course),
                precision=stand.precision,
                ledger=stand.ledger,
                lr_scale=stand.lr_scale,
                fired_drills=(),
                detector_state=None,
                nodes=(),
                placement_group="",
                exchange=stand.exchange,
                batches=batches_of(self._used),
            )
        )
        if begun.new_supervisor:
            self._bank = new_bank(self._spec)
            if self._saved is not None:
                self._bank.load_state_dict(json.loads(self._saved))
        elif before is not None:
            facts.fp8_layers = before.fp8_layers
        self._facts = facts
        # All ranks as one: what is stored is that all of them had a snapshot.
        self._book = SnapshotBook(spec.snapshots, begun.attempt, world_size=1)
        if begun.kept is not None:
            self._book.made_smaller(begun.kept)
        self._stretches.append(Stretch(begun.attempt, facts.timeline))
        for start in begun.starts:
            if start > facts.step + 1:
                self._bank = new_bank(self._spec)
            self._bank.rewind(start)

    # Steps.

    def _before(self, record: StepRecord, actions: deque[Action]) -> None:
        """Stored actions from before this record."""
        here = (record.timeline, record.step)
        while actions:
            place = (actions[0].timeline, actions[0].step)
            # The first measurement comes before the first step, though both have number 0.
            first = actions[0].kind == "exchange_chosen" and self._known.exchange is None
            if place > here or (place == here and not first):
                return
            self._between(actions.popleft())

    def _step(self, record: StepRecord, actions: deque[Action]) -> None:
        facts = self._known
        context = self._contexts.get(
            (record.attempt, record.timeline, record.step),
            StepContext(record.attempt, record.timeline, record.step),
        )
        self._enter(record)
        for step in context.held:
            report = SnapshotReport(record.attempt, facts.timeline, 0, step, "ring", 0, "")
            self._book.add(report, facts.timeline)
        facts.record(record)
        incidents = self._bank.observe(record)
        if record.step % self._spec.snapshots.every == 0:
            self._save()
        stored: list[Action] = []
        while actions and _answers(actions[0], record):
            stored.append(actions.popleft())
        time = stored[0].time if stored else record.time
        if incidents:
            self._book.unhealthy(record.step)
        else:
            self._book.healthy(record.step)
        own: list[Action] = []
        if context.decides and incidents:
            own.append(decide(incidents, self._history(time, context), self._policy))
        elif context.decides:
            own = self._calm(time)
        self._own += own
        self._compare(stored, own, (record.attempt, record.timeline, record.step))
        for action in stored:
            self._take(action)

    def _calm(self, time: float) -> list[Action]:
        """Layers, and the exchange, that go back to FP8."""
        own: list[Action] = []
        for fallen, returning in (
            (bool(self._known.precision), return_to_fp8),
            (self._known.exchange == "bf16", exchange_to_fp8),
        ):
            if fallen:
                history = self._history(time)
                history = replace(history, actions=(*history.actions, *own))
                action = returning(history, self._policy)
                own += [action] if action.kind != "none" else []
        return own

    def _enter(self, record: StepRecord) -> None:
        """Count the record to its stretch."""
        stretch = self._stretches[-1]
        if stretch.timeline != record.timeline:
            stretch = Stretch(record.attempt, record.timeline)
            self._stretches.append(stretch)
        if stretch.first is None:
            stretch.first = record.step
        if record.step <= self._reached:
            stretch.again = record.step
        stretch.last = record.step
        self._reached = max(self._reached, record.step)
        self._newest = record
        self._used.append((record.step, record.batch))
        self._records += 1

    # Decisions.

    def _between(self, stored: Action) -> None:
        """A stored action that no record's incidents or calm led to."""
        place = (stored.attempt, stored.timeline, stored.step)
        lost = tuple(i for i in stored.incidents if i.kind in LOST_RANK)
        if stored.asked is not None or stored.kind == "exchange_chosen":
            self._own.append(stored)
            self._compare([stored], [stored], place, given=True)
        elif lost:
            own = decide(lost, self._history_of_loss(stored, lost), self._policy)
            self._own.append(own)
            self._compare([stored], [own], place)
        else:
            self._compare([stored], [], place)
        self._take(stored)

    def _history_of_loss(self, stored: Action, lost: Sequence[Incident]) -> History:
        if any(incident.kind == "supervisor_lost" for incident in lost):
            # The controller decides it, and knows the stored actions alone.
            return blind_history(
                stored.attempt, stored.timeline, stored.step, stored.time, self._own
            )
        return self._history(stored.time)

    def _history(self, time: float, context: StepContext | None = None) -> History:
        """The recorded course, and the policy's own past."""
        own = tuple(self._own)
        seen = max((i.step for action in own for i in action.incidents), default=None)
        held = () if context is not None and context.ended else self._book.restorable()
        course = self._known.history(time, held)
        return replace(course, actions=own, last_incident_step=seen)

    def _take(self, stored: Action) -> None:
        """The recorded course goes on with a stored action."""
        facts = self._known
        if stored.kind == "accept":
            self._bank.renew(stored.step + 1)
        if not any(i.kind == "supervisor_lost" for i in stored.incidents):
            self._save()
        self._course.append(stored)
        facts.apply(stored)
        if stored.in_place and stored.to_step is not None:
            self._book.rolled_back(stored.to_step)
            self._bank.rewind(stored.to_step, timeline=facts.timeline)

    def _save(self) -> None:
        """The detectors' state is stored at every snapshot's step and with every action."""
        if any(begun.new_supervisor for begun in self._trace.attempts[1:]):
            self._saved = json.dumps(self._bank.state_dict())

    def _compare(
        self,
        stored: Sequence[Action],
        own: Sequence[Action],
        place: tuple[int, int, int],
        *,
        given: bool = False,
    ) -> None:
        for old, new in paired(stored, own):
            found = judge(old, new, place, given=given, strict=self._strict, assumed=self._assumed)
            self._stretch_of(place).decisions.append(found)
            self._assumed |= found.deeds_differ

    def _stretch_of(self, place: tuple[int, int, int]) -> Stretch:
        """The stretch of a decision; a way back may end before its first step is recorded."""
        stretch = self._stretches[-1]
        if (stretch.attempt, stretch.timeline) != place[:2]:
            found = [s for s in self._stretches if (s.attempt, s.timeline) == place[:2]]
            stretch = found[-1] if found else Stretch(*place[:2])
            if not found:
                self._stretches.append(stretch)
        return stretch

    def _unanswered(self) -> tuple[Incident, ...]:
        answered = {_text(i) for action in self._trace.actions for i in action.incidents}
        known = [i for i in self._trace.incidents if _text(i) not in answered]
        if self._trace.goes_on:
            known = [i for i in known if (i.attempt, i.timeline, i.step) <= self._read]
        return tuple(known)

    @property
    def _known(self) -> JobFacts:
        assert self._facts is not None
        return self._facts


def _answers(action: Action, record: StepRecord) -> bool:
    """Whether a stored action is what ``record`` led to."""
    if (action.timeline, action.step) != (record.timeline, record.step):
        return False
    if action.asked is not None or action.kind == "exchange_chosen":
        return False
    return not any(incident.kind in LOST_RANK for incident in action.incidents)


def _text(incident: Incident) -> str:
    return json.dumps(incident.to_json(), sort_keys=True)
