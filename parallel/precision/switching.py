"""What every backend asks of an order to change linears' precision, and of a stored one. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar, cast

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


class Switchable(Protocol):
    """A linear whose precision can change."""

    current: Precision
    """What it computes in now."""

    def take_seen(self) -> bool:
        """Whether it has observed its operands in BF16 since the last call."""


LinearT = TypeVar("LinearT", bound=Switchable)


class SwitchableLinears(ABC, Generic[LinearT]):
    """The linears of a scope and the changes of their precision, the same on every backend.

    A linear that leaves FP8 forgets its amax history (what made it leave shall not set its
    scales when it is back) and fills a new one from what it sees in BF16. It returns once
    ``steps`` applied steps have done so: an order before that waits, and ``precision`` tells
    what is in force. When it returns, its weight is measured as it is then.
    """

    def __init__(self, *, keeps_history: bool, steps: int) -> None:
        """Recipes without history have nothing to forget or to warm."""
        self._keeps_history = keeps_history
        self._returns = Returns(steps)
        self._linears: dict[str, LinearT] = {}
        self._fixed: list[str] = []

    @abstractmethod
    def _forget(self, names: Sequence[str]) -> None:
        """Forget the amax histories of linears that leave FP8."""

    @abstractmethod
    def _calibrate(self, names: Sequence[str]) -> None:
        """Make room in the weights' scales of linears that return. A collective of the tensor
        ranks, called with the same linears on all of them."""

    @property
    def layers(self) -> tuple[str, ...]:
        """The linears whose precision can change, in order of registration."""
        return tuple(self._linears)

    @property
    def fixed_layers(self) -> tuple[str, ...]:
        """The linears that stay in BF16 throughout, in order of registration."""
        return tuple(self._fixed)

    def precision(self) -> dict[str, Precision]:
        """What each switchable linear computes in now."""
        return {name: linear.current for name, linear in self._linears.items()}

    def ordered(self) -> dict[str, Precision]:
        """What each switchable linear was last ordered to compute in.

        That is ``precision``, but for linears whose return to FP8 waits.
        """
        return self.precision() | dict.fromkeys(self._returns.waiting, "fp8")

    def set_precision(self, precision: Mapping[str, Precision]) -> None:
        """Change linears' precision at a step boundary; none of them if a name is unknown.

        Called with the same linears on all tensor ranks. Raises ValueError for unknown names,
        with the nearest one, and for names whose precision is fixed.
        """
        refuse_unknown(precision, self.layers, self._fixed)
        if not self._keeps_history:
            self._assign(precision)
            return
        granted = {name: self._returns.ask(name, wanted) for name, wanted in precision.items()}
        changed = [name for name in granted if granted[name] != self._linears[name].current]
        self._assign(granted)
        leaving = [name for name in changed if granted[name] == "bf16"]
        returning = [name for name in changed if granted[name] == "fp8"]
        if leaving:
            self._forget(leaving)
            self._returns.leave(leaving)
            for name in leaving:
                self._linears[name].take_seen()
        if returning:
            self._calibrate(returning)

    def _return_the_warmed(self, applied: bool) -> None:
        """At the end of a step: linears whose return waited for it."""
        seen = [name for name in self._returns.cold if self._linears[name].take_seen()]
        ready = set(self._returns.step(seen)) if applied else set()
        if ready:
            returning = [name for name in self._linears if name in ready]
            self._assign(dict.fromkeys(returning, "fp8"))
            self._calibrate(returning)

    def _assign(self, precision: Mapping[str, Precision]) -> None:
        for name, wanted in precision.items():
            self._linears[name].current = wanted


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
