"""Which class computes which recipe. A new recipe is a new file and a line here."""

from __future__ import annotations

from parallel.config import RecipeName
from parallel.precision.block import BlockQuantizer
from parallel.precision.mxfp8 import MXFP8Quantizer
from parallel.precision.per_tensor import CurrentQuantizer, DelayedQuantizer
from parallel.precision.quantizers import Quantizer

QUANTIZERS: dict[RecipeName, type[Quantizer]] = {
    "delayed": DelayedQuantizer,
    "current": CurrentQuantizer,
    "block": BlockQuantizer,
    "mxfp8": MXFP8Quantizer,
}
