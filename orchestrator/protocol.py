"""What crosses between the controller and a supervisor.

Promises: plain frozen values. The controller is the only writer of the store; a
supervisor's batch names the attempt it speaks for, and one of an older attempt is
refused, so that no two attempts write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from orchestrator.events import EventDraft
from orchestrator.lifecycle import Cause, JobState
from orchestrator.node_slot import NodeSlot
from orchestrator.recovery.controls import Control, ControlAnswer
from orchestrator.recovery.policy import Action
from orchestrator.spec.job import JobSpec
from parallel.config import ExchangeDtype, Precision

NAMESPACE = "octavo"
CONTROLLER_ACTOR = "octavo-controller"


def supervisor_actor(job: str) -> str:
    """Name of the job's supervisor actor; at most one of it is alive."""
    return f"octavo-supervisor-{job}"


def keeper_actor(job: str, bundle: int) -> str:
    """Name of the keeper that holds the node with number ``bundle`` of the job's group.

    The controller creates it, in its placement group and detached, before the supervisor; it
    lives until the node is given back.
    """
    return f"octavo-keeper-{job}-{bundle}"


@dataclass(frozen=True, slots=True)
class StepContext:
    """What a supervisor knew at a step beside its record: with it a replay decides the same."""

    attempt: int
    timeline: int
    step: int
    held: tuple[int, ...] = ()
    """Snapshots that all ranks have since the step before, in the order in which they came."""
    decides: bool = True
    """False: the ranks were told to stop, so nothing was decided any more."""
    ended: bool = False
    """The ranks were done, or about to be, when they were to be told something: no command
    reached them, and their memory was no place to go back to."""

    @property
    def usual(self) -> bool:
        """Whether it says nothing that needs to be stored."""
        return self.decides and not self.held and not self.ended

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "held": list(self.held)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> StepContext:
        return cls(**{**row, "held": tuple(row["held"])})


@dataclass(frozen=True, slots=True)
class SupervisorBatch:
    """What a supervisor has to tell, stored in one transaction or not at all."""

    sequence: int
    """From 1 within (attempt); a number already stored is acknowledged and ignored."""
    events: tuple[EventDraft, ...] = ()
    steps: tuple[Mapping[str, Any], ...] = ()
    """``StepRecord.to_json()``."""
    incidents: tuple[Mapping[str, Any], ...] = ()
    """``Incident.to_json()``."""
    actions: tuple[Action, ...] = ()
    answers: tuple[ControlAnswer, ...] = ()
    """What became of controls; one that was answered before keeps its answer."""
    transition: tuple[JobState, Cause] | None = None
    """The job's new state, checked against the lifecycle table."""
    detector_state: Mapping[str, Any] | None = None
    """State of the detectors after the last of ``steps``."""
    contexts: tuple[StepContext, ...] = ()
    """Of those of ``steps`` where there was something to tell."""


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """Whether a batch was stored; if not, why."""

    accepted: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ResumeState:
    """All a supervisor needs to start the next attempt, from stored records alone."""

    job: str
    spec: JobSpec
    job_dir: str
    attempt: int
    """The attempt to run, already allocated."""
    timeline: int
    step: int
    """Newest step recorded, -1 for none."""
    actions: tuple[Action, ...]
    precision: Mapping[str, Precision]
    ledger: tuple[int, ...]
    lr_scale: float
    fired_drills: tuple[int, ...]
    detector_state: Mapping[str, Any] | None
    nodes: tuple[NodeSlot, ...]
    placement_group: str
    """What the names of the job's placement groups, one a node, begin with."""
    exchange: ExchangeDtype | None = None
    """What gradients cross the network in; None: not decided yet."""
    spares: tuple[NodeSlot, ...] = ()
    """Nodes of the group that have no ranks."""
    batches: Mapping[int, int] = field(default_factory=dict)
    """Batch of each of the newest steps recorded (``orchestrator.recovery.resume.batches_of``)."""
    written: tuple[Mapping[str, Any], ...] = ()
    """The newest events that tell of a checkpoint or of an action, in the order in which they were
    stored: without them nobody could say whether a job of which nothing is found has saved
    anything."""


@dataclass(frozen=True, slots=True)
class PastMark:
    """How far a job's past was read: the newest row of each kind."""

    step: int
    incident: int
    event: int


@dataclass(frozen=True, slots=True)
class JobHistory:
    """What earlier supervisors of a job told, for a report of all of it. Nothing is decided by
    it: what decisions need is in the ``ResumeState``."""

    steps: tuple[Mapping[str, Any], ...] = ()
    """``StepRecord.to_json()`` without per-tensor statistics, in the order they were stored."""
    incidents: tuple[Mapping[str, Any], ...] = ()
    """``Incident.to_json()``."""
    events: tuple[Mapping[str, Any], ...] = ()
    """Fields of ``EventDraft``."""
    goes_on: PastMark | None = None
    """Where the next page begins; None: this was the last one."""
    unread: str = ""
    """Why it is empty though there may be a past."""


def whole_history(page: Callable[[PastMark | None], JobHistory]) -> JobHistory:
    """All of a job's past; ``page`` gives the one after a mark, None: the first."""
    pages = [page(None)]
    while pages[-1].goes_on is not None:
        pages.append(page(pages[-1].goes_on))
    return JobHistory(
        tuple(step for page in pages for step in page.steps),
        tuple(incident for page in pages for incident in page.incidents),
        tuple(event for page in pages for event in page.events),
    )


BY_KEEPERS = "keepers"
"""``by`` in the detail of a ``checkpoint_written`` that no supervisor told of."""


class FencedError(RuntimeError):
    """The controller refused a supervisor: another attempt is the job's now."""


class ControllerPort(Protocol):
    """The controller as a supervisor sees it (over Ray calls)."""

    def next_attempt(self, job: str, attempt: int, reason: str) -> ResumeState:
        """Allocate the attempt after ``attempt``, durably, and say what it starts from.

        Asked again because the answer was lost, it gives the same one. Raises FencedError
        when ``attempt`` is not the job's current one: another supervisor has the job.
        """

    def history(self, job: str, after: PastMark | None = None) -> JobHistory:
        """What is stored of a job's past, a page at a time: from ``after`` on, None: the first."""

    def report(self, job: str, attempt: int, batch: SupervisorBatch) -> Acknowledgement:
        """Store a batch in one transaction; refused for an attempt that is not the current one."""


class SupervisorPort(Protocol):
    """The supervisor as the controller sees it: actor ``supervisor_actor(job)``, no constructor
    arguments; it finds the controller by name.
    """

    def run(self, resume: ResumeState) -> None:
        """Run the job from ``resume`` to a terminal or paused state, which it reports itself.

        Blocks. Returning or raising before such a state is the supervisor's loss: the
        controller then replaces it as if it had died.
        """

    def stop(self, reason: str) -> None:
        """End the ranks after a durable checkpoint, then report ``(CANCELLED, ENDED)``; at once."""

    def control(self, controls: Sequence[Control]) -> None:
        """What people ask for, in order; comes again and again until a batch answers it."""

    def ping(self) -> bool:
        """Whether ``run`` is still going; False after it has returned or raised."""
