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
    furthest: float = 0.0
    """Largest difference of a loss, as a part of the undisturbed run's."""
    tolerance: float = 0.0
    """What ``furthest`` may be; 0: losses must be equal to the bit."""
    skipped: str = ""
    """Why it was not run at all."""
    trouble: str = ""
    """Why it isn't ok."""
    notes: tuple[str, ...] = ()
    """What the job said it saw and did."""
    progress: tuple[tuple[int, float], ...] = ()
    """The first steps after the fault, with the seconds since it."""

    @classmethod
    def not_run(cls, row: str, reason: str) -> Outcome:
        """It can't be run here."""
        return cls(row, True, 0.0, 0, 0, 0, 0, skipped=reason)

    @classmethod
    def failed(cls, row: str, trouble: str) -> Outcome:
        """It went wrong before there was anything to judge."""
        return cls(row, False, 0.0, 0, 0, 0, 0, trouble=" ".join(trouble.split()))

    def in_words(self) -> str:
        """For whoever looks on."""
        if self.skipped:
            return f"skipped, {self.skipped}"
        word = "ok" if self.ok else f"FAILED ({self.trouble})"
        return (
            f"{word}; {self.outage_s:.2f} s to the next new step, {self.steps_lost} steps lost, "
            f"{self.attempts} attempts"
        )

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
    tolerance: float = 0.0,
) -> Outcome:
    """The outcome of a run that was to reach every step of ``reference``.

    ``tolerance``: how far a loss may be off, as a part of it; 0: not in the last bit.
    """
    kept = kept_losses(steps)
    common = kept.keys() & reference.keys()
    differing = [n for n in sorted(common) if kept[n].hex() != reference[n].hex()]
    furthest = max((abs(kept[n] / reference[n] - 1.0) for n in differing), default=0.0)
    missing = sorted(reference.keys() - kept.keys())
    trouble = [f"hang: {hang}"] if hang else []
    if not hang and state != "succeeded":
        trouble.append(f"the job {state}")
    if missing:
        trouble.append(f"{len(missing)} steps without a record, the first {missing[0]}")
    # Not <=: a loss that is no number is off, too.
    if differing and not furthest < tolerance:
        by = f", by {furthest:.2%} at most" if tolerance else ""
        trouble.append(f"{len(differing)} losses differ{by}, the first at step {differing[0]}")
    trouble += problems
    return Outcome(
        row=row,
        ok=not trouble,
        outage_s=round(outage_s(steps, fault_at), 2),
        steps_lost=len(steps) - len(kept),
        attempts=max((step.attempt for step in steps), default=0),
        compared=len(common),
        differing=len(differing),
        furthest=furthest,
        tolerance=tolerance,
        trouble="; ".join(trouble),
        notes=tuple(notes),
        progress=tuple(
            (step.step, round(step.time - fault_at, 3)) for step in steps if step.time > fault_at
        )[:SHOWN],
    )
