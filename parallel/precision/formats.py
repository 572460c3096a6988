"""The two eight-bit formats, the saturating cast into them and the exact way back.

Which way "scale" multiplies is said once, here, and holds in the whole package::

    x_fp8 = saturating_cast(x * scale)      scale     = fp8_max / amax  (a multiplier)
    x    ≈ x_fp8 * scale_inv                scale_inv = 1 / scale

Transformer Engine calls them ``scale`` and ``scale_inv``; torchao's ``scale`` is the same
multiplier, and its ``inverse_scale`` our ``scale_inv``.

A linear is three products of two operands each, and three roles name the operands::

    output      = input       @ weight.T        forward
    grad_input  = grad_output @ weight          dgrad
    grad_weight = grad_output.T @ input         wgrad
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Float8Format:
    """An eight-bit floating-point format."""

    name: str
    dtype: torch.dtype
    max: float
    overflow: float
    """The least FP32 magnitude that, without saturation, would round beyond max: from it on a
    value is saturated, not just rounded. Half a last place beyond max is a tie, which goes to the
    even code: E4M3's 464 back to 448, E5M2's 61440 on to infinity."""
    min_subnormal: float
    code: int
    """Its number in the C casts."""


E4M3 = Float8Format("E4M3", torch.float8_e4m3fn, 448.0, 464.0 + 2.0**-15, 2.0**-9, 0)
"""Four exponent bits, no infinity: inputs and weights."""
E5M2 = Float8Format("E5M2", torch.float8_e5m2, 57344.0, 61440.0, 2.0**-16, 1)
"""Five exponent bits: output gradients under HYBRID."""

FORMATS = {"E4M3": E4M3, "E5M2": E5M2}


def saturating_cast(x: Tensor, format: Float8Format) -> Tensor:
    """Round FP32 values to the nearest of ``format``, ties to even.

    Values beyond ±max, infinities included, become ±max; NaN stays NaN. Count non-finite
    values before: afterwards an infinity can't be told from a large number. The clamp is
    explicit because what the cast itself does above max differs by format and release.
    """
    return x.clamp(-format.max, format.max).to(format.dtype)


def upcast(payload: Tensor, format: Float8Format) -> Tensor:
    """BF16 values of FP8 ``payload``, exactly: BF16 holds every value of both formats."""
    assert payload.dtype == format.dtype
    return payload.to(torch.bfloat16)
