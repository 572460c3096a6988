"""What a person asks of a running job, and what comes of it. Pure: no clock, no I/O.

A control takes the way of the policy's own decisions: it becomes an ``Action``, stored
before its command is posted, and the ranks apply it at the same step boundary. Promises:
the same control and the same history give the same answer; what can't be done is refused
with why and what could be; no budget of the policy is charged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from launch.data import MOST_SKIPPED, batch_of
from orchestrator.actions import Action, ActionKind, Asked, History
from orchestrator.events import Notice
from orchestrator.lifecycle import JobState
from orchestrator.recovery.drafts import drafted
from orchestrator.recovery.evidence import fp8_now, kept_by_hand, spans
from orchestrator.spec.errors import nearest
from orchestrator.spec.job import JobSpec
from parallel.config import ExchangeDtype, Precision
from parallel.precision.recipes import is_high_precision, linear_names

ControlKind = Literal["rollback", "precision", "exchange", "pause", "preempt"]
STOPS: frozenset[ControlKind] = frozenset({"pause", "preempt"})
"""Those that end the ranks after a checkpoint; ``preempt`` is the controller's own."""
ControlState = Literal["accepted", "applied", "refused"]


@dataclass(frozen=True, slots=True)
class Control:
    """One thing asked for."""

    key: str
    """The client's; one that comes twice is one control."""
    kind: ControlKind
    by: str
    """Who asks, as they call themselves."""
    time: float
    reason: str = ""
    to_step: int | None = None
    """rollback: the step to go back to."""
    skip_batches: tuple[int, ...] = ()
    """rollback: indices of batches to leave out from then on."""
    layers: tuple[str, ...] = ()
    """precision: patterns of linears' names, as ``layers.*.mlp.down``."""
    to: Literal["fp8", "bf16", "auto"] | None = None
    """precision: fp8 or bf16; exchange: auto too, which measures again."""
    attempt: int | None = None
    """preempt: the attempt that is to end, where it is for the job's own sake: the next one starts
    on what is there, asked or not."""

    @property
    def asked(self) -> Asked:
        """As its action keeps it."""
        return Asked(self.by, self.key, self.reason)

    def same_order(self, other: Control) -> bool:
        """Whether both ask for the same, whoever asks and when."""
        return replace(self, by=other.by, time=other.time, reason=other.reason) == other

    def to_json(self) -> dict[str, Any]:
        row = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.attempt is None:
            del row["attempt"]  # what people ask for has none
        return row | {"skip_batches": list(self.skip_batches), "layers": list(self.layers)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Control:
        lists = {name: tuple(row[name]) for name in ("skip_batches", "layers")}
        return cls(**{**row, **lists})


@dataclass(frozen=True, slots=True)
class ControlAnswer:
    """What became of a control."""

    key: str
    state: Literal["applied", "refused"]
    message: str
    """A sentence for a person."""
    step: int
    """Applied: the first step that runs with it; refused: the newest step recorded."""


@dataclass(frozen=True, slots=True)
class Refused:
    """It can't be done."""

    why: str


@dataclass(frozen=True, slots=True)
class Grounds:
    """What an answer needs beside the history."""

    points: tuple[int, ...]
    """Steps of checkpoints, and of copies that the keepers hold, on this branch."""
    fixed_layers: tuple[str, ...]
    """Linears that the spec keeps in BF16."""
    runs_fp8: bool
    """Whether the spec's precision is fp8."""
    steps: int
    """Steps of the job."""


def decide_control(control: Control, history: History, grounds: Grounds) -> Action | Refused:
    """The action that ``control`` comes to, or why it can't be."""
    match control.kind:
        case "rollback":
            return _rollback(control, history, grounds)
        case "precision":
            return _precision(control, history, grounds)
        case "exchange":
            return _exchange(control, history)
        case "pause":
            return _action("pause", control, history, "pause with a checkpoint")
        case "preempt":
            if control.attempt not in (None, history.attempt):
                return Refused(
                    f"attempt {control.attempt} is over, and attempt {history.attempt} began on "
                    "the nodes that were there"
                )
            words = "back into the queue after a checkpoint"
            return _action("pause", control, history, words)


def _action(kind: ActionKind, control: Control, history: History, words: str) -> Action:
    because = f" ({control.reason.rstrip('. ')})" if control.reason else ""
    reason = f"Asked by {control.by}: {words}{because}."
    return replace(drafted(kind, (), history, reason), asked=control.asked)


def _rollback(control: Control, history: History, grounds: Grounds) -> Action | Refused:
    step = control.to_step
    assert step is not None
    in_memory = {snapshot.step for snapshot in history.restorable}
    if step not in in_memory and step not in grounds.points:
        return Refused(no_such_step(step, in_memory, grounds.points))
    first = batch_of(step, frozenset(history.ledger))
    ledger = frozenset({*history.ledger, *control.skip_batches})
    if len(ledger) > MOST_SKIPPED:
        return Refused(
            f"the skip ledger would hold {len(ledger):,} batches, and {MOST_SKIPPED:,} is the most"
        )
    used = [b for b in control.skip_batches if b < first and b not in history.ledger]
    if used:
        return Refused(
            f"{spans(used, 'batch', 'batches')} came before step {step}, whose batch is {first}, "
            "and can't be left out any more: go back further, or skip later ones"
        )
    last = batch_of(grounds.steps - 1, ledger)
    if beyond := [b for b in control.skip_batches if b > last]:
        told = spans(beyond, "batch", "batches")
        return Refused(f"{told} will never be used: the last step's is {last}")
    skip = tuple(sorted(set(control.skip_batches) - set(history.ledger)))
    in_place = step in in_memory
    words = f"go back to the snapshot of step {step}"
    if not in_place:
        words = f"restart from the state kept of step {step}"
    if skip:
        words += f" and skip {spans(skip, 'batch', 'batches')}"
    action = _action("rollback", control, history, words)
    return replace(action, to_step=step, in_place=in_place, skip_batches=skip)


def no_such_step(step: int, in_memory: Collection[int], points: Collection[int]) -> str:
    """Why a step can't be gone back to, with those that can."""
    places = [
        f"{where} {', '.join(map(str, sorted(steps)))}"
        for where, steps in (("in memory:", in_memory), ("after a restart:", points))
        if steps
    ]
    there = "; ".join(places) or "none at all so far"
    return f"there is no snapshot or checkpoint of step {step}; there are, {there}"


def _precision(control: Control, history: History, grounds: Grounds) -> Action | Refused:
    if not grounds.runs_fp8:
        return Refused(BF16_JOB)
    names = matched(control.layers, history.fp8_layers, grounds.fixed_layers)
    if isinstance(names, Refused):
        return names
    to: Precision = "fp8" if control.to == "fp8" else "bf16"
    if to == "fp8":
        running = set(fp8_now(history))
        moving = [name for name in names if name not in running]
    else:
        # One that fell back by itself is kept from now on.
        by_hand = kept_by_hand(history)
        moving = [name for name in names if name not in by_hand]
    if not moving:
        verb = "computes" if len(names) == 1 else "compute"
        return Refused(f"{told_layers(names)} {verb} in {to.upper()} already")
    words = f"{told_layers(moving)} to {to.upper()}"
    action = _action("precision", control, history, words)
    return replace(action, precision=dict.fromkeys(moving, to))


BF16_JOB = "the spec's precision is bf16: no layer of this job can compute in FP8"


def matched(
    patterns: Iterable[str], layers: Sequence[str], fixed: Collection[str]
) -> list[str] | Refused:
    """The layers that any of ``patterns`` matches, in their order; each has to match one."""
    found: set[str] = set()
    for pattern in patterns:
        hits = [name for name in layers if fnmatchcase(name, pattern)]
        if hits:
            found.update(hits)
            continue
        kept = [name for name in fixed if fnmatchcase(name, pattern)]
        if kept:
            told = "stays" if len(kept) == 1 else "stay"
            return Refused(
                f"{told_layers(kept)} {told} in BF16 by the spec's fp8.high_precision_layers"
            )
        near = nearest(pattern, [*layers, *fixed]) or f"they are as {next(iter(layers), 'none')}"
        return Refused(f"{pattern!r} matches none of the {len(layers)} linears; {near}")
    return [name for name in layers if name in found]


def told_layers(names: Sequence[str]) -> str:
    """A few of them by name."""
    if len(names) <= 4:
        return ", ".join(names)
    return f"{', '.join(names[:3])} and {len(names) - 3} more"


def _exchange(control: Control, history: History) -> Action | Refused:
    if control.to == "auto":
        words = "measure again what gradients cross the network in the faster"
        return _action("exchange_auto", control, history, words)
    to: ExchangeDtype = "fp8" if control.to == "fp8" else "bf16"
    # One that fell back by itself is kept from now on.
    if history.exchange == to and not (to == "bf16" and _fell_back(history)):
        return Refused(f"gradients cross the network in {to.upper()} already")
    kind: ActionKind = "exchange_fp8" if to == "fp8" else "exchange_bf16"
    action = _action(kind, control, history, f"gradients cross the network in {to.upper()}")
    return replace(action, exchange=to)


def _fell_back(history: History) -> bool:
    """Whether the policy put the exchange where it is."""
    moves = [action for action in history.actions if action.exchange is not None]
    return bool(moves) and moves[-1].kind == "exchange_bf16" and moves[-1].asked is None


def in_vain(job: str, state: JobState, kind: ControlKind) -> str:
    """Why a job in ``state`` takes no such control, and what would help; empty when it does."""
    if state in (JobState.STARTING, JobState.RUNNING, JobState.RECOVERING):
        return ""
    if put_off(state, kind):
        return ""
    if kind == "pause":
        if state is JobState.PAUSED:
            return f"{job} is paused already; `octavo resume {job}` lets it go on"
        if state is JobState.CANCELLING:
            return f"{job} is being cancelled, after a checkpoint; it can be resumed then"
        return "" if state is JobState.QUEUED else f"{job} has ended: it {_been(state)}"
    if state is JobState.QUEUED:
        return f"{job} waits for its nodes; ask again once it runs"
    if state is JobState.PAUSED:
        return f"{job} is paused; resume it first (`octavo resume {job}`), then ask again"
    if state is JobState.CANCELLING:
        return f"{job} is being cancelled"
    return f"{job} doesn't run: it {_been(state)}"


def put_off(state: JobState, kind: ControlKind) -> bool:
    """Whether it is kept until the job is resumed, which begins with it."""
    return state is JobState.PAUSED and kind not in STOPS


def refused_at_once(control: Control, spec: JobSpec, step: int) -> str:
    """What a job's spec and its newest ``step`` alone tell of a control that can't be done;
    empty where it may be."""
    if control.to_step is not None and control.to_step > step + 1:
        return f"step {control.to_step} is still to come: the newest one done is {step}"
    if control.kind != "precision":
        return ""
    if spec.precision != "fp8":
        return BF16_JOB
    if spec.model.factory is not None:
        return ""  # its linears are known to the ranks
    layers, kept = spec.model.num_layers, spec.fp8.high_precision_layers
    names = linear_names(layers)
    fixed = [name for name in names if is_high_precision(name, kept, layers)]
    found = matched(control.layers, [name for name in names if name not in fixed], fixed)
    return found.why if isinstance(found, Refused) else ""


def _been(state: JobState) -> str:
    return "was cancelled" if state is JobState.CANCELLED else f"has {state.word}"


def left_unanswered(
    control: Control, state: JobState, step: int, reason: str, decided: Action | None = None
) -> ControlAnswer:
    """The answer to a control that was under way when its job came to rest in ``state``;
    ``decided``: the action that is stored of it, which the job goes on with if it goes on."""
    if control.kind == "preempt" or (control.kind == "pause" and state is JobState.PAUSED):
        return ControlAnswer(control.key, "applied", reason or "Paused.", step + 1)
    measured = decided is not None and decided.kind != "exchange_auto"
    if decided is not None and measured and state is not JobState.SUCCEEDED:
        back = decided.to_step
        told = "It is in force where the job goes on."
        if back is not None:
            told = f"The job goes on from step {back} or before."
        return ControlAnswer(control.key, "applied", told, step + 1 if back is None else back)
    been = "is paused" if state is JobState.PAUSED else _been(state)
    if state is JobState.QUEUED:
        been = "went back into the queue"
    return ControlAnswer(control.key, "refused", f"the job {been} before it could be done", step)


def answered(control: Control, answer: ControlAnswer) -> Notice:
    """What became of something that a person asked for."""
    told = answer.message.rstrip(". ")
    became = "refused" if answer.state == "refused" else "done"
    end = "" if told.endswith("?") else "."
    message = f"The {control.kind} that {control.by} asked for is {became}: {told}{end}"
    detail = {
        "control": control.key,
        "kind": control.kind,
        "asked_by": control.by,
        "step": answer.step,
    }
    return Notice(f"control_{answer.state}", message, detail)
