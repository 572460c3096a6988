"""FP8 numerics: formats, recipes, scaling, and the linears that compute in them.

``parallel.precision.convert`` is the one name that users' own code needs. It is looked up when
asked for: the control plane imports parts of this package and shall not import torch for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from parallel.precision.conversion import convert

__all__ = ["convert"]


def __getattr__(name: str) -> object:
    if name == "convert":
        from parallel.precision.conversion import convert

        return convert
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
