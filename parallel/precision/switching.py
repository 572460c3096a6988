"""What every backend asks of an order to change linears' precision, and of a stored one. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import cast

from parallel.config import Precision
from parallel.precision.recipes import nearest


def refuse_unknown(
    precision: Mapping[str, Precision], layers: Collection[str], fixed: Collection[str]
) -> None:
    """Raises ValueError for a name that is not among ``layers``, and for a word that is none.

    ``fixed`` are linears that stay in BF16 throughout; they get a message of their own.
    """
    for name, wanted in precision.items():
        if wanted not in ("fp8", "bf16"):
            raise ValueError(f"precision {wanted!r} of {name!r}: expected 'fp8' or 'bf16'")
        if name in fixed:
            raise ValueError(f"linear {name!r} stays in BF16: its precision is fixed")
        if name not in layers:
            raise ValueError(f"no linear {name!r} on this rank{nearest(name, tuple(layers))}")


def precision_of_state(
    meta: Mapping[str, object], layers: Collection[str]
) -> Mapping[str, Precision]:
    """``precision`` of a stored ``state_meta``; ValueError when it is of other linears."""
    precision = meta["precision"]
    if not isinstance(precision, Mapping) or set(precision) != set(layers):
        raise ValueError(
            f"precision state is of other linears than this rank's: {precision!r}, "
            f"here {list(layers)}"
        )
    return cast("Mapping[str, Precision]", precision)
