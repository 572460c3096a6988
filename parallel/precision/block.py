"""The recipe ``block``: 1×128 blocks of activations and gradients, 128×128 of weights.

As Transformer Engine's ``Float8BlockScaling``: each block's scale is current scaling's of that
block, rounded down to a power of two unless ``use_f32_scales``. A square of a weight has one
scale, so the same values serve the forward product and dgrad.

With FP32 scales the values of a block are no BF16 numbers: they are dequantized in FP32, and the
products are FP32's, which on CPU take about twice as long.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel.precision import scaling
from parallel.precision.blockwise import Blockwise
from parallel.precision.quantizers import Columns, Factor, Quantized
from parallel.precision.recipes import BLOCK, Recipe


class BlockQuantizer(Blockwise):
    """Runs of 128, or squares where the operand is the weight."""

    granularity = "1×128"
    block = BLOCK
    mx = False

    @classmethod
    def scale_of(cls, recipe: Recipe, amax: Tensor, fp8_max: float | Tensor) -> Tensor:
        return scaling.amax_to_scale(
            amax, fp8_max, epsilon=recipe.epsilon, power_of_two=recipe.power_of_two
        )

    @classmethod
    def scales(cls, recipe: Recipe, amax: Tensor, fp8_max: float) -> tuple[Tensor, Tensor]:
        scale = cls.scale_of(recipe, amax, fp8_max)
        return scale, scale.reciprocal()

    def quantize(self, x: Tensor, columns: Columns) -> Quantized:
        if self.role != "weight":
            return super().quantize(x, columns)
        if columns == "kept":
            raise NotImplementedError("weights are kept as values, which all micro-batches share")
        if self._fuses:
            factor = self._fused_squares(x.contiguous())
        else:
            self._see_plain(x)
            factor, _ = self._plain(x, (BLOCK, BLOCK), count=True)
        return Quantized(factor, factor, None)

    def _fused_squares(self, x: Tensor) -> Factor:
        assert self.library is not None
        values = torch.empty_like(x)
        self.library.octavo_quantize_squares(
            self._address, x.data_ptr(), *x.shape, values.data_ptr()
        )
        return Factor(values, None)
