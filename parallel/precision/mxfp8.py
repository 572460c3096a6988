"""The recipe ``mxfp8``: blocks of 32 along each product's contraction, one E8M0 exponent each.

As Transformer Engine's ``MXFP8BlockScaling``: the exponent of ``amax / fp8_max`` is rounded up, so
that nothing saturates. (The OCP MX paper's rule, the floor of log2 of amax less the format's
exponent, can saturate; Transformer Engine doesn't use it, and neither do we.) Weights too are
quantized once for the forward product and once for dgrad, along different dimensions.
"""

from __future__ import annotations

from torch import Tensor

from parallel.precision import scaling
from parallel.precision.blockwise import Blockwise
from parallel.precision.recipes import MX_BLOCK, Recipe


class MXFP8Quantizer(Blockwise):
    """Runs of 32."""

    granularity = "1×32"
    block = MX_BLOCK
    mx = True

    @classmethod
    def scale_of(cls, recipe: Recipe, amax: Tensor, fp8_max: float | Tensor) -> Tensor:
        return scaling.exponent_to_scale(scaling.amax_to_exponent(amax, fp8_max))

    @classmethod
    def scales(cls, recipe: Recipe, amax: Tensor, fp8_max: float) -> tuple[Tensor, Tensor]:
        exponent = scaling.amax_to_exponent(amax, fp8_max)
        return scaling.exponent_to_scale(exponent), scaling.exponent_to_scale_inv(exponent)
