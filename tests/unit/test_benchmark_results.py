"""Rows of benchmarks: what is written is read back, and nothing that failed is dropped."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.benchmarks.results import (
    Aim,
    Report,
    at_least,
    at_most,
    from_json,
    markdown,
    measured,
    read,
    report,
    shown,
    to_json,
    without_rows,
    write,
    write_table,
)

ROWS = (
    measured("submit", "10 jobs", [0.03, 0.01, 0.02], "s", aim=at_most(0.05)),
    measured("rank killed", "demo", [], "s", side="torchrun", aim=at_most(5), failures=2, hangs=8),
    measured("ETTR", "1,024 GPUs", [98.5], "%", aim=at_least(99.0)),
)


def test_an_aim_is_met_by_the_median_and_by_no_run_that_failed() -> None:
    assert [row.met for row in ROWS] == [True, False, False]
    assert measured("x", "y", [1.0], "s", aim=at_most(2.0), hangs=1).met is False
    assert measured("x", "y", [1.0], "s").met is None


def test_an_aim_of_none_at_all_is_missed_by_one_run_of_many() -> None:
    losses = measured("steps of another loss", "demo", [0, 0, 0, 0, 107], "", aim=at_most(0))
    assert (losses.median, losses.met) == (0, False)
    assert "at most 0, each: **not met**" in markdown([Report("bench_a", (losses,))])
    assert measured("x", "y", [0, 0], "", aim=at_most(0)).met is True
    assert measured("x", "y", [1.0, 1.0, 9.0], "s", aim=at_most(2.0)).met is True


def test_an_aim_of_the_mean_is_judged_by_it_and_says_so() -> None:
    gaps = measured("above BF16", "demo", [0.0, 2.6, 3.4], "%", aim=Aim(2.1, of="mean"))
    assert (gaps.median, gaps.met) == (2.6, True)
    assert "at most 2.10 %, in the mean: met" in markdown([Report("bench_a", (gaps,))])
    assert measured("x", "y", [], "%", aim=Aim(2.1, of="mean")).met is False


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    made = report("bench_a", ROWS, tmp_path, seconds=3.0, left_out={"a peer": "needs a GPU"})
    (again,) = read(tmp_path)
    assert again.rows[0] == ROWS[0] and again.left_out == made.left_out
    assert math.isnan(again.rows[1].median) and again.rows[1].hangs == 8
    json.loads((tmp_path / "bench_a.json").read_text(), parse_constant=pytest.fail)


def test_one_table_has_all_rows_and_says_once_on_what_machine(tmp_path: Path) -> None:
    report("bench_a", ROWS[:1], tmp_path)
    report("bench_b", ROWS[1:], tmp_path, left_out={"a peer": "needs a GPU"})
    write_table(read(tmp_path), tmp_path)
    text = (tmp_path / "bench.md").read_text()
    submit = "| submit | 10 jobs | octavo | 20 ms | 10 ms – 30 ms | 3 |  | at most 50 ms: met |"
    assert submit in text
    assert "| rank killed | demo | torchrun | – |  | 0 | 2 / 8 | at most 5 s: **not met** |" in text
    assert "98.50 %" in text and "- a peer (bench_b): needs a GPU" in text
    assert text.count("python ") == 1 and text.count("| what |") == 1
    whole = json.loads((tmp_path / "bench.json").read_text())
    assert whole["versions"] == whole["reports"][0]["versions"]
    assert read(tmp_path)[0].benchmark == "bench_a", "the table is no benchmark"


def test_json_has_each_value_whether_the_aim_is_met_and_the_commit(tmp_path: Path) -> None:
    report("bench_a", ROWS, tmp_path, versions={"torchft's torchft": "0.2.0"})
    told = json.loads((tmp_path / "bench_a.json").read_text())
    assert [row["met"] for row in told["rows"]] == [True, False, False]
    assert told["rows"][0]["values"] == [0.03, 0.01, 0.02]
    assert told["versions"]["torchft's torchft"] == "0.2.0" and "commit" in told
    (again,) = read(tmp_path)
    assert to_json(again) == told


def test_what_was_made_elsewhere_is_told_apart(tmp_path: Path) -> None:
    here = report("bench_a", ROWS[:1], tmp_path)
    peers = report("bench_b", ROWS[:1], tmp_path, versions={"torchft's torchft": "0.2.0"})
    old = replace(here, benchmark="bench_c", made={**here.made, "commit": "abc", "machine": "64"})
    assert "bench_a" not in markdown([here, peers]) and "torchft's torchft" in markdown([peers])
    text = markdown([here, peers, old])
    assert "bench_a, bench_b: " in text and "\nbench_c: 64; commit abc; " in text


def test_a_benchmark_that_gave_nothing_is_a_row_with_its_reason(tmp_path: Path) -> None:
    write(without_rows("bench_a", "exited 3: a | b\nOSError"), tmp_path)
    (made,) = read(tmp_path)
    assert made.failed and made.rows[0].failures == 1
    row = "| bench_a (exited 3: a \\| b OSError) | as a whole | octavo | – |  | 0 | 1 / 0 |  |"
    assert row in markdown([made])


def test_a_value_that_is_no_number_is_a_failure_and_hides_no_other() -> None:
    row = measured("losses", "demo", [0.0, math.nan, 5.0, 0.0], "", aim=at_most(0))
    assert (row.n, row.failures, row.high, row.met) == (3, 1, 5.0, False)


def test_half_a_file_is_a_report_that_failed_beside_the_others(tmp_path: Path) -> None:
    report("bench_a", ROWS[:1], tmp_path)
    report("bench_b", ROWS[:1], tmp_path)
    file = tmp_path / "bench_a.json"
    file.write_text(file.read_text()[:40])
    broken, whole = read(tmp_path)
    assert broken.benchmark == "bench_a" and "bench_a.json can't be read" in broken.failed
    assert not whole.failed and "can't be read" in markdown([broken, whole])


def test_who_is_left_out_is_told_with_where_and_each_reason() -> None:
    reports = [
        Report("bench_a", ROWS[:1], left_out={"peer": "no GPU"}),
        Report("bench_b", ROWS[:1], left_out={"peer": "no GPU"}),
        Report("bench_c", ROWS[:1], left_out={"peer": "it recovers\nfrom nothing"}),
    ]
    told = markdown(reports)
    assert "- peer (bench_a, bench_b): no GPU" in told
    assert "- peer (bench_c): it recovers from nothing" in told


def test_losses_are_told_to_the_digits_that_differ() -> None:
    assert shown(1.80512, "nats") == "1.8051 nats" and shown(1.80512, "×") == "1.81 ×"


def test_other_json_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match="no results of a benchmark"):
        from_json({"rows": []})
    assert markdown([]).startswith("| what |")
