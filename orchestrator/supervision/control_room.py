"""Where a supervisor does what people ask: each control in its turn, to its answer.

Promises: an action is stored before its command is posted; a control waits until the ranks
are where it can be done, and those behind it wait too; one that an earlier supervisor decided
is carried on with, not decided again; each is answered once it is in force, with its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from launch.commands import ExchangeReport, Order, RankReport, SetExchange, SetPrecision
from launch.step_part import StepPart
from orchestrator.actions import Action
from orchestrator.recovery.controls import (
    STOPS,
    Control,
    ControlAnswer,
    Grounds,
    Refused,
    answered,
    decide_control,
)
from orchestrator.spec.job import JobSpec
from orchestrator.supervision.attempt_state import AttemptState
from orchestrator.supervision.control_desk import ControlDesk
from orchestrator.supervision.journal import Journal


class Floor(Protocol):
    """The supervision, as far as a control reaches."""

    @property
    def attempt(self) -> AttemptState:
        """The present one."""

    def takes_commands(self) -> bool:
        """Whether the ranks train and go on."""

    def before_ranks(self) -> bool:
        """Whether the ranks are not given out: the attempt may as well begin elsewhere."""

    def may_pause_now(self) -> bool:
        """Whether a job whose ranks don't train would lose nothing by a pause."""

    def points_after_restart(self) -> set[int]:
        """Steps that another attempt could start from."""

    def take_in(self, action: Action, now: float) -> None:
        """Store what a person asked for, and build on it from here on."""

    def post(self, order: Order) -> int:
        """Send a command to the ranks; its number."""

    def go_back(self, action: Action) -> int:
        """Send the ranks to their own snapshots; the command's number."""

    def next_attempt(self, reason: str) -> None:
        """End the ranks and start anew."""

    def pause(self, reason: str, control: Control) -> None:
        """Stop the ranks after a checkpoint, and with them the job."""


class ControlRoom:
    """The controls of one job."""

    def __init__(
        self, spec: JobSpec, actions: Sequence[Action], journal: Journal, floor: Floor
    ) -> None:
        """``actions``: all of the job's."""
        self._spec = spec
        self._journal = journal
        self._floor = floor
        self._desk = ControlDesk(actions)

    def offer(self, controls: Sequence[Control]) -> bool:
        """Take in what is new, from any thread; whether anything was."""
        return self._desk.offer(controls)

    def turn(self, now: float) -> None:
        """Do those whose turn it is."""
        while (control := self._desk.first()) is not None:
            if not self._can_do(control):
                # Of what waits for ranks that train, a stop needs none.
                control = self._desk.first(STOPS)
                if control is None or not self._can_do(control):
                    return
            self._desk.take(control)
            self._do(control, now)

    def applied(self, report: RankReport | StepPart, now: float) -> None:
        """A rank tells which commands it has applied; all ranks do at the same step."""
        for control in self._desk.applied(report.command):
            step = report.step + 1 if control.to_step is None else control.to_step
            self._in_force(control, step, now)

    @property
    def measures(self) -> bool:
        """Whether a person asked what gradients cross the network in the faster."""
        return self._desk.measures

    def measured(self, report: ExchangeReport, found: str, now: float) -> None:
        """What was found is stored and in force."""
        for control in self._desk.measured():
            self.answer(control, "applied", found, report.step, now)

    def over(self) -> None:
        """The attempt is over; the next one starts with all that was decided."""
        self._desk.restart()

    def trains(self, step: int, now: float) -> None:
        """``step`` is the first of an attempt: all that was decided before is in force."""
        for control in self._desk.restarted():
            self._in_force(control, step, now)

    def answer(
        self,
        control: Control,
        state: Literal["applied", "refused"],
        message: str,
        step: int,
        now: float,
    ) -> None:
        """Tell what became of it."""
        answer = ControlAnswer(control.key, state, message, step)
        self._journal.answered(answer, answered(control, answer), now)

    def _can_do(self, control: Control) -> bool:
        """Otherwise it waits: for the attempt's first step, or for the job's end, which
        answers it."""
        if control.kind in STOPS and self._floor.may_pause_now():
            return True
        if control.kind == "rollback" and self._floor.before_ranks():
            # What an earlier supervisor decided is in force once they train.
            return self._desk.decided(control) is None
        if not self._floor.takes_commands():
            return False
        layers_known = bool(self._floor.attempt.facts.fp8_layers) or self._spec.precision != "fp8"
        return control.kind != "precision" or layers_known

    def _do(self, control: Control, now: float) -> None:
        """Decide on it, or carry on with what an earlier supervisor decided."""
        step = self._floor.attempt.facts.step
        # What names an attempt is of that attempt alone, whatever was decided in it.
        action = None if control.attempt is not None else self._desk.decided(control)
        if action is None:
            decided = self._decide(control, now)
            if isinstance(decided, Refused):
                self.answer(control, "refused", decided.why, step, now)
                return
            action = decided
        elif control.kind not in STOPS and action.kind != "exchange_auto":
            # It is in force since the attempt that was started after it.
            restore = self._floor.attempt.restore
            self._in_force(control, restore.step if restore else 0, now)
            return
        match action.kind:
            case "pause":
                self._floor.pause(action.reason, control)
            case "exchange_auto":
                self._desk.measure(control)
                self._floor.post(SetExchange("auto"))
            case "rollback" if action.in_place:
                self._desk.posted(control, self._floor.go_back(action))
            case "rollback":
                self._desk.restart(control)
                self._floor.next_attempt(action.reason)
            case _ if action.exchange is not None:
                self._desk.posted(control, self._floor.post(SetExchange(action.exchange)))
            case _:
                order = SetPrecision(dict(action.precision))
                self._desk.posted(control, self._floor.post(order))

    def _decide(self, control: Control, now: float) -> Action | Refused:
        """The action that it comes to, stored and taken in; or why it can't be."""
        attempt = self._floor.attempt
        facts = attempt.facts
        back = control.kind == "rollback"
        grounds = Grounds(
            points=tuple(self._floor.points_after_restart()) if back else (),
            fixed_layers=facts.fixed_layers,
            runs_fp8=self._spec.precision == "fp8",
            steps=self._spec.training.steps,
        )
        history = facts.history(now, attempt.book.restorable())
        action = decide_control(control, history, grounds)
        if isinstance(action, Action):
            self._floor.take_in(action, now)
            self._desk.note(action)
        return action

    def _in_force(self, control: Control, step: int, now: float) -> None:
        told = f"In force from step {step} on."
        if control.kind == "rollback":
            told = f"Training goes on from step {step}."
        self.answer(control, "applied", told, step, now)
