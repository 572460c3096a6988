"""One scale a tensor: ``delayed`` and ``current``.

Both products that an operand takes part in see the same values. The scale is any FP32 number,
so it isn't folded into BF16 values, which would round them, but applied after the product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel.precision import scaling
from parallel.precision.formats import saturating_cast, upcast
from parallel.precision.quantizers import Columns, Factor, Kept, Quantized, Quantizer, StateRow
from parallel.precision.recipes import Recipe


class _PerTensor(Quantizer):
    def quantize(self, x: Tensor, columns: Columns) -> Quantized:
        keep = columns == "kept"
        values, scale_inv, payload = (
            self._plain(x) if self.library is None else self._fused(x, keep)
        )
        factor = Factor(values, scale_inv)
        kept = Kept(payload, scale_inv) if keep and payload is not None else None
        return Quantized(factor, factor if columns == "values" else None, kept)

    def unpack(self, kept: Kept) -> Factor:
        if self.library is None:
            return Factor(upcast(kept.payload, self.format), kept.scale_inv)
        values = torch.empty_like(kept.payload, dtype=torch.bfloat16)
        self.library.octavo_upcast(
            kept.payload.data_ptr(), values.numel(), self.format.code, values.data_ptr()
        )
        return Factor(values, kept.scale_inv)

    def _make_scale(self, amax: Tensor) -> None:
        """Set the scale for a tensor whose largest magnitude is ``amax``."""

    def _fused(self, x: Tensor, keep: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        assert self.library is not None
        x = x.contiguous()
        values = torch.empty_like(x)
        payload = torch.empty_like(x, dtype=self.format.dtype) if keep else None
        scale_inv = torch.empty((), dtype=torch.float32, device=x.device)
        self.library.octavo_quantize(
            self._address,
            x.data_ptr(),
            x.numel(),
            None if payload is None else payload.data_ptr(),
            values.data_ptr(),
            scale_inv.data_ptr(),
        )
        return values, scale_inv, payload

    def _plain(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x.float()
        if x.numel():
            amax = scaling.tensor_to_amax(x)
            torch.maximum(self.row.amax, amax, out=self.row.amax)
            self._make_scale(amax)
        scaled = x * self.row.scale
        payload = saturating_cast(scaled, self.format)
        values = upcast(payload, self.format)
        scale_inv = self.row.scale.reciprocal()
        self._count_plain(x, scaled, values.float() * scale_inv)
        return values, scale_inv, payload


class DelayedQuantizer(_PerTensor):
    """The scale was made from the amax of earlier steps, and is what it is."""

    granularity = "delayed"

    @classmethod
    def update_(cls, recipe: Recipe, history: Tensor, scale: Tensor, fp8_max: Tensor) -> Tensor:
        return scaling.update_delayed_(
            history,
            scale,
            fp8_max,
            margin=recipe.margin,
            algorithm=recipe.amax_compute_algo,
            ema_factor=recipe.amax_ema_factor,
        )


class CurrentQuantizer(_PerTensor):
    """The scale is made from the tensor's own amax."""

    granularity = "current"

    @classmethod
    def used_scale(cls, recipe: Recipe, amax: Tensor, scale: Tensor, fp8_max: Tensor) -> Tensor:
        return _scale(recipe, amax, fp8_max)

    def _make_quiet(self) -> Quantizer:
        """As everywhere, and with a scale of its own, since each tensor sets it anew."""
        twin = self.row.twin()
        row = StateRow(twin.amax, self.row.scale.clone(), twin.counters)
        return CurrentQuantizer(self.role, self.format, self.recipe, row, self.library)

    def _make_scale(self, amax: Tensor) -> None:
        self.row.scale.copy_(_scale(self.recipe, amax, self.format.max))


def _scale(recipe: Recipe, amax: Tensor, fp8_max: float | Tensor) -> Tensor:
    return scaling.amax_to_scale(
        amax, fp8_max, epsilon=recipe.epsilon, power_of_two=recipe.power_of_two
    )
