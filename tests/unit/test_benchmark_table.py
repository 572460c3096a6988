"""`make bench`: what crashes, hangs or hasn't run is a row; what is done is not done again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.benchmarks import __main__ as bench
from tests.benchmarks.peers.processes import MARK, Program, end_all, new_mark
from tests.benchmarks.results import markdown, measured, read, report, write

SLEEP = "import time; time.sleep(1000)"
CODE = {
    "bench_crash": "import sys; sys.exit('no such port')",
    "bench_hang": "import time; print('begun'); time.sleep(1000)",
    "bench_good": (
        "import os, sys; from pathlib import Path; import tests.benchmarks.results as results;"
        "results.commit = lambda: os.environ['AT'];"
        "out = Path(sys.argv[2]); (out / 'ran').open('a').write('x');"
        "results.report('bench_good', [results.measured('a', 'b', [1.0], 's')], out)"
    ),
}
"""What stands in for modules of ``tests.benchmarks``, by name."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has ``run_all`` start ``CODE``, at a commit that is given."""
    monkeypatch.setattr(bench, "command", lambda name: [sys.executable, "-c", CODE[name]])

    def at(commit: str) -> None:
        monkeypatch.setenv("AT", commit)
        monkeypatch.setattr(bench, "commit", lambda: commit)

    return at


def test_a_benchmark_that_crashes_is_a_row_and_the_others_have_their_turn(
    made: Callable[[str], None], tmp_path: Path
) -> None:
    made("abc")
    report("bench_crash", [measured("of last year", "", [1.0], "s")], tmp_path)
    reports = bench.run_all(("bench_crash", "bench_good"), tmp_path, 60)
    text = (tmp_path / "bench.md").read_text()
    assert [made.failed for made in reports] == ["exited 1: no such port", ""]
    assert "bench_crash (exited 1: no such port)" in text and "of last year" not in text
    missing = "| bench_goodput (not run yet) | as a whole | octavo | – |  | 0 |  |  |"
    assert missing in text and "no commit told" not in text


def test_a_benchmark_that_hangs_is_ended_and_counted(
    made: Callable[[str], None], tmp_path: Path
) -> None:
    made("abc")
    (hung,) = bench.run_all(("bench_hang",), tmp_path, 1.0)
    assert hung.rows[0].hangs == 1 and "was ended" in hung.failed
    assert "1 / 0" not in markdown([hung]) and "0 / 1" in markdown([hung])


def test_what_has_its_results_from_this_commit_is_not_run_again(
    made: Callable[[str], None], tmp_path: Path
) -> None:
    ran = lambda: len((tmp_path / "ran").read_text())  # noqa: E731
    names = ("bench_good",)
    made("abc")
    bench.run_all(names, tmp_path, 60)
    bench.run_all(names, tmp_path, 60, resume=True)
    assert ran() == 1
    bench.run_all(names, tmp_path, 60)
    assert ran() == 2, "it wasn't asked for"
    made("def")
    bench.run_all(names, tmp_path, 60, resume=True)
    assert ran() == 3, "of another commit"
    made("def" + bench.CHANGED)
    bench.run_all(names, tmp_path, 60, resume=True)
    assert ran() == 4, "nobody knows of what code"


def test_what_failed_is_run_again(made: Callable[[str], None], tmp_path: Path) -> None:
    made("abc")
    bench.run_all(("bench_crash",), tmp_path, 60)
    (tmp_path / "bench_crash.log").unlink()
    bench.run_all(("bench_crash",), tmp_path, 60, resume=True)
    assert (tmp_path / "bench_crash.log").exists()


def test_what_was_left_out_of_results_that_stand_is_told_and_how_to_try_it_again(
    made: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made("abc")
    bench.run_all(("bench_good",), tmp_path, 60)
    (told,) = read(tmp_path)
    write(replace(told, left_out={"ray_train": "no network"}), tmp_path)
    capsys.readouterr()
    bench.run_all(("bench_good",), tmp_path, 60, resume=True)
    assert (tmp_path / "ran").read_text() == "x"
    said = capsys.readouterr().out
    assert "without ray_train: no network" in said
    named = tmp_path / "bench_good.json"
    assert f"rm {named}, and resume" in said
    named.unlink()
    bench.run_all(("bench_good",), tmp_path, 60, resume=True)
    assert (tmp_path / "ran").read_text() == "xx"


def test_runs_are_kept_by_commit_and_only_gone_on_with_when_asked(
    made: Callable[[str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import sys; open(sys.argv[4], 'a').write('x'); sys.exit(1)"
    monkeypatch.setitem(CODE, "bench_hooks", code)
    made("abc")
    kept = tmp_path / "kept/bench_hooks-abc.json"
    for resume, runs in ((False, "x"), (True, "xx"), (False, "x")):
        bench.run_all(("bench_hooks",), tmp_path, 60, resume=resume)
        assert kept.read_text() == runs


def test_what_a_run_within_a_benchmark_started_is_ended_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, other = new_mark(), new_mark()
    monkeypatch.setenv(MARK, whole)
    within = Program([sys.executable, "-c", SLEEP], new_mark(), log=tmp_path / "within")
    monkeypatch.delenv(MARK)
    apart = Program([sys.executable, "-c", SLEEP], other, log=tmp_path / "apart")
    try:
        end_all(whole)
        assert within.poll() is not None and apart.poll() is None
    finally:
        end_all(other)


def test_all_that_are_treated_apart_are_benchmarks() -> None:
    assert set(bench.BENCHMARKS) >= bench.KEEPING | bench.WITH_TORCHAO
