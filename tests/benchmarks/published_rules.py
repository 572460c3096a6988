"""The published rules of others for an unstable step, to be fed the same records as ours.

Each is written from its description, with the defaults of its own authors, and says what was
read. A rule sees one step at a time, as its owner's trainer does: the loss, the gradient's norm
before clipping, whether they are finite. Where it would raise, skip or clip beyond its steady
clipping, it answers True; what its owner does then is not modelled, so the records go on.
None of them sees FP8's statistics.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Protocol

from monitoring.records import StepRecord


class Rule(Protocol):
    """One system's answer to "is this step bad?"."""

    name: str

    def observe(self, record: StepRecord) -> bool:
        """Whether the rule strikes at this step."""


class LLMFoundry:
    """KillLossSpike: a loss of at least twice the mean of the last 100, five times in a row.

    Counts from a full window on; outliers enter the window. Also strikes where half of the
    window is above 10, from twice the window on. Source: mosaicml/llm-foundry
    ``llmfoundry/callbacks/kill_loss_spike_callback.py`` (``patience=4``, ``outlier_multiplier=2``,
    ``window_size=100``, ``loss_cap=10``); read at commit 03826b5.
    """

    name = "LLM-Foundry, 2 × mean, patience 4"

    def __init__(self) -> None:
        self._window: deque[float] = deque(maxlen=100)
        self._outliers = 0

    def observe(self, record: StepRecord) -> bool:
        struck = False
        if len(self._window) == 100:
            if record.loss >= 2 * statistics.fmean(self._window):
                self._outliers += 1
                struck = self._outliers > 4
            else:
                self._outliers = 0
            high = sum(loss > 10 for loss in self._window) >= 50
            struck = struck or (record.step >= 200 and high)
        self._window.append(record.loss)
        return struck


class OLMoCore:
    """SkipStepOptimizer: loss or gradient norm more than 6 standard deviations from the mean of
    the last 128, either way.

    From 64 steps on; skipped steps stay in the window. A comparison with NaN is false there, so a
    NaN is skipped for as long as the window has it. Source: allenai/OLMo-core
    ``src/olmo_core/optim/skip_step_optimizer.py`` (``rolling_interval_length=128``,
    ``sigma_factor=6``); read at commit 067267c.
    """

    name = "OLMo-core, 6 σ over 128"

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=129)
        self._norms: deque[float] = deque(maxlen=129)

    def observe(self, record: StepRecord) -> bool:
        self._losses.append(record.loss)
        self._norms.append(record.grad_norm)
        if len(self._losses) < 64:
            return False
        return not (self._within(self._losses) and self._within(self._norms))

    @staticmethod
    def _within(values: deque[float]) -> bool:
        *past, newest = values
        if not all(map(math.isfinite, values)):
            return False
        spread = statistics.stdev(past)
        # Without any spread it divides by zero, and a comparison with NaN or infinity is false.
        return spread > 0 and abs(newest - statistics.fmean(past)) <= 6 * spread


class Megatron:
    """``--check-for-spiky-loss``: a loss of at least ten times the largest of the first 100; with
    the check for NaN in loss and gradients, which is on by default.

    Source: NVIDIA/Megatron-LM ``megatron/core/rerun_state_machine.py``
    (``is_unexpectedly_large``, ``num_samples=100``; read at commit 00caa53) and its
    ``pretrain_gpt.py`` (``SPIKY_LOSS_FACTOR = 10``); the spike check itself is off by default.
    """

    name = "Megatron-LM, 10 × largest of first 100"

    def __init__(self) -> None:
        self._largest = 0.0
        self._samples = 0

    def observe(self, record: StepRecord) -> bool:
        value = abs(record.loss)
        if not (math.isfinite(value) and math.isfinite(record.grad_norm)):
            return True
        if self._samples < 100:
            self._samples += 1
            self._largest = max(self._largest, value)
            return False
        return value >= 10 * self._largest


class Lightning:
    """SpikeDetection: a loss that rose, and lies at least twice the mean of the last 10 away from
    that mean (so at three times it).

    After one step; a spike stays out of the mean, and a loss that isn't finite is one. Source:
    Lightning-AI/pytorch-lightning ``src/lightning/fabric/utilities/spike.py`` (``window=10``,
    ``warmup=1``, ``rtol=2.0``, ``atol=None``, ``finite_only=True``); read at commit 0c94c0e.
    """

    name = "Lightning, 3 × mean of 10"

    def __init__(self) -> None:
        self._window: deque[float] = deque(maxlen=10)
        self._last = 0.0
        self._seen = 0

    def observe(self, record: StepRecord) -> bool:
        loss, self._seen = record.loss, self._seen + 1
        if self._seen > 1 and self._window:
            mean = statistics.fmean(self._window)
            far = abs(loss - mean) >= abs(2.0 * mean)
            if not math.isfinite(loss) or (loss - self._last > 0 and far):
                return True
        if math.isfinite(loss):
            self._window.append(loss)
            self._last = loss
        return False


class ZClip:
    """A gradient norm more than 2.5 standard deviations above its moving average.

    The first 25 norms give mean and variance, then both move with α = 0.97; a norm that was
    clipped enters as what it was clipped to. NaN is no strike, and leaves an average that is NaN
    for good. It answers by clipping, which costs little, so its
    authors can bear many strikes. Source: bluorion-com/ZClip ``zclip/zclip.py`` (``z_thresh=2.5``,
    ``alpha=0.97``, ``warmup_steps=25``, ``mode="zscore"``, ``clip_option="adaptive_scaling"``;
    read at commit 1acb085) and arXiv 2504.02507.
    """

    name = "ZClip, z = 2.5"

    def __init__(self) -> None:
        self._first: list[float] = []
        self._mean = self._variance = math.nan
        self.taken = math.nan
        """What it would clip the newest norm to: the norm itself where it doesn't strike."""

    def observe(self, record: StepRecord) -> bool:
        self.taken = norm = record.grad_norm
        if len(self._first) < 25:
            self._first.append(norm)
            if len(self._first) == 25:
                self._mean = statistics.fmean(self._first)
                self._variance = statistics.pvariance(self._first)
            return False
        spread = math.sqrt(self._variance)
        z = (norm - self._mean) / (spread + 1e-6)
        struck = z > 2.5
        self.taken = taken = self._mean + 2.5 * spread / (z / 2.5) if struck else norm
        self._mean = 0.97 * self._mean + 0.03 * taken
        self._variance = 0.97 * self._variance + 0.03 * (taken - self._mean) ** 2
        return struck


PUBLISHED: tuple[type[Rule], ...] = (LLMFoundry, OLMoCore, Megatron, Lightning, ZClip)
