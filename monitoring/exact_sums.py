"""Sums that don't depend on the order or the grouping of what is added. Pure, numpy only.

Floating-point addition rounds, so that ranks summed by their nodes first would give another last
bit than ranks summed in a row. Here a sum is kept exactly until it is read: of a few floats as an
expansion (Shewchuk, "Adaptive precision floating-point arithmetic", 1997: floats that don't
overlap and add up to it), of arrays of float32 in fixed point over the whole range of that type.
Promises: any grouping gives the same bits; what isn't finite makes the sum not finite, whatever
came first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class ExactSum:
    """Of floats up to 1e300."""

    parts: tuple[float, ...] = ()
    """Non-overlapping, the smallest first."""
    odd: float = 0.0
    """Sum of those that weren't finite."""

    @classmethod
    def of(cls, values: Iterable[float]) -> ExactSum:
        """The sum of ``values``."""
        return cls().plus(values)

    def plus(self, values: Iterable[float]) -> ExactSum:
        """With more of them."""
        parts, odd = list(self.parts), self.odd
        for value in values:
            if not math.isfinite(value):
                odd += value
                continue
            kept = 0
            for part in parts:
                if abs(value) < abs(part):
                    value, part = part, value
                high = value + part
                if low := part - (high - value):
                    parts[kept] = low
                    kept += 1
                value = high
            parts[kept:] = [value]
        return ExactSum(tuple(parts), odd)

    def add(self, other: ExactSum) -> ExactSum:
        """Of both."""
        found = self.plus(other.parts)
        return ExactSum(found.parts, found.odd + other.odd)

    @property
    def value(self) -> float:
        """Rounded once."""
        return math.fsum(self.parts) if self.odd == 0.0 else self.odd


DIGITS = 10
"""Of 32 bits each, from 2**_LOWEST on: float32's range, and room for 2**30 of its largest."""
_LOWEST = -172
_BITS = 32


def fixed_point(values: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """int64 [..., DIGITS] of finite float32 values [...]; digits of one sign, not normalized.

    Digits of up to 2**30 values may be added before ``normalized``.
    """
    mantissa, exponent = np.frexp(values.astype(np.float64))
    whole = (mantissa * 2.0**24).astype(np.int64)
    place = exponent.astype(np.int64) - 24 - _LOWEST
    place = np.where(whole == 0, 0, place)
    digit, shift = place // _BITS, place % _BITS
    shifted = whole << shift
    found = np.zeros((*values.shape, DIGITS), np.int64)
    np.put_along_axis(found, digit[..., None], (shifted & 0xFFFFFFFF)[..., None], -1)
    np.put_along_axis(found, digit[..., None] + 1, (shifted >> _BITS)[..., None], -1)
    return found


def normalized(digits: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The same number in the one form that it has: digits below the last from 0 to 2**32 − 1."""
    found = digits.copy()
    for i in range(DIGITS - 1):
        found[..., i + 1] += found[..., i] >> _BITS
        found[..., i] &= 0xFFFFFFFF
    return found


def total(digits: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """float64 [...] of digits [..., DIGITS], within a few units of the last place; equal numbers
    give equal bits."""
    whole = normalized(digits)
    found = np.zeros(whole.shape[:-1], np.float64)
    for i in reversed(range(DIGITS)):
        found += np.ldexp(whole[..., i].astype(np.float64), _LOWEST + _BITS * i)
    return found
