"""Growth of costs: the steepest part is told and judged, and a size that failed stays a row."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.benchmarks import bench_control_plane as bench
from tests.benchmarks.bench_control_plane import Growth, grown, queue_growths
from tests.benchmarks.peers.processes import SideError

STEEPEST = "submit, steepest between neighbouring sizes"


def test_growth_that_a_fixed_cost_hides_from_the_fit_misses_the_aim() -> None:
    growth = Growth("submit", "jobs", {10: [0.01], 100: [0.01], 1_000: [0.01], 10_000: [1.0]})
    rows = {row.name: row for row in growth.rows()}
    fitted, steepest = rows["submit, exponent"], rows[STEEPEST]
    assert (round(fitted.median, 3), fitted.met) == (0.6, True)
    assert (round(steepest.median, 3), steepest.met) == (2.0, False)
    assert steepest.note == "1,000 to 10,000"


def test_linear_growth_meets_both() -> None:
    growth = Growth("submit", "jobs", {size: [1e-4 * size] for size in (8, 64, 512)})
    assert growth.rows()[-1].median == pytest.approx(1.0)


def test_a_size_that_failed_keeps_its_rows_and_meets_no_aim(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def part(name: str, size: int) -> dict[str, list[float]]:
        if size == 10_000:
            raise SideError("queue was not over after 3600 s", hung=True)
        return {growth.name: [0.01] for growth in queue_growths(10_000)}

    monkeypatch.setattr(bench, "in_a_process", part)
    growths = queue_growths(10_000)
    grown((10, 1_000, 10_000), "queue", growths)
    rows = {(row.name, row.setting): row for row in growths[0].rows()}
    last = rows["submit over HTTP, p99", "10,000 jobs in the store"]
    assert (last.n, last.hangs, last.met) == (0, 1, False)
    told = rows["submit over HTTP", "10,000 jobs in the store"]
    assert told.note == "queue was not over after 3600 s"
    fitted = rows["submit over HTTP, exponent", "10 to 10,000 jobs in the store"]
    assert (fitted.n, fitted.met) == (1, False)


def test_a_part_that_dies_leaves_the_rows_of_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def part(name: str, *arguments: object) -> dict[str, list[float]]:
        if name == "supervisor":
            raise SideError("supervisor: died of SIGKILL")
        return {"share": [0.05]}

    monkeypatch.setattr(bench, "in_a_process", part)
    monkeypatch.setattr(sys, "argv", ["bench", "--parts", "supervisor", "--out", str(tmp_path)])
    assert bench.main() == 1
    rows = json.loads((tmp_path / "bench_control_plane.json").read_text())["rows"]
    assert [(row["n"], row["failures"], row["met"]) for row in rows] == [
        (0, 1, False),
        (1, 0, True),
    ]


def test_a_process_that_dies_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SideError, match="no such part"):
        bench.in_a_process("no such part", 1)
