"""The layers around the native linears: RMSNorm, norm + linear, norm + SwiGLU MLP.

They are what Transformer Engine fuses into ``LayerNormLinear`` and ``LayerNormMLP``: the norm
computes in high precision and its output is what the linear quantizes. Whoever initializes
weights finds them at ``weight`` of a linear and of a norm + linear, and at ``gate_up.weight``
and ``down.weight`` of an MLP, whatever backend made the module; norm weights start at one.

Smooth SwiGLU (arXiv 2409.12517, section 4.4) scales each channel i of the MLP's inner
activation before it is quantized and undoes that after::

    s_i^-1 · Q(s_i · silu(gate_i) · up_i)      s_i = 2^-floor(log2(amax_i)), 1 where amax_i is 0

so that one channel that outgrows the others doesn't take the format's range from them. Here
s_i follows from the micro-batch alone (the largest magnitude of the channel over its tokens)
and is a power of two, so scaling and undoing are exact: in BF16 the option changes no bit
while no value leaves BF16's normal range. The undoing is folded into the columns of the
quantized down weight, which is exact too: the forward product takes ``wq_OI · s_I^-1``, the
gradient of the weight is multiplied by s_I^-1 after its product, and the gradient of the scaled
activation likewise. So weights are still quantized once a step. The amax that statistics show
for ``down/input`` is then that of the scaled activation, between 1 and 2.

Promises: nothing here waits for the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

logger = logging.getLogger(__name__)


class RMSNorm(nn.Module):
    """Scales each vector to root mean square 1, then by a learned weight; FP32 inside."""

    def __init__(
        self,
        size: int,
        eps: float,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.rms_norm(x_BTD, self.weight.shape, self.weight, self.eps)


class NormLinear(nn.Module):
    """A linear of the normed input; [..., in_features] → [..., out_features]."""

    def __init__(self, norm: RMSNorm, linear: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.linear = linear

    @property
    def weight(self) -> Tensor:
        """The linear's weight, of this rank's shard."""
        weight: Tensor = self.linear.weight  # type: ignore[assignment]
        return weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(self.norm(x))
        return result


class NormMLP(nn.Module):
    """SwiGLU of the normed input: down(silu(gate(x)) · up(x)), gate and up in one matrix.

    A shard of ``gate_up`` has its part of gate above its part of up.
    """

    def __init__(
        self, norm: RMSNorm, gate_up: nn.Module, down: nn.Module, *, smooth: bool = False
    ) -> None:
        super().__init__()
        self.norm = norm
        self.gate_up = gate_up
        self.down = down
        self.smooth = smooth

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, dim=-1)
        inner = F.silu(gate) * up
        result: Tensor
        if self.smooth:
            scale, undo = channel_scales(inner.detach())
            result = self.down(inner * scale, undo)
        else:
            result = self.down(inner)
        return result


def channel_scales(x: Tensor) -> tuple[Tensor, Tensor]:
    """Smooth SwiGLU's scales of ``x`` [..., channels] and their inverses, each [channels].

    Powers of two in the dtype of ``x``: a channel's largest magnitude times its scale lies in
    [1, 2). 1 for a channel of zeros, and for one with an Inf or NaN, which goes on as it is.
    """
    flat = x.reshape(-1, x.shape[-1])
    if flat.shape[0] == 0:
        one = torch.ones_like(flat.new_empty(flat.shape[1]))
        return one, one
    amax = flat.abs().amax(0).float()
    # The exponent alone, of FP32's bits: 2^floor(log2(amax)). Kept where its inverse is normal.
    undo = (amax.view(torch.int32) & 0x7F800000).view(torch.float32)
    usable = torch.isfinite(amax) & (amax >= 2.0**-125)
    undo = torch.where(usable, undo, 1.0)
    return undo.reciprocal().to(x.dtype), undo.to(x.dtype)


FORWARDS_UNTIL_REMINDED = 512
"""More than a step's micro-batches; of one linear."""


@dataclass(slots=True)
class Observation:
    """Whether the linears of a scope keep what they see; shared by all of them."""

    active: bool = True
    awaits_steps: bool = False
    """Whether scales come of finished steps alone, and none has been finished yet."""
    _reminding: str = ""
    _forwards: int = 0

    def note_forward(self, name: str) -> None:
        """A forward of the linear ``name`` in training; a warning where no step ever ends."""
        if not self.awaits_steps:
            return
        # Of one linear, so that the number doesn't depend on how many there are.
        self._reminding = self._reminding or name
        self._forwards += name == self._reminding
        if self._forwards == FORWARDS_UNTIL_REMINDED:
            self.awaits_steps = False
            logger.warning(
                "%d forwards of %s in training and no finish_step: under delayed scaling it makes "
                "the scales, and without it all scales stay 1",
                self._forwards,
                name,
            )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing inside is observed."""
        before, self.active = self.active, False
        try:
            yield
        finally:
            self.active = before


def recomputed(observation: Observation, function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` whose activations are dropped and computed again in the backward.

    The second pass finds the scales of the first (they change between steps only) and the
    weights quantized then, so it makes the same numbers; it is not observed, so amax and
    counters are those of one pass. Gradients are observed in the backward, once, as ever.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), observation.paused()

    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, context_fn=contexts
    )
