"""What a spec's ``drills`` may ask for, one class a kind.

Promises: frozen values, unknown keys refused; needs no torch. ``step`` is the step before whose
forward pass a drill begins. A drill begins once in a job's life; one that lasts (``steps``) ends
with the timeline or the attempt in which it began, so that what is replayed after a rollback is
undisturbed. A poisoned batch is another matter: it is a property of the data.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Drill(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class WeightSurge(_Drill):
    """Multiply the MLP weights of one layer, parameters and master weights alike."""

    kind: Literal["weight_surge"]
    step: int = Field(ge=1)
    layer: int = Field(ge=0)
    factor: float = Field(gt=0)


class AmaxOutlier(_Drill):
    """One huge value in one operand of one FP8 linear.

    In an input or an output gradient it stands in every micro-batch of that one step, on the
    first data-parallel replica; in a weight it stays, in the parameter and its master weight.
    """

    kind: Literal["amax_outlier"]
    step: int = Field(ge=1)
    tensor: str
    """``layers.3.mlp.down/input``, ``…/weight`` or ``…/grad_output``."""
    factor: float = Field(1000.0, gt=1)
    """The value over the tensor's largest magnitude."""


class PoisonedBatch(_Drill):
    """Batches of no use: their sequences are random tokens, or one token over and over.

    They are batches by index, the ones that steps ``step`` and after train on while nothing
    has been skipped: poisoned whenever they are seen, until the skip ledger has them.
    """

    kind: Literal["poisoned_batch"]
    step: int = Field(ge=1)
    """Index of the first one."""
    batches: int = Field(1, ge=1)
    tokens: Literal["random", "repeated"] = "random"
    token: int = Field(0, ge=0, le=255)
    """The one that ``repeated`` repeats."""

    def poisons(self, batch: int) -> bool:
        """Whether ``batch`` is one of them."""
        return self.step <= batch < self.step + self.batches


class LabelNoise(_Drill):
    """Replace a share of the targets by random tokens."""

    kind: Literal["label_noise"]
    step: int = Field(ge=1)
    steps: int = Field(1, ge=1)
    """Steps it lasts."""
    share: float = Field(0.5, gt=0, le=1)


class LRShock(_Drill):
    """Multiply the learning rate."""

    kind: Literal["lr_shock"]
    step: int = Field(ge=1)
    steps: int = Field(1, ge=1)
    """Steps it lasts."""
    factor: float = Field(gt=0)


class NonFiniteGradient(_Drill):
    """Put a NaN or an Inf into one gradient of one rank."""

    kind: Literal["nonfinite_gradient"]
    step: int = Field(ge=1)
    rank: int = Field(0, ge=0)
    value: Literal["nan", "inf"] = "nan"


class BitFlip(_Drill):
    """Flip a bit of one parameter's first value, on one data-parallel replica only.

    DeepSpeed makes the parameters anew from the master weights in every update, so a flipped
    bit lives for one step. It is placed right before the parameters of that step are compared,
    so ``step`` must be a multiple of ``replica_check_every``. In a master weight it would reach
    all replicas alike, and be a drill of something else.
    """

    kind: Literal["bit_flip"]
    step: int = Field(ge=1)
    parameter: str
    """``layers.3.mlp.down.weight``; with tensor ranks, in the first one's part of it."""
    replica: int = Field(0, ge=0)
    bit: int = Field(6, ge=0, le=15)
    """Of BF16: 15 is the sign, 14 to 7 the exponent, 6 to 0 the mantissa."""


class FrozenScale(_Drill):
    """A delayed scale that no update reaches."""

    kind: Literal["frozen_scale"]
    step: int = Field(ge=1)
    steps: int = Field(16, ge=1)
    """Steps it lasts."""
    tensor: str
    """As of ``amax_outlier``."""
    factor: float = Field(1.0, gt=0)
    """What it stands still at, over what it is: above 1 as if the tensor had grown since, which
    shows at once; at 1 it shows once the tensor grows."""


class SwigluGrowth(_Drill):
    """Growth of one channel of an MLP's inner activation, which the loss doesn't see.

    The channel's row of ``up`` grows by ``factor`` a step while its column of ``down`` shrinks by
    it, in parameters and master weights: the model computes what it did, and the input of
    ``down`` needs ever more of FP8's range (SwiGLU's outliers, arXiv 2409.12517).
    """

    kind: Literal["swiglu_growth"]
    step: int = Field(ge=1)
    steps: int = Field(32, ge=1)
    """Steps it lasts."""
    layer: int = Field(ge=0)
    factor: float = Field(1.15, gt=1)
    """Growth a step."""


class KillRank(_Drill):
    """SIGKILL one rank in the middle of a step."""

    kind: Literal["kill_rank"]
    step: int = Field(ge=1)
    rank: int = Field(0, ge=0)


Drill = Annotated[
    WeightSurge
    | AmaxOutlier
    | PoisonedBatch
    | LabelNoise
    | LRShock
    | NonFiniteGradient
    | BitFlip
    | FrozenScale
    | SwigluGrowth
    | KillRank,
    Field(discriminator="kind"),
]


def duration(drill: Drill) -> int:
    """Steps that it lasts, or batches; 1 for what happens at once."""
    if isinstance(drill, PoisonedBatch):
        return drill.batches
    if isinstance(drill, LabelNoise | LRShock | FrozenScale | SwigluGrowth):
        return drill.steps
    return 1
