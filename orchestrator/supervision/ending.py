"""How a job ends once its ranks have, and what is told where its state isn't on disk. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from launch.rank_group import RankEnd
from orchestrator.lifecycle import Cause, JobState
from orchestrator.recovery.controls import Control
from orchestrator.saved.checkpoint_shelf import CheckpointShelf
from orchestrator.supervision.stop_time import StopTime

_NO_CHECKPOINT = ("no checkpoint", "copies of step")
"""How ranks begin to say that they have none: ``launch.training``."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How the job is to end once its ranks have."""

    state: JobState
    cause: Cause
    message: str
    began: float
    """When the ranks were told to stop."""
    time: StopTime
    """What they are given for it."""
    control: Control | None = None
    """What asked for it: a pause, or room for another job."""


def end_of(control: Control) -> tuple[JobState, Cause]:
    """How a job is to end that is asked to stop."""
    if control.kind == "preempt":
        return JobState.QUEUED, Cause.PREEMPTED
    return JobState.PAUSED, Cause.PAUSE_ASKED


def unsaved(
    ended: Sequence[RankEnd], shelf: CheckpointShelf, steps: int, job: str, on_disk: Collection[int]
) -> str:
    """Why the state after the last of ``steps`` is not on disk, and where to go on from; empty
    when it is. ``on_disk``: steps of the checkpoints that a resumed job would start from."""
    if steps in on_disk:
        return ""
    reasons = _details(ended)
    if shelf.failed is not None and shelf.failed[0] == steps:
        reasons.append(shelf.failed[1])
    reasons.append(f"there is no checkpoint of step {steps}")
    newest = max(on_disk, default=None)
    way = "from the start" if newest is None else f"from the checkpoint of step {newest}"
    return (
        f"But the last state is not on disk: {reasons[0].rstrip('.')}. Make room or mend the "
        f"path; `octavo resume {job}` then goes on {way}."
    )


def why_no_checkpoint(ended: Sequence[RankEnd], shelf: CheckpointShelf) -> str:
    """Why a stop left none."""
    failed = [shelf.awaits_storage] if shelf.awaits_storage else []
    failed += [shelf.failed[1]] if shelf.failed else []
    failed += [shelf.unseen] if shelf.unseen else []
    told = [detail for detail in _details(ended) if detail.startswith(_NO_CHECKPOINT)]
    return (failed + told + ["no checkpoint"])[0]


def _details(ended: Sequence[RankEnd]) -> list[str]:
    return [end.result.detail for end in ended if end.result and end.result.detail]
