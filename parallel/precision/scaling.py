"""From the largest magnitudes seen to scales, by Transformer Engine's rules.

Promises: the same scales as its kernels (2.20: ``delayed_scaling.cu``,
``recipe_common.cuh``) to the bit, on any device, without a host synchronization.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

FLOAT32_MAX = torch.finfo(torch.float32).max


def tensor_to_amax(x: Tensor) -> Tensor:
    """Largest magnitude of ``x`` as a float32 scalar tensor; NaN if any element is NaN."""
    return x.abs().amax().float()


def amax_to_scale(
    amax: Tensor,
    fp8_max: float,
    *,
    epsilon: float = 0.0,
    power_of_two: bool = False,
    largest: float = torch.finfo(torch.bfloat16).max,
) -> Tensor:
    """Scale of current scaling: ``fp8_max / amax``, elementwise, float32.

    amax below ``epsilon`` counts as ``epsilon``; amax 0, Inf or NaN gives 1; a quotient
    that overflows gives ``largest``, the maximum of the unquantized dtype. With
    ``power_of_two`` the mantissa is cut off, which rounds the scale down.
    """
    amax = torch.where(amax < epsilon, epsilon, amax)
    # Two tensors: a number divided by a tensor is its reciprocal times the number in
    # PyTorch, which rounds twice.
    scale = torch.full_like(amax, fp8_max) / amax
    scale = torch.where(torch.isinf(scale), largest, scale)
    # After the overflow check, so that amax = 0 (an infinite quotient) still gives 1.
    scale = torch.where(torch.isfinite(amax) & (amax > 0), scale, 1.0)
    if power_of_two:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


def update_delayed_(
    history: Tensor,
    scale: Tensor,
    fp8_max: Tensor,
    *,
    margin: int = 0,
    algorithm: Literal["max", "most_recent"] = "max",
) -> None:
    """One update of delayed scaling, in place, for all tensors at once.

    ``history`` is float32 [H, tensors]; row 0 holds the amax seen since the last update,
    already reduced over ranks. ``scale`` and ``fp8_max`` are float32 [tensors].

    A tensor whose row 0 is 0 didn't run: nothing of it changes. Otherwise the amax is the
    maximum of its rows, NaN left out (``max``), or row 0 (``most_recent``); the scale
    becomes ``fp8_max · 2^-margin / amax`` where that amax is finite and above 0, and
    FP32's maximum where the quotient overflows; then the rows shift down by one and row 0
    goes to the end. A value so counts for H updates, and with H = 1 for this one alone.
    """
    newest = history[0]
    ran = newest != 0
    amax = newest if algorithm == "most_recent" else history.nan_to_num(0.0, posinf=torch.inf)
    if algorithm == "max":
        amax = amax.amax(0)
    updated = (fp8_max * 2.0**-margin) / amax
    updated = torch.where(torch.isinf(updated), FLOAT32_MAX, updated)
    usable = ran & torch.isfinite(amax) & (amax > 0)
    scale.copy_(torch.where(usable, updated, scale))
    shifted = history.roll(-1, 0)
    shifted[0] = 0
    history.copy_(torch.where(ran, shifted, history))
