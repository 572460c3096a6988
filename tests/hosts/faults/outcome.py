"""What a row of the matrix showed: judged from what was recorded. Pure.

Promises: what can't be shown counts against the product: a step without a record, a loss that
differs in the last bit, an end that isn't success, a deadline that passed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.hosts.faults.scene import Step

SHOWN = 15
"""Steps after the fault that are told one by one."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of one row."""

    row: str
    ok: bool
    outage_s: float
    """Seconds to the next step that had not been done before (``outage_s``)."""
    steps_lost: int
    """Steps done again."""
    attempts: int
    compared: int
    """Steps whose losses were compared with the undisturbed run's."""
    differing: int
    """Of them, those that are not equal to the bit."""
    trouble: str = ""
    """Why it isn't ok."""
    notes: tuple[str, ...] = ()
    """What the job said it saw and did."""
    progress: tuple[tuple[int, float], ...] = ()
    """The first steps after the fault, with the seconds since it."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def outage_s(steps: Sequence[Step], fault_at: float) -> float:
    """Seconds from the fault to the next step that had not been done before.

    Where the ranks were restarted for it, to the first such step of theirs: what the old ones
    still did is no recovery. Where they were not, the longest time without one, until the end of
    what is recorded.
    """
    before = max((step.attempt for step in steps if step.time <= fault_at), default=0)
    restarted = any(step.attempt > before for step in steps)
    newest, last, longest = -1, fault_at, 0.0
    for step in steps:
        if step.step <= newest:
            continue
        newest = step.step
        if step.time <= fault_at:
            continue
        if restarted and step.attempt > before:
            return step.time - fault_at
        longest = max(longest, step.time - last)
        last = step.time
    return longest


def kept_losses(steps: Sequence[Step]) -> dict[int, float]:
    """Loss by step, of what led to the end: the last record of each step."""
    return {step.step: step.loss for step in steps}


def judge(
    row: str,
    steps: Sequence[Step],
    state: str,
    fault_at: float,
    reference: Mapping[int, float],
    *,
    hang: str = "",
    problems: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Outcome:
    """The outcome of a run that was to reach every step of ``reference``."""
    kept = kept_losses(steps)
    common = kept.keys() & reference.keys()
    differing = [n for n in sorted(common) if kept[n].hex() != reference[n].hex()]
    missing = sorted(reference.keys() - kept.keys())
    trouble = [f"hang: {hang}"] if hang else []
    if not hang and state != "succeeded":
        trouble.append(f"the job {state}")
    if missing:
        trouble.append(f"{len(missing)} steps without a record, the first {missing[0]}")
    if differing:
        trouble.append(f"{len(differing)} losses differ, the first at step {differing[0]}")
    trouble += problems
    return Outcome(
        row=row,
        ok=not trouble,
        outage_s=round(outage_s(steps, fault_at), 2),
        steps_lost=len(steps) - len(kept),
        attempts=max((step.attempt for step in steps), default=0),
        compared=len(common),
        differing=len(differing),
        trouble="; ".join(trouble),
        notes=tuple(notes),
        progress=tuple(
            (step.step, round(step.time - fault_at, 3)) for step in steps if step.time > fault_at
        )[:SHOWN],
    )
