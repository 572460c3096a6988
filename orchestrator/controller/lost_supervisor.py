"""What the loss of a supervisor means, as an incident with its answer. Pure.

Promises: it is answered by the same ladder as a lost rank, so it counts against the same
budget, and is told and stored in the same form.
"""

from __future__ import annotations

from collections.abc import Sequence

from monitoring.records import Incident
from orchestrator.actions import Action, History
from orchestrator.controller.supervisors import LastWords
from orchestrator.recovery.policy import decide
from orchestrator.recovery.restart_budget import OUTSIDE, is_restart
from orchestrator.store.rows import JobRow


def supervisor_lost(
    row: JobRow, actions: Sequence[Action], now: float, words: LastWords
) -> Action | None:
    """The answer to the loss of ``row``'s supervisor; the incident is in it.

    ``actions``: all of the job's, oldest first; ``words``: how it ended. None: the supervisor
    had stored a restart of this attempt, so its loss changes nothing.
    """
    if actions and actions[-1].attempt == row.attempt and is_restart(actions[-1]):
        return None
    step = max(row.step, 0)
    # What it raises twice without a step between it would raise for ever.
    evidence = {"raised": 1.0} if words.raised else {}
    if words.outside:
        evidence[OUTSIDE] = 1.0
    incident = Incident(
        kind="supervisor_lost",
        detector="controller",
        attempt=row.attempt,
        timeline=row.timeline,
        step=step,
        onset_step=step,
        time=now,
        message=_told(row.attempt, words),
        evidence=evidence,
    )
    history = blind_history(row.attempt, row.timeline, row.step, now, actions)
    return decide([incident], history, row.spec.recovery)


def blind_history(
    attempt: int, timeline: int, step: int, now: float, actions: Sequence[Action]
) -> History:
    """What the controller knows of a job whose supervisor is gone: the stored actions."""
    return History(
        attempt=attempt,
        timeline=timeline,
        step=step,
        time=now,
        actions=tuple(actions),
        # What the ranks held in their own memory is gone with them.
        restorable=(),
        precision={},
        fp8_layers=(),
        lr_scale=1.0,
        ledger=(),
        batches={},
        last_incident_step=None,
    )


def _told(attempt: int, words: LastWords) -> str:
    lost = f"The supervisor of attempt {attempt} was lost, and its ranks with it"
    return f"{lost}: {words.told.rstrip('. ')}." if words.told else f"{lost}."
