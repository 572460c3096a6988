"""The learning rate of a step, as a pure function of the spec and the recovery's factor."""

from __future__ import annotations

import math

from launch.config import TrainingConfig


def lr_at(step: int, training: TrainingConfig, lr_scale: float = 1.0) -> float:
    """Learning rate of step ``step`` (from 0): linear warm-up, then the schedule's descent.

    The first of ``warmup_steps`` has ``lr / warmup_steps``, the one after the last has
    ``lr``; the descent ends at ``lr * min_lr_ratio`` with the last step.
    """
    peak = training.lr * lr_scale
    if step < training.warmup_steps:
        return peak * (step + 1) / training.warmup_steps
    if training.schedule == "constant":
        return peak
    length = max(1, training.steps - 1 - training.warmup_steps)
    done = min(1.0, (step - training.warmup_steps) / length)
    left = 1.0 - done if training.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return peak * (training.min_lr_ratio + (1.0 - training.min_lr_ratio) * left)
