"""Configuration of what is watched and where it is shown.

Promises: frozen values, unknown keys refused, every threshold has a unit and a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


MOST: Mapping[str, tuple[int, str]] = {
    "window": (4096, "a baseline as long follows no loss, and all of it is kept"),
    "min_history": (4096, "nothing is judged before as many steps were seen"),
    "divergence_steps": (1024, "four times as many are kept, and looked at in every step"),
    "plateau_steps": (100_000, "nothing goes back as far"),
    "drift_steps": (100_000, "nothing goes back as far"),
    "overflow_horizon": (4096, "a trend of 16 steps says nothing of as many"),
    "frozen_scale_steps": (100_000, "no scale is wrong for as long without harm"),
    "exchange_error_steps": (4096, "each is kept"),
    "exchange_error_window": (4096, "each step above the limit is kept"),
    "slow_rank_steps": (100_000, "each is kept, of every rank"),
    "settle_steps": (1000, "no spike is reported meanwhile, after every start and rollback"),
}
"""The most that counts of steps may be, and why."""


class DetectionConfig(_Section):
    """Thresholds of the detectors; each detector takes what it needs by name.

    Where others publish a number for the same thing it is named: OLMo-core's SkipStepOptimizer
    (6 standard deviations over 128 steps), LLM-Foundry's KillLossSpike (twice the mean, 4 steps),
    ZClip (arXiv 2504.02507: 2.5 standard deviations, mean over about 33 steps, 25 steps of
    warm-up), FP8's SwiGLU outliers (arXiv 2409.12517). Theirs clip, skip or stop; ours may roll
    back, and must be surer.
    """

    window: int = Field(64, ge=8)
    """Healthy steps a baseline is made of. Between ZClip's 33 and OLMo's 128: long enough for a
    spread, short enough to follow a loss that falls."""
    min_history: int = Field(16, ge=4)
    """Healthy steps before a baseline is trusted. ZClip waits for 25; a median bears fewer."""
    loss_sigmas: float = Field(8.0, gt=0)
    """Robust deviations of the loss from its trend that make a spike. OLMo skips at 6 plain ones;
    8 robust ones leave room for batches whose losses have heavy tails."""
    loss_min_rise: float = Field(0.3, gt=0)
    """Rise of the loss over its trend, as a fraction of it, below which nothing is a spike. A new
    domain of the data costs less; LLM-Foundry waits for 1.0."""
    loss_min_rise_nats: float = Field(0.1, gt=0)
    """Rise of the loss in nats a token below which nothing is one, a divergence or a plateau
    neither: of a loss near 0, as in fine-tuning, every batch is a multiple of the one before."""
    loss_first_ratio: float = Field(2.0, gt=1)
    """Loss over the first ones, from which it is too high before there is a baseline. A healthy
    one doesn't rise to twice its first value within ``min_history`` steps."""
    loss_guessing_ratio: float = Field(1.5, gt=1)
    """Loss over what guessing costs (the logarithm of the vocabulary), from which it is too high at
    any time. Fresh models begin at up to 1.3 times it."""
    loss_patience: int = Field(2, ge=1)
    """Successive steps of it before it is an incident; one of half more is at once. Of a batch that
    is harder nothing is left in the next step; LLM-Foundry waits for 4."""
    divergence_rise: float = Field(0.1, gt=0)
    """Rise of the loss's fast average over its slow one, as a fraction, that is a slow divergence
    when it grows in every part of it. A harder domain jumps instead, and falls again."""
    divergence_steps: int = Field(16, ge=4)
    """Steps of the fast average; the slow one has four times as many. The mean of 16 steps has a
    quarter of a step's noise, and 64 steps of rising are no run of bad batches."""
    plateau_rise: float = Field(0.3, gt=0)
    """Rise of the fast average over the best it was, as a fraction, that is a plateau above the
    best. ``loss_min_rise`` and the noise of the best: less can be other data."""
    plateau_steps: int = Field(48, ge=8)
    """Steps in a row above the best that make it. Spikes that heal by themselves do so in fewer:
    LLM-Foundry allows them 5 % of its window of 100 or more."""
    drift_rise: float = Field(0.6, gt=0)
    """Rise of the fast average over the lowest that the loss ever was, as a fraction, that is a
    drift however long it took. Data in an order of rising difficulty costs 20 to 35 %."""
    drift_steps: int = Field(256, ge=8)
    """Steps in a row above it that make it: what is as high for less is a plateau or heals."""
    grad_norm_sigmas: float = Field(8.0, gt=0)
    """Robust deviations of log(gradient norm). ZClip clips at 2.5, which costs it nothing."""
    grad_norm_min_ratio: float = Field(4.0, gt=1)
    """Gradient norm over its median, below which nothing is a spike: clipping deals with it."""
    grad_norm_patience: int = Field(2, ge=1)
    """Successive steps of it before it is an incident; one of 5.5 times the ratio is at once, one
    of 2.5 times if its loss leaps too, and any if the next loss does. In the demo with a small
    batch single norms are 7 times their trend, elsewhere 12 times once in 300 steps, and clipping
    heals them."""
    saturation_pct: float = Field(1.0, gt=0, le=100)
    """Percent of a tensor's values clamped to the FP8 maximum that makes it saturated. Healthy
    delayed scaling clamps 0.1 % at most, in the first steps."""
    saturation_patience: int = Field(2, ge=1)
    """Successive steps of it before it is an incident; one of four times the share is at once. In
    20,000 healthy steps single ones of 1.0 and 1.1 % came twice."""
    amax_sigmas: float = Field(8.0, gt=0)
    """Robust deviations of log2(amax) above a tensor's own history that make a surge, as for the
    loss."""
    amax_surge_octaves: float = Field(3.0, gt=0)
    """Octaves (doublings) above its own history below which no tensor has surged. Healthy inputs
    and weights differ by half an octave from step to step; SwiGLU outliers come as many."""
    amax_patience: int = Field(2, ge=1)
    """Successive steps of a surge before it is an incident; one of twice the octaves is at once.
    A single batch with an outlier leaves no trace in the weights."""
    overflow_octaves: float = Field(6.0, gt=0)
    """Octaves a tensor can grow beyond its own history before a scale of its own fails it. E4M3
    has 15 octaves of normal values; most of a tensor lies 5 to 9 below its amax, so that 6 more
    push it into subnormals and zero (in the demo, underflow begins at 5 and has 20 % at 8)."""
    overflow_horizon: int = Field(16, ge=1)
    """Projected steps to there, below which steady growth is an incident. Time to move the layers
    to BF16 before anything is lost; growth that ends by itself in the demo never comes below
    30."""
    overflow_rise: float = Field(2.0, gt=0)
    """Octaves that a tensor must have grown steadily before its trend is extended. Four times what
    healthy inputs differ by from step to step."""
    underflow_pct: float = Field(20.0, gt=0, le=100)
    """Percent of a tensor's non-zero values flushed to zero, above what its own history has, that
    is too much. Healthy ones lose under 1 %; every fifth value is a different tensor."""
    underflow_patience: int = Field(8, ge=1)
    """Successive steps of it. A delayed scale may lag an outlier by a step; 8 are no lag."""
    frozen_scale_steps: int = Field(3, ge=1)
    """Amaxs above what a delayed scale allows for that it didn't follow, before it counts as
    frozen. A scale that works follows each in the next step; 3 bear a report that got lost."""
    exchange_error: float | None = Field(None, gt=0)
    """Rounding error of the FP8 gradient exchange, its norm over the gradient's, that is too
    large. Unset: 0.04 for E4M3, 0.08 for E5M2, half more than evenly spread values lose; a
    format's most is 0.06 and 0.11."""
    exchange_error_steps: int = Field(8, ge=1)
    """Steps above it, among the last ``exchange_error_window``, that make an incident."""
    exchange_error_window: int = Field(16, ge=1)
    slow_rank: float = Field(1.5, gt=1)
    """Time that a rank spends outside of communication over its peers', beyond which it is slow.
    Sound devices of a kind differ by a few percent; a throttled one, or one that is shared,
    takes half as long again and more."""
    slow_rank_steps: int = Field(50, ge=5)
    """Steps that are looked at, in four fifths of which it must have been slow."""
    settle_steps: int = Field(8, ge=0)
    """Steps after a start, a rollback, a precision change or a jump of the learning rate in which
    spikes are not reported. Transformer Engine's users see the loss move for a few steps after
    a switch (TransformerEngine#564)."""
    lr_jump: float = Field(2.0, gt=1)
    """Ratio of successive learning rates, either way, beyond which they jump. The second step of a
    warm-up has twice the first one's; else schedules move by a few percent, but for the start
    of another cycle."""

    @field_validator(*MOST)
    @classmethod
    def _bounded(cls, value: int, info: ValidationInfo) -> int:
        most, why = MOST[info.field_name or ""]
        if value > most:
            raise ValueError(f"is more than {most}: {why}; make it at most {most}")
        return value


class WandbConfig(_Section):
    """The Weights & Biases run."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: online when the user is logged in, else offline."""
    project: str = "octavo"
    entity: str | None = None
    tags: tuple[str, ...] = ()
