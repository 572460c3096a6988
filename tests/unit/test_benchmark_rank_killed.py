"""Rows of killed ranks: what hung or failed, the undisturbed run too, is in its row."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from tests.benchmarks.bench_rank_killed import _ratios, _rows
from tests.benchmarks.peers.sides import Side
from tests.benchmarks.results import Result

OURS = Side("octavo", "", lambda *_: contextlib.nullcontext())  # type: ignore[arg-type]


def run(outcome: str, outage_s: float | None = None, loss: float = 2.0) -> dict[str, Any]:
    return {
        "outcome": outcome,
        "outage_s": outage_s,
        "whole_s": outage_s,
        "again_s": outage_s and outage_s / 2,
        "redone": 3,
        "alone": 0,
        "losses": [(step, loss) for step in range(20)],
    }


def test_a_copy_of_ours_that_keeps_state_more_often_is_no_peer() -> None:
    killed = [run("undisturbed"), run("recovered", 1.0)]
    found = {"octavo": killed, "octavo_each_step": killed, "torchft": killed}
    for own in ("octavo", "octavo_each_step"):
        assert {row.side for row in _ratios(found, own)} == {own}
        assert _ratios(found, own)[0].name == f"outage of torchft over {own}'s"
        assert (_ratios(found, own)[0].aim is not None) == (own == "octavo"), "of like settings"


def row(rows: Sequence[Result], name: str) -> Result:
    return next(row for row in rows if row.name == name)


def test_without_an_undisturbed_run_losses_are_a_row_that_meets_no_aim() -> None:
    rows = _rows(OURS, [run("hang"), run("recovered", 1.0, loss=4.0), run("failed")])
    losses = row(rows, "… steps of another loss")
    assert (losses.n, losses.failures, losses.hangs, losses.met) == (0, 1, 1, False)
    assert losses.note == "the undisturbed run: hang"
    assert row(rows, "rank killed, to the next new step").hangs == 0


def test_one_killed_run_of_other_losses_misses_the_aim() -> None:
    killed = [run("recovered", 1.0), run("recovered", 1.0), run("recovered", 1.0, loss=2.5)]
    losses = row(_rows(OURS, [run("undisturbed"), *killed]), "… steps of another loss")
    assert (losses.median, losses.high, losses.met) == (0, 20, False)


def test_a_ratio_is_by_rounds_and_tells_of_the_peers_that_hung() -> None:
    first = run("undisturbed")
    found = {
        "octavo": [first, run("recovered", 1.0), run("recovered", 2.0), run("recovered", 1.0)],
        "torchft": [first, run("recovered", 3.0), run("hang"), run("failed")],
        "torchrun": [first, run("recovered", 6.0), run("recovered", 12.0), run("recovered", 5.0)],
    }
    torchft, _, torchrun, again = _ratios(found, "octavo")
    # What wasn't back was away for a minute at least.
    assert (torchft.n, torchft.low, torchft.median, torchft.high) == (3, 3.0, 30.0, 60.0)
    assert torchft.met
    assert torchft.note == "of 3 of torchft's, 1 failed and 1 hung: counted as 60 s"
    assert (torchrun.low, torchrun.high, torchrun.n, torchrun.note) == (5.0, 6.0, 3, "")
    assert (again.low, again.high, again.met) == (5.0, 6.0, None)


def test_a_hang_of_ours_meets_no_ratio() -> None:
    first = run("undisturbed")
    found = {
        "octavo": [first, run("recovered", 1.0), run("hang")],
        "torchrun": [first, run("recovered", 9.0), run("recovered", 9.0)],
    }
    ratio, again = _ratios(found, "octavo")
    assert (again.n, again.hangs) == (1, 1)
    assert (ratio.n, ratio.hangs, ratio.met) == (1, 1, False)
