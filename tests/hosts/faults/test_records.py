"""A long matrix is kept row by row, may be interrupted, and parts of it are run anew."""

from __future__ import annotations

from pathlib import Path

from tests.hosts.faults.outcome import Outcome
from tests.hosts.faults.records import Records, left_to_do


def outcome(row: str, lost: int) -> Outcome:
    return Outcome(row, True, 1.0, lost, 2, 90, 0, notes=("a note",), progress=((7, 0.5),))


def seen(records: Records) -> list[tuple[str, int]]:
    return [(o.row, o.steps_lost) for o in records.newest()]


def test_rows_that_are_run_anew_replace_their_own_old_runs_alone(tmp_path: Path) -> None:
    first = Records(tmp_path / "faults.jsonl")
    for one in (outcome("a", 1), outcome("a", 2), outcome("b", 3)):
        first.add(one)
    second = Records(first.path)
    assert second.newest() == first.newest(), "nothing is lost on the way to the disk and back"
    second.add(outcome("a", 4))
    assert seen(second) == [("b", 3), ("a", 4)]
    assert seen(Records(first.path)) == [("b", 3), ("a", 4)]
    assert [o.steps_lost for o in second.ours()] == [4]


def test_an_interrupted_matrix_goes_on_with_what_it_has_left(tmp_path: Path) -> None:
    asked = [("a", 2), ("b", 3)]
    first = Records(tmp_path / "faults.jsonl")
    assert left_to_do(asked, first) == asked
    for one in (outcome("a", 1), outcome("a", 2), outcome("b", 3)):
        first.add(one)
    again = Records(first.path, resume=True)
    assert left_to_do(asked, again) == [("b", 2)]
    again.add(outcome("b", 4))
    assert seen(again) == [("a", 1), ("a", 2), ("b", 3), ("b", 4)]
    assert left_to_do(asked, Records(first.path)) == asked, "a new matrix begins anew"


def test_a_line_that_was_cut_costs_itself_alone(tmp_path: Path) -> None:
    records = Records(tmp_path / "faults.jsonl")
    records.add(outcome("a", 1))
    records.add(outcome("b", 2))
    records.path.write_bytes(records.path.read_bytes()[:-20])
    again = Records(records.path, resume=True)
    again.add(outcome("c", 3))
    assert seen(Records(records.path)) == [("a", 1), ("c", 3)]
