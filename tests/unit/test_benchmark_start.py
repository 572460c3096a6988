"""Ratios of starts: a run of Octavo's that failed or hung meets no aim, and a peer's is told."""

from __future__ import annotations

from tests.benchmarks.bench_start import COLD, RAY_TRAIN, TORCHRUN, WARM, _ratios
from tests.benchmarks.peers.turns import Failed

HUNG = Failed("SideError: it was not over after 1800 s", hung=True)
DIED = Failed(
    "SideError: octavo exited 1; its output ends:\nsome line\nOSError: no port", hung=False
)


def test_a_start_of_ours_that_failed_or_hung_meets_no_aim() -> None:
    told = {COLD: [10.0, HUNG, DIED], WARM: [4.0, DIED, HUNG], RAY_TRAIN: [13.0, 13.0, 13.0]}
    rows = _ratios(told)
    assert [(row.n, row.failures, row.hangs, row.met) for row in rows] == [(1, 1, 1, False)] * 2
    assert "no port" in rows[0].note and "not over after" in rows[0].note


def test_a_ratio_is_by_rounds_and_tells_of_a_peer_that_failed() -> None:
    told = {COLD: [10.0, 12.0, 9.0], WARM: [4.0, 4.0, 4.0], RAY_TRAIN: [20.0, 16.0, DIED]}
    cold, warm = _ratios(told)
    assert (cold.low, cold.high, cold.n, cold.met) == (0.5, 0.75, 2, True)
    assert (warm.median, warm.met) == (4.5, True)
    assert cold.note.startswith("ray_train: ") and "no port" in cold.note


def test_a_side_that_gave_nothing_keeps_its_row() -> None:
    rows = _ratios({COLD: [HUNG], WARM: [4.0], TORCHRUN: [8.0], RAY_TRAIN: [13.0]})
    assert [row.n for row in rows] == [0, 1, 0, 1]
    assert [row.met for row in rows] == [None, False, False, True]
