"""One operand of a linear: quantize it, keep what was seen of it.

A ``TensorSlot`` is one row of the scope's packed state: the amax since the last update, the
scale, and four counters. Its two ways, C on CPU and plain PyTorch anywhere, give the same
bits; the plain one is the reference. Neither synchronizes with the host.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.precision import kernels, scaling
from parallel.precision.formats import Float8Format, saturating_cast, upcast
from parallel.precision.recipes import Recipe

COUNTERS = ("saturated", "underflowed", "nonfinite", "count")
"""Finite values that rounding alone would have left beyond the format's maximum; values other
than 0 that became 0; Inf and NaN; all values."""


@dataclass(slots=True)
class Quantized:
    """A quantized operand: ``values * scale_inv`` approximates it."""

    values: Tensor
    """BF16, each exactly an FP8 value."""
    scale_inv: Tensor
    """float32 scalar."""
    payload: Tensor | None
    """The same values in FP8, where asked for."""


class TensorSlot:
    """What is known of one operand of one linear, as views into packed tensors."""

    def __init__(
        self,
        format: Float8Format,
        recipe: Recipe,
        amax: Tensor,
        scale: Tensor,
        counters: Tensor,
        library: kernels.Library | None,
    ) -> None:
        """``amax``, ``scale``: float32 scalars; ``counters``: int64 [4]; live views."""
        self.format = format
        self.recipe = recipe
        self.amax = amax
        self.scale = scale
        self.counters = counters
        self.collect = True
        self.library = library
        self.unobserved: TensorSlot | None = None
        # Addresses stay good for the slot's life: packed tensors change in place only.
        self._native = kernels.Slot(
            scale=scale.data_ptr(),
            amax=amax.data_ptr(),
            counters=counters.data_ptr(),
            e5m2=format.code,
            current=recipe.scaling == "current",
            power_of_two=recipe.power_of_two,
            epsilon=recipe.epsilon,
        )
        self._address = ctypes.addressof(self._native)

    def without_observation(self) -> TensorSlot:
        """A slot with the same scale whose amax and counters are kept nowhere."""
        if self.unobserved is None:
            own_scale = self.recipe.scaling == "current"
            self.unobserved = TensorSlot(
                self.format,
                self.recipe,
                torch.zeros_like(self.amax),
                self.scale.clone() if own_scale else self.scale,
                torch.zeros_like(self.counters),
                self.library,
            )
        return self.unobserved

    def quantize(self, x: Tensor, *, keep_payload: bool) -> Quantized:
        """Round a BF16 tensor with this slot's scale (delayed) or its own (current)."""
        if self.library is None:
            return self._quantize_plain(x, keep_payload)
        x = x.contiguous()
        values = torch.empty_like(x)
        payload = torch.empty_like(x, dtype=self.format.dtype) if keep_payload else None
        scale_inv = torch.empty((), dtype=torch.float32)
        self.library.octavo_quantize(
            self._address,
            x.data_ptr(),
            x.numel(),
            None if payload is None else payload.data_ptr(),
            values.data_ptr(),
            scale_inv.data_ptr(),
        )
        return Quantized(values, scale_inv, payload)

    def observe(self, x: Tensor) -> None:
        """See a BF16 tensor that is not quantized: amax, non-finite values, count."""
        if self.library is not None:
            x = x.contiguous()
            self.library.octavo_observe(self._address, x.data_ptr(), x.numel())
            return
        if x.numel() == 0:
            return
        torch.maximum(self.amax, scaling.tensor_to_amax(x), out=self.amax)
        self.counters[3] += x.numel()
        if self.collect:
            self.counters[2] += x.numel() - torch.isfinite(x).sum()

    def upcast(self, payload: Tensor) -> Tensor:
        """BF16 values of this slot's FP8 payload."""
        if self.library is None:
            return upcast(payload, self.format)
        values = torch.empty_like(payload, dtype=torch.bfloat16)
        self.library.octavo_upcast(
            payload.data_ptr(), payload.numel(), self.format.code, values.data_ptr()
        )
        return values

    def _quantize_plain(self, x: Tensor, keep_payload: bool) -> Quantized:
        x = x.float()
        if x.numel():
            amax = scaling.tensor_to_amax(x)
            torch.maximum(self.amax, amax, out=self.amax)
            if self.recipe.scaling == "current":
                self.scale.copy_(
                    scaling.amax_to_scale(
                        amax,
                        self.format.max,
                        epsilon=self.recipe.epsilon,
                        power_of_two=self.recipe.power_of_two,
                    )
                )
        scaled = x * self.scale
        payload = saturating_cast(scaled, self.format)
        values = upcast(payload, self.format)
        self.counters[3] += x.numel()
        if self.collect:
            finite = torch.isfinite(x)
            beyond = finite & (scaled.abs() > self.format.overflow)
            vanished = (values == 0) & (x != 0)
            self.counters[:3] += torch.stack([beyond.sum(), vanished.sum(), (~finite).sum()])
        return Quantized(values, self.scale.reciprocal(), payload if keep_payload else None)
