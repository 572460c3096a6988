"""Words for numbers: one step and two steps, and where in a job something was. Pure."""

from __future__ import annotations


def counted(number: int, word: str) -> str:
    """``1 step``, ``2 steps``, ``12,000 steps``; of words whose plural has an s."""
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


def place(step: int) -> str:
    """``step 12``; ``before the first step`` for none."""
    return f"step {step}" if step >= 0 else "before the first step"


def at_step(step: int) -> str:
    """``at step 12``; ``before the first step`` for none."""
    return f"at step {step}" if step >= 0 else "before the first step"
