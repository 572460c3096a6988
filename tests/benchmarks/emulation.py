"""FP8 linears written a second time, as plainly as can be: what the recipes are measured against.

An operand is divided by its own amax, rounded to the format by PyTorch's cast, and multiplied
back; the products are BF16's. It shares no line with ``parallel.precision``: where a run with
it loses as much against BF16 as one with the recipe ``current``, the loss is the format's. With
an operand left out it tells what rounding the others costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.precision.linear import BF16Linear

TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@dataclass(frozen=True, slots=True)
class Formats:
    """Of a linear's operands: ``e4m3``, ``e5m2``, or None for an operand left in BF16."""

    input: str | None = "e4m3"
    weight: str | None = "e4m3"
    grad_output: str | None = "e5m2"


def rounded(x: Tensor, format: str | None) -> Tensor:
    """``x`` after a round trip through ``format`` under its own per-tensor scale, in BF16."""
    if format is None:
        return x
    largest = torch.finfo(TYPES[format]).max
    scale = largest / x.float().abs().amax().clamp(min=1e-30)
    values = (x.float() * scale).clamp(-largest, largest).to(TYPES[format])
    return (values.float() / scale).to(torch.bfloat16)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, formats: Formats) -> Tensor:
        x, w = rounded(input, formats.input), rounded(weight, formats.weight)
        ctx.save_for_backward(x, w)
        ctx.formats = formats
        return F.linear(x, w)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        g = rounded(grad_output, ctx.formats.grad_output)
        return g @ w, g.flatten(0, -2).t() @ x.flatten(0, -2), None


def take_over(module: nn.Module, formats: Formats) -> None:
    """From here on every linear of ``module`` that stays in BF16 is emulated in ``formats``."""
    for linear in module.modules():
        if isinstance(linear, BF16Linear):
            linear.forward = partial(_emulated, linear, formats)  # type: ignore[method-assign]


def _emulated(
    linear: BF16Linear, formats: Formats, input: Tensor, undo: Tensor | None = None
) -> Tensor:
    if linear.shard is not None or undo is not None:
        raise NotImplementedError("the emulation knows neither shards nor Smooth SwiGLU")
    output: Tensor = _Product.apply(input, linear.weight.to(input.dtype), formats)
    return output
