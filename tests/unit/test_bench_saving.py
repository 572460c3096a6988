"""The benchmark of saving counts what was refused, what came back wrong, and what hung."""

from __future__ import annotations

from collections.abc import Sequence

from tests.benchmarks.bench_saving import Damaged, Turn, damaged_of, rows_of
from tests.benchmarks.peers.processes import SideError
from tests.benchmarks.peers.turns import Failed
from tests.benchmarks.results import Result
from tests.benchmarks.saving.rank import Restored, Save

DCP = "DCP"


def save(stall: float, disk: float) -> Save:
    return Save(stall, 2 * stall, 3, 0.1, {"disk": disk}, written=900)


def turn(damaged: Damaged, differing: int = 0) -> Turn:
    saves = (save(9.0, 9.0), save(0.1, 0.5), save(0.3, 0.5))
    return Turn(500_000, saves, (Restored("disk", 0.2, differing),), {"disk": damaged})


def by_name(rows: Sequence[Result]) -> dict[str, Result]:
    return {row.name: row for row in rows}


def test_the_save_on_a_cold_start_is_told_apart() -> None:
    rows = by_name(rows_of(DCP, "2 MB", [turn(Damaged("", 0))]))
    stall = rows["save: loop stands still"]
    assert (stall.median, stall.high, stall.n) == (0.2, 0.3, 2)
    assert "9" in stall.note
    assert rows["save: bandwidth to disk"].median == 2.0


def test_a_flipped_byte_that_is_loaded_is_told_from_one_that_is_refused() -> None:
    name = "a flipped byte on disk: taken for the state"
    for damaged, silent in (
        (Damaged("", 2), 1),
        (Damaged("DamagedSnapshotError: digest", 0), 0),
        (Damaged("", 0), 0),
    ):
        assert by_name(rows_of("octavo", "2 MB", [turn(damaged)]))[name].median == silent


def test_a_load_that_hangs_on_a_flipped_byte_is_counted() -> None:
    hung = damaged_of({}, SideError("torchrun was not over", hung=True))["disk"]
    row = by_name(rows_of(DCP, "2 MB", [turn(hung)]))["a flipped byte on disk: taken for the state"]
    assert (row.hangs, row.median) == (1, 0)


def test_the_rank_that_refused_first_says_why() -> None:
    lost = {"refused": "RuntimeError: connection closed", "differing": 0, "time": 2.0}
    first = {"refused": "ValueError: checksum", "differing": 0, "time": 1.0}
    assert damaged_of({"disk": [lost, first]}, None) == {"disk": Damaged("ValueError: checksum", 0)}


def test_what_came_back_wrong_fails_octavo() -> None:
    rows = by_name(rows_of("octavo", "2 MB", [turn(Damaged("refused", 0), differing=1)]))
    assert rows["tensors back that are not equal to the bit"].met is False


def test_a_save_that_does_not_come_back_is_a_failure_beside_its_figures() -> None:
    lost = Turn(500_000, (save(9.0, 9.0), save(0.1, 0.5)), (), {}, Damaged("no such file", 0))
    rows = by_name(rows_of(DCP, "2 MB", [lost]))
    back = rows["back, having been on disk"]
    assert (back.failures, back.n, back.note) == (1, 0, "no such file")
    assert rows["save: until on disk"].median == 0.5


def test_a_side_that_never_ran_is_a_row_with_why() -> None:
    (row,) = rows_of(DCP, "2 MB", [Failed("SideError: torchrun exited 1", hung=False)])
    assert (row.failures, row.n) == (1, 0) and "exited 1" in row.note
