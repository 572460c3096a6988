"""Configuration of the control plane's side of a job: resources and recovery.

Promises: frozen values, unknown keys refused.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ResourcesConfig(_Section):
    """What the job asks of the cluster."""

    priority: int = Field(0, ge=-100, le=100)
    """Jobs of higher priority are admitted first."""
    standby: bool = True
    """Keep one imported, idle worker a rank for restarts."""


class RecoveryConfig(_Section):
    """Budgets of the recovery ladder, and restarts."""

    max_restarts: int = Field(10, ge=0)
    """Restarts after a lost rank, in the job's life."""
    max_skips: int = Field(20, ge=0)
    """Non-finite steps whose update may be left out."""
    max_consecutive_skips: int = Field(3, ge=1)
    """Left-out updates in a row after which the state is suspected, not the batch."""
    max_rollbacks: int = Field(10, ge=0)
    """Rollbacks that only skip batches."""
    max_layer_fallbacks: int = Field(10, ge=0)
    """Rollbacks that move suspect layers to BF16."""
    max_exchange_fallbacks: int = Field(2, ge=0)
    """Times that the gradient exchange may fall back to BF16; after the last it stays there."""
    max_suspects: int = Field(4, ge=1)
    """Layers moved at most by one action."""
    lr_factor: float = Field(0.5, gt=0, lt=1)
    """Factor of the rung that lowers the learning rate."""
    max_lr_cuts: int = Field(3, ge=0)
    """Times that the learning rate may be lowered."""
    horizon: int = Field(200, ge=1)
    """Steps within which an incident counts as the same trouble recurring."""
    calm_steps: int = Field(100, ge=1)
    """Healthy steps after which layers, and the gradient exchange, return to FP8."""
    init_timeout_s: float = Field(300.0, gt=0)
    """Seconds an attempt may take from its start to its first step."""
    step_timeout_s: float | None = Field(None, gt=0)
    """Seconds a step may take; unset: 20 times the job's own median, at least 60."""
    on_exhausted: Literal["pause", "fail"] = "pause"
    """What to do when the budgets are spent."""
