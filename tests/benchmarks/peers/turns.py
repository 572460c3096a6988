"""Sides that take turns: each once a round, another one first each time.

    told = take_turns({"octavo": ours, "torchrun": theirs}, rounds=3, tell=print_line)
    values(told["octavo"]), failures(told["octavo"]), hangs(told["octavo"])

Promises: a side that fails or hangs is counted, with why, and the others have their turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import TypeVar

from tests.benchmarks.peers.processes import SideError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failed:
    """A turn that gave nothing."""

    why: str
    hung: bool


def take_turns(
    sides: Mapping[str, Callable[[], T]],
    rounds: int,
    tell: Callable[[int, str, T | Failed], None],
) -> dict[str, list[T | Failed]]:
    """``rounds`` results of each side, in order; ``tell(round, side, result)`` after each."""
    told: dict[str, list[T | Failed]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name in rotated(list(sides), turn):
            try:
                found: T | Failed = sides[name]()
            except Exception as error:
                hung = isinstance(error, SideError) and error.hung
                found = Failed(f"{type(error).__name__}: {error}", hung)
            told[name].append(found)
            tell(turn, name, found)
    return told


def rotated(names: Sequence[T], turn: int) -> list[T]:
    """Whoever is first has the machine as the round before left it: not the same one each time."""
    first = turn % len(names) if names else 0
    return [*names[first:], *names[:first]]


def values(results: Sequence[T | Failed]) -> list[T]:
    """Of the turns that gave something."""
    return [result for result in results if not isinstance(result, Failed)]


def why(results: Sequence[object], of: str = "") -> str:
    """In one line why turns gave nothing, ``of`` whom; empty where each gave something."""
    found = {_line(result.why): None for result in results if isinstance(result, Failed)}
    return f"{of} {'; '.join(found)}".strip() if found else ""


def _line(reason: str) -> str:
    """Its first line, and its last, which is where an output tells the error."""
    lines = reason.strip().splitlines() or [""]
    return " … ".join(dict.fromkeys(shorten(line, 160) for line in (lines[0], lines[-1])))


def failures(results: Sequence[object]) -> int:
    """Turns that ended wrongly."""
    return sum(isinstance(result, Failed) and not result.hung for result in results)


def hangs(results: Sequence[object]) -> int:
    """Turns that were timed out."""
    return sum(isinstance(result, Failed) and result.hung for result in results)
