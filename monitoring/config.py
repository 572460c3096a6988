"""Configuration of what is watched and where it is shown.

Promises: frozen values, unknown keys refused, every threshold has a unit and a default.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DetectionConfig(_Section):
    """Thresholds of the detectors; each detector takes what it needs by name."""

    window: int = Field(64, ge=8)
    """Healthy steps a baseline is made of."""
    min_history: int = Field(16, ge=4)
    """Healthy steps before a baseline is trusted."""
    loss_sigmas: float = Field(8.0, gt=0)
    """Robust deviations of the loss from its trend that make a spike."""
    loss_min_rise: float = Field(0.25, gt=0)
    """Rise of the loss over its trend, as a fraction of it, below which nothing is a spike."""
    grad_norm_sigmas: float = Field(8.0, gt=0)
    """Robust deviations of log(gradient norm)."""
    grad_norm_min_ratio: float = Field(4.0, gt=1)
    """Gradient norm over its median, below which nothing is a spike."""
    saturation_pct: float = Field(1.0, gt=0, le=100)
    """Percent of a tensor's values clamped to the FP8 maximum that makes it saturated."""
    saturation_patience: int = Field(1, ge=1)
    """Successive steps of saturation before it is an incident."""
    exchange_error: float | None = Field(None, gt=0)
    """Rounding error of the FP8 gradient exchange, its norm over the gradient's, that is too
    large. Unset: 0.04 for E4M3, 0.08 for E5M2, half more than evenly spread values lose; a
    format's most is 0.06 and 0.11."""
    exchange_error_steps: int = Field(8, ge=1)
    """Steps above it, among the last ``exchange_error_window``, that make an incident."""
    exchange_error_window: int = Field(16, ge=1)
    settle_steps: int = Field(8, ge=0)
    """Steps after a start, a rollback or a precision change in which spikes are not reported."""


class WandbConfig(_Section):
    """The Weights & Biases run."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: online when the user is logged in, else offline."""
    project: str = "octavo"
    entity: str | None = None
    tags: tuple[str, ...] = ()
