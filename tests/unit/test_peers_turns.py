"""Sides that take turns in a benchmark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.benchmarks.peers import processes
from tests.benchmarks.peers.processes import SideError, end_all, new_mark, of_mark, run_to_end
from tests.benchmarks.peers.turns import Failed, failures, hangs, take_turns, values


def test_a_side_that_fails_or_hangs_is_counted_and_the_others_have_their_turn() -> None:
    def raising(error: Exception) -> Callable[[], float]:
        def run() -> float:
            raise error

        return run

    order: list[tuple[int, str]] = []

    def tell(turn: int, side: str, found: float | Failed) -> None:
        order.append((turn, side))

    sides: dict[str, Callable[[], float]] = {
        "good": lambda: 1.0,
        "broken": raising(SideError("exited 1")),
        "hung": raising(SideError("was not over", hung=True)),
    }
    told = take_turns(sides, 2, tell)
    assert values(told["good"]) == [1.0, 1.0]
    assert (failures(told["broken"]), hangs(told["broken"])) == (2, 0)
    assert (failures(told["hung"]), hangs(told["hung"])) == (0, 2)
    assert order[:3] == [(0, "good"), (0, "broken"), (0, "hung")]
    assert order[3:] == [(1, "broken"), (1, "hung"), (1, "good")]


def test_a_program_that_is_not_over_in_time_is_ended_with_its_detached_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = new_mark()
    monkeypatch.setattr(processes, "new_mark", lambda: mark)
    with pytest.raises(SideError, match="was not over after") as caught:
        run_to_end(["bash", "-c", "setsid sleep 60 & sleep 60"], tmp_path / "log", 0.3)
    assert caught.value.hung
    assert of_mark(mark) == []


def test_a_program_that_fails_tells_the_end_of_what_it_printed(tmp_path: Path) -> None:
    with pytest.raises(SideError, match=r"exited 3; its output ends:\nno luck") as caught:
        run_to_end(["bash", "-c", "echo no luck; exit 3"], tmp_path / "log", 60)
    assert not caught.value.hung


def test_ending_a_mark_that_nobody_carries_is_at_once_over() -> None:
    end_all(new_mark())
