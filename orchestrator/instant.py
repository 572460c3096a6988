"""A time that is both: the wall clock's for people and the store, a steady one's for durations.

A wall clock is set: by a time service, by a person who was told to, as a machine wakes up. What is
compared within one process must not jump with it, and what is written down must. Either could be
done with two readings side by side, or by shifting whatever a process keeps once it notices a jump;
both leave every comparison, and every field that is kept, to be got right by whoever writes it.
Here one value carries both readings and the operators choose: between two instants the steady
clock counts, whatever else an instant meets (a time from the store, from another machine, from a
test) has no steady reading, and the wall clock's is used. Stored, sent or copied it is a plain
number, for a steady reading means nothing in another process.
"""

from __future__ import annotations

import time
from typing import Any


class Instant(float):
    """Seconds since the epoch by the wall clock, and when that was by the steady one.

    ``instant - instant`` is how long it took and ``<`` which came first, however the wall clock was
    set in between; ``instant + seconds`` is as much later by both.
    """

    __slots__ = ("_steady",)
    _steady: float

    def __new__(cls, wall: float, steady: float) -> Instant:
        """``steady``: seconds by a clock that nobody sets, of this process."""
        made = super().__new__(cls, wall)
        made._steady = steady
        return made

    @classmethod
    def now(cls) -> Instant:
        """By this machine's clocks. The steady one stands still while the machine sleeps."""
        return cls(time.time(), time.monotonic())

    def __add__(self, seconds: float, /) -> Instant:
        return Instant(super().__add__(seconds), self._steady + seconds)

    __radd__ = __add__

    def __sub__(self, other: float, /) -> float:
        if isinstance(other, Instant):
            return self._steady - other._steady
        # Seconds before it; or, where ``other`` is a time of the store, the seconds since.
        return Instant(super().__sub__(other), self._steady - other)

    def __lt__(self, other: float, /) -> bool:
        if isinstance(other, Instant):
            return self._steady < other._steady
        return super().__lt__(other)

    def __gt__(self, other: float, /) -> bool:
        if isinstance(other, Instant):
            return self._steady > other._steady
        return super().__gt__(other)

    def __le__(self, other: float, /) -> bool:
        return not self > other

    def __ge__(self, other: float, /) -> bool:
        return not self < other

    def __reduce__(self) -> tuple[Any, ...]:
        return float, (float(self),)
