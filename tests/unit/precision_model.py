"""Every recipe's rules again, written from their text in plain Python, NumPy and ml_dtypes.

Nothing here is shared with the package: one block at a time, scales as Python numbers, FP8 by
ml_dtypes, sums in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import ml_dtypes
import numpy as np
import numpy.typing as npt

from parallel.config import FP8Config

Matrix = npt.NDArray[np.float64]
FP8 = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2}
MAX = {"E4M3": 448.0, "E5M2": 57344.0}
LARGEST_BF16 = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)


def float32_quotient(a: float, b: float) -> float:
    with np.errstate(all="ignore"):
        return float(np.float32(a) / np.float32(b))


def own_scale(amax: float, fp8_max: float, *, power_of_two: bool) -> float:
    """The multiplier of current and block scaling."""
    if amax == 0 or not math.isfinite(amax):
        return 1.0
    scale = float32_quotient(fp8_max, amax)
    scale = LARGEST_BF16 if math.isinf(scale) else scale
    return math.ldexp(1.0, math.frexp(scale)[1] - 1) if power_of_two else scale


def mx_exponent(amax: float, fp8_max: float) -> int:
    """E8M0 of amax / fp8_max, rounded up, as the exact rational number."""
    if math.isnan(amax):
        return 255
    if math.isinf(amax):
        return 254
    if amax == 0:
        return 0
    quotient = Fraction(amax) / Fraction(fp8_max)
    power = quotient.numerator.bit_length() - quotient.denominator.bit_length()
    while Fraction(2) ** power < quotient:
        power += 1
    while Fraction(2) ** (power - 1) >= quotient:
        power -= 1
    return max(0, power + 127)


def mx_scales(exponent: int) -> tuple[float, float]:
    """Multiplier and its inverse as the kernels apply them."""
    if exponent == 255:
        return math.nan, math.nan
    multiplier = {0: 1.0, 254: 0.0}.get(exponent, 2.0 ** (127 - exponent))
    return multiplier, 2.0 ** (exponent - 127)


@dataclass(frozen=True)
class Rules:
    """One variant of one recipe."""

    config: FP8Config

    def format(self, role: str) -> str:
        return "E5M2" if role == "grad_output" and self.config.format == "HYBRID" else "E4M3"

    def block(self, role: str, contracts_over: str) -> tuple[int, int] | None:
        """Rows and columns that share a scale; None: the whole tensor."""
        size = {"block": 128, "mxfp8": 32}.get(self.config.recipe)
        if size is None:
            return None
        if role == "weight" and self.config.recipe == "block":
            return size, size
        return (1, size) if contracts_over == "columns" else (size, 1)

    def scales(self, amax: float, role: str) -> tuple[float, float]:
        """(multiplier, inverse) of a block or tensor whose largest magnitude is ``amax``."""
        fp8_max = MAX[self.format(role)]
        if self.config.recipe == "mxfp8":
            return mx_scales(mx_exponent(amax, fp8_max))
        power_of_two = (
            not self.config.use_f32_scales
            if self.config.recipe == "block"
            else bool(self.config.use_power_2_scales)
        )
        scale = own_scale(amax, fp8_max, power_of_two=power_of_two)
        return scale, float32_quotient(1.0, scale)

    def dequantized(
        self, x: Matrix, role: str, contracts_over: str, scale: float | None = None
    ) -> Matrix:
        """What the product sees of ``x`` [rows, columns]; ``scale``: delayed scaling's."""
        rows, columns = self.block(role, contracts_over) or x.shape
        result = np.empty_like(x)
        for r in range(0, x.shape[0], rows):
            for c in range(0, x.shape[1], columns):
                block = x[r : r + rows, c : c + columns]
                if scale is None:
                    multiplier, inverse = self.scales(float(np.abs(block).max()), role)
                else:
                    multiplier, inverse = scale, 1.0 / scale
                codes = cast(block, multiplier, self.format(role))
                result[r : r + rows, c : c + columns] = codes.astype(np.float64) * inverse
        return result


def cast(x: Matrix, multiplier: float | Matrix, format: str) -> npt.NDArray[np.generic]:
    """FP32 product, clamped, to FP8 by ml_dtypes."""
    with np.errstate(all="ignore"):
        scaled = x.astype(np.float32) * np.asarray(multiplier, np.float32)
        return np.clip(scaled, -MAX[format], MAX[format]).astype(FP8[format])
