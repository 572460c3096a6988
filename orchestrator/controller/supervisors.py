"""The supervisors as the controller handles them: one actor a job, by name.

Promises: looking never blocks; at most one supervisor of a job is alive; one that a
controller before this one started is found again by its name.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from monitoring.secrets import secrets_of, without
from orchestrator.node_slot import NodeSlot
from orchestrator.protocol import NAMESPACE, ResumeState, supervisor_actor
from orchestrator.recovery.controls import Control

logger = logging.getLogger(__name__)

SILENCE_S = 60.0
"""Seconds without an answer after which a supervisor counts as lost."""
STARTING_S = 240.0
"""The same before its first answer to this controller: its process has to start first, and many
may at once; of one that a controller before this one started there is no telling how far it is."""


class Presence(Enum):
    """What is known of a job's supervisor."""

    ABSENT = "absent"
    """There is none."""
    WORKING = "working"
    DONE = "done"
    """Its ``run`` has returned or raised, or it died."""


@dataclass(frozen=True, slots=True)
class LastWords:
    """How a supervisor ended, as far as is known."""

    told: str = ""
    """One line, as ``ValueError: …``; empty when nothing is known."""
    raised: bool = False
    """It raised that itself; False: its process ended."""
    outside: bool = False
    """What it raised lies in what surrounds it, and may pass: its host is out of something, or Ray,
    or a storage, is away."""
    begun: bool = True
    """False: nobody has told it to run."""


class Supervisors(Protocol):
    """Where supervisors come from."""

    def start(self, resume: ResumeState) -> None:
        """Start the supervisor of an attempt; there must be none."""

    def look(self, job: str, now: float) -> Presence:
        """What is known at ``now``, without waiting."""

    def last_words(self, job: str) -> LastWords:
        """How the one that ``look`` found done has ended."""

    def stop(self, job: str, reason: str) -> None:
        """Ask it to end the ranks and the job as cancelled."""

    def control(self, job: str, controls: Sequence[Control]) -> None:
        """Hand over what people ask for; it may have come before, and there may be none."""

    def spares(self, job: str, spares: Sequence[NodeSlot]) -> None:
        """Say which nodes stand ready for the job now; there may be no supervisor."""

    def kill(self, job: str) -> None:
        """End it at once, and with it its ranks; there may be none."""


@dataclass
class _Known:
    actor: Any
    run: Any | None
    """Reference to ``run``'s result, if this controller called it."""
    ping: Any | None = None
    asked_at: float = 0.0
    answered: bool = False
    """Since this process knows it."""
    words: LastWords = field(default_factory=LastWords)


class RaySupervisors:
    """Supervisor actors on the Ray cluster that this process belongs to."""

    def __init__(self, actor_class: type) -> None:
        self._class = actor_class
        self._known: dict[str, _Known] = {}

    def start(self, resume: ResumeState) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # Beside the controller: of a node that trains, the loss would take the supervisor too,
        # and nobody would be left to answer it at once.
        # Not softly: that lets Ray choose another node when this one is busy.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = (
            ray.remote(self._class)
            .options(
                name=supervisor_actor(resume.job),
                namespace=NAMESPACE,
                # It must go on while the controller restarts.
                lifetime="detached",
                num_cpus=0,
                max_concurrency=8,
                scheduling_strategy=here,
            )
            .remote()
        )
        self._known[resume.job] = _Known(actor, actor.run.remote(resume))

    def look(self, job: str, now: float) -> Presence:
        import ray

        known = self._find(job)
        if known is None:
            return Presence.ABSENT
        if known.run is not None:
            ready, _ = ray.wait([known.run], timeout=0)
            if ready and (words := self._end_of(job, known.run)) is not None:
                known.words = words
                return Presence.DONE
            if ready:
                known.run = None
        if known.ping is None:
            known.ping, known.asked_at = known.actor.ping.remote(), now
        ready, _ = ray.wait([known.ping], timeout=0)
        if not ready:
            patience = SILENCE_S if known.answered else STARTING_S
            if now - known.asked_at <= patience:
                return Presence.WORKING
            known.words = LastWords(f"no answer for {patience:.0f} s")
            return Presence.DONE
        answer, known.ping, known.answered = known.ping, None, True
        try:
            going = ray.get(answer)
        except ray.exceptions.ActorUnavailableError:
            # A broken connection, which may be there again: asked anew, in the same patience.
            known.ping = known.actor.ping.remote()
            return Presence.WORKING
        except Exception as error:  # noqa: BLE001 — whatever it is, it didn't answer
            logger.warning("the supervisor of %s is lost: %s", job, _first_line(error))
            known.words = LastWords(_first_line(error))
            return Presence.DONE
        # Whose `run` we called may not have entered it yet when it answers.
        if going or known.run is not None:
            return Presence.WORKING
        # The call of `run` is lost with a controller that dies before the process is up.
        known.words = LastWords(begun=going is not None)
        return Presence.DONE

    def last_words(self, job: str) -> LastWords:
        known = self._known.get(job)
        return known.words if known else LastWords()

    def stop(self, job: str, reason: str) -> None:
        known = self._find(job)
        if known is not None:
            known.actor.stop.remote(reason)

    def control(self, job: str, controls: Sequence[Control]) -> None:
        known = self._find(job)
        if known is not None:
            known.actor.control.remote(list(controls))

    def spares(self, job: str, spares: Sequence[NodeSlot]) -> None:
        known = self._find(job)
        if known is not None:
            known.actor.spares.remote(list(spares))

    def kill(self, job: str) -> None:
        import ray

        known = self._find(job)
        self._known.pop(job, None)
        if known is not None:
            ray.kill(known.actor, no_restart=True)

    def _find(self, job: str) -> _Known | None:
        import ray

        if job not in self._known:
            try:
                actor = ray.get_actor(supervisor_actor(job), namespace=NAMESPACE)
            except ValueError:
                return None
            self._known[job] = _Known(actor, None)
        return self._known[job]

    def _end_of(self, job: str, run: Any) -> LastWords | None:
        """How its ``run`` ended; None where Ray lost sight of it, and of whether it has."""
        import ray

        try:
            ray.get(run)
        except ray.exceptions.ActorUnavailableError:
            return None
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, BaseException) else error
            logger.exception("the supervisor of %s raised", job)
            return LastWords(_first_line(cause), raised=True, outside=lies_outside(cause))
        except Exception as error:  # noqa: BLE001 — what it raised is all that we want
            logger.warning("the supervisor of %s ended: %s", job, _first_line(error))
            return LastWords(_first_line(error))
        return LastWords()


def lies_outside(error: BaseException) -> bool:
    """Whether an error may pass though nothing of the job is changed."""
    import ray

    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    if isinstance(error, OSError | MemoryError | ray.exceptions.RayError):
        return True
    # As CPython and Ray's GCS client say it.
    told = f"{type(error).__name__}: {error}"
    return "can't start new thread" in told or "RpcError" in told


def _first_line(error: BaseException) -> str:
    """For events, which have no secret of the environment in them."""
    line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {without(line, secrets_of(os.environ))}"
