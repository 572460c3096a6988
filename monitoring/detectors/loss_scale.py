"""The scale that losses are judged on: how far a rise is, whatever the loss's size and sign.

Positive losses are taken as logarithms, on which a rise of so many percent is the same everywhere.
A loss that is zero or negative, as one of the user's own can be, has none: from the first such
value on the inverse hyperbolic sine stands in, which is linear near 0 and like the logarithm
further out, on either side. Promises: pure; a scale and its inverse undo each other; never raises
for a finite loss.
"""

from __future__ import annotations

import math


def scaled(loss: float, signed: bool) -> float:
    """The loss on the scale; ValueError for one that is not positive where it isn't ``signed``."""
    return math.asinh(loss) if signed else math.log(loss)


def unscaled(value: float, signed: bool) -> float:
    """The loss at ``value`` of the scale; infinite where none is as large."""
    try:
        return math.sinh(value) if signed else math.exp(value)
    except OverflowError:
        return math.copysign(math.inf, value)


def signed_from_log(value: float) -> float:
    """Where log(loss) is on the scale of losses of either sign."""
    return scaled(unscaled(value, False), True)


def relative_rise(loss: float, usual: float) -> float:
    """The rise over ``usual`` as a fraction of its size; infinite over nothing."""
    if usual:
        return (loss - usual) / abs(usual)
    return math.copysign(math.inf, loss) if loss else 0.0
