"""From the largest magnitudes seen to scales, by Transformer Engine's rules.

Promises: the same scales as its kernels (2.20: ``delayed_scaling.cu``,
``recipe_common.cuh``) to the bit, on any device, without a host synchronization.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

FLOAT32_MAX = torch.finfo(torch.float32).max


def averaged_amax(history: Tensor, factor: float) -> Tensor:
    """``ema``, Octavo's own: the amax of ``history`` [H, tensors], as above, float32 [tensors].

    The average of the updates that a history holds (rows of 0 or NaN are none), in which an
    update weighs ``factor`` times what the next newer one does, or the newest amax where that
    is larger: it rises at once, so that growth saturates nothing, and sinks slowly. Summed in
    FP64 and rounded once. An Inf makes it Inf.
    """
    length = history.shape[0]
    # Row 0 is the newest update, row H-1 the one before it, row 1 the oldest.
    age = torch.arange(length, 0, -1, device=history.device, dtype=torch.float64) % length
    weights = (factor**age).unsqueeze(1) * (history > 0)
    total = torch.where(history > 0, weights * history, 0.0).sum(0)
    newest = history[0].nan_to_num(0.0, posinf=torch.inf)
    return torch.maximum((total / weights.sum(0)).nan_to_num(0.0, posinf=torch.inf).float(), newest)


def tensor_to_amax(x: Tensor) -> Tensor:
    """Largest magnitude of ``x`` as a float32 scalar tensor; NaN if any element is NaN."""
    return x.abs().amax().float()


def amax_over_shards(shards: Sequence[Tensor], group: dist.ProcessGroup | None) -> Tensor:
    """Largest magnitude of each matrix, float32 [matrices], over ``group``'s shards of it.

    A collective where there is a group. As integers: the order is the same for non-negative
    floats, and a NaN, which compares as the largest, reaches every rank.
    """
    amax = torch.stack([tensor_to_amax(shard) for shard in shards])
    if group is not None:
        dist.all_reduce(amax.view(torch.int32), dist.ReduceOp.MAX, group=group)
    return amax


def amax_to_scale(
    amax: Tensor,
    fp8_max: float | Tensor,
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
    if not isinstance(fp8_max, Tensor):
        # Two tensors: a number divided by a tensor is its reciprocal times the number in
        # PyTorch, which rounds twice.
        fp8_max = torch.full_like(amax, fp8_max)
    scale = fp8_max / amax
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
    algorithm: Literal["max", "most_recent", "ema"] = "max",
    ema_factor: float = 0.9,
) -> Tensor:
    """One update of delayed scaling, in place, for all tensors at once; bool [tensors], of which
    the scale was made from an amax.

    ``history`` is float32 [H, tensors]; row 0 holds the amax seen since the last update,
    already reduced over ranks. ``scale`` and ``fp8_max`` are float32 [tensors].

    A tensor whose row 0 is 0 didn't run: nothing of it changes. Otherwise the amax is the
    maximum of its rows, NaN left out (``max``), or row 0 (``most_recent``), or what
    ``averaged_amax`` makes of them (``ema``); the scale becomes ``fp8_max · 2^-margin / amax``
    where that amax is finite and above 0, and FP32's maximum where the quotient overflows; then
    the rows shift down by one and row 0 goes to the end. A value so counts for H updates, and
    with H = 1 for this one alone.
    """
    newest = history[0]
    ran = newest != 0
    if algorithm == "most_recent":
        amax = newest
    elif algorithm == "max":
        amax = history.nan_to_num(0.0, posinf=torch.inf).amax(0)
    else:
        amax = averaged_amax(history, ema_factor)
    updated = (fp8_max * 2.0**-margin) / amax
    updated = torch.where(torch.isinf(updated), FLOAT32_MAX, updated)
    usable = ran & torch.isfinite(amax) & (amax > 0)
    scale.copy_(torch.where(usable, updated, scale))
    shifted = history.roll(-1, 0)
    shifted[0] = 0
    history.copy_(torch.where(ran, shifted, history))
    return usable


def scale_with_room(
    scale: Tensor, amax: Tensor, fp8_max: Tensor, *, margin: int, warmed: Tensor
) -> Tensor:
    """Scales under which values up to ``amax`` don't saturate; all float32 [tensors].

    ``scale`` where it leaves room already and was made from something seen (``warmed``, bool);
    also where ``amax`` is 0 or not finite.
    """
    fresh = ((fp8_max * 2.0**-margin) / amax).clamp(max=FLOAT32_MAX)
    # A scale that nothing was seen for says nothing.
    fresh = torch.where(warmed, torch.minimum(scale, fresh), fresh)
    return torch.where(torch.isfinite(amax) & (amax > 0), fresh, scale)


SMALLEST_SCALE_INV = 2.0**-127
"""What the E8M0 exponent 0 stands for; FP32 holds it as a subnormal."""


def amax_to_exponent(amax: Tensor, fp8_max: float | Tensor) -> Tensor:
    """MXFP8's shared exponent, elementwise: E8M0 of ``amax / fp8_max`` rounded up, uint8.

    Rounded up, so that nothing saturates; 0 gives 0, Inf 254, NaN 255. As Transformer Engine's
    kernels it multiplies by the reciprocal of ``fp8_max``, which for every BF16 amax gives
    the exponent that the division would.
    """
    quotient = (amax * (torch.ones((), dtype=torch.float32, device=amax.device) / fp8_max)).view(
        torch.int32
    )
    exponent, mantissa = quotient >> 23, quotient & 0x7FFFFF
    # Below FP32's normal numbers 2^-127 is the least power; up to it everything rounds to 0.
    up = torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    exponent = exponent + up
    exponent = torch.where(torch.isinf(amax), 254, exponent)
    return torch.where(torch.isnan(amax), 255, exponent).to(torch.uint8)


def exponent_to_scale(exponent: Tensor) -> Tensor:
    """The multiplier that belongs to MXFP8's shared exponents, float32.

    2^(127 - e), but 1 for 0 (whose block rounds to zeros either way), 0 for 254 (so an Inf
    becomes NaN), and NaN for 255: as Transformer Engine's ``exp2f_rcp``.
    """
    scale = ((254 - exponent.int()) << 23).view(torch.float32)
    scale = torch.where(exponent == 0, 1.0, scale)
    return torch.where(exponent == 255, torch.nan, scale)


def exponent_to_scale_inv(exponent: Tensor) -> Tensor:
    """2^(e - 127) of E8M0 exponents, float32; NaN for 255."""
    scale_inv = (exponent.int() << 23).view(torch.float32)
    scale_inv = torch.where(exponent == 0, SMALLEST_SCALE_INV, scale_inv)
    return torch.where(exponent == 255, torch.nan, scale_inv)


def scale_inv_to_exponent(scale_inv: Tensor) -> Tensor:
    """E8M0 exponents of powers of two, uint8: the way back of ``exponent_to_scale_inv``."""
    return (scale_inv.view(torch.int32) >> 23).to(torch.uint8)
