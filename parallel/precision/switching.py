"""What every backend asks of an order to change linears' precision, and of a stored one. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import cast

from parallel.config import Precision
from parallel.precision.recipes import nearest


class Returns:
    """Linears that left FP8 and for which no applied step has made scales since.

    Scales of before they left may be far from what comes now, so an order to return waits for
    such a step. Known on the host, without asking the device; all ranks of a stage run the
    same linears, so they agree.
    """

    def __init__(self, steps: int = 1) -> None:
        """``steps``: applied steps until scales are made of what they showed."""
        self._steps = steps
        self._cold: dict[str, int] = {}
        self._waiting: set[str] = set()

    @property
    def cold(self) -> tuple[str, ...]:
        """Linears without scales of their own time."""
        return tuple(self._cold)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Linears whose return waits."""
        return tuple(sorted(self._waiting))

    def leave(self, names: Iterable[str]) -> None:
        """Linears leave FP8 and forget what their scales were made from."""
        self._cold.update(dict.fromkeys(names, self._steps))

    def ask(self, name: str, wanted: Precision) -> Precision:
        """What an order for a linear comes to now; a return may wait for ``step``."""
        self._waiting.discard(name)
        if wanted == "fp8" and name in self._cold:
            self._waiting.add(name)
            return "bf16"
        return wanted

    def step(self, seen: Collection[str]) -> list[str]:
        """After an applied step, in which linears were ``seen``: those that return now."""
        for name in seen:
            if name in self._cold:
                self._cold[name] -= 1
                if not self._cold[name]:
                    del self._cold[name]
        ready = [name for name in self._waiting if name not in self._cold]
        self._waiting.difference_update(ready)
        return ready

    def meta(self) -> dict[str, object]:
        """For JSON, beside ``precision``; empty where nothing waits."""
        if not self._cold:
            return {}
        return {"unwarmed": dict(self._cold), "returning": list(self.waiting)}

    def load_meta(self, meta: Mapping[str, object]) -> None:
        """Take back ``meta``, of a whole ``state_meta``."""
        cold, waiting = meta.get("unwarmed", {}), meta.get("returning", ())
        self._cold = dict(cast("Mapping[str, int]", cold))
        self._waiting = set(cast("Collection[str]", waiting))


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
