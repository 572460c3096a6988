"""Benchmarks of a job with and without something, and of detectors, count what went wrong."""

from __future__ import annotations

from tests.benchmarks.bench_detection import RULES, Score, rows_of
from tests.benchmarks.bench_overhead import Metered
from tests.benchmarks.bench_overhead import rows_of as rows_of_sides
from tests.benchmarks.bench_snapshots import EVERY, WITH, WITHOUT, Compared
from tests.benchmarks.bench_snapshots import rows_of as rows_of_pairs
from tests.benchmarks.peers.turns import Failed
from tests.benchmarks.results import at_most
from tests.benchmarks.sides import Run


def run(step_s: float, *losses: float) -> Run:
    return Run(1.0, step_s, losses, (step_s,) * EVERY)


def test_a_round_with_a_failure_has_no_ratio_and_meets_no_aim() -> None:
    told: dict[str, list[Compared | Failed]] = {
        WITHOUT: [Compared(run(1.0, 2.0)), Compared(run(1.0, 2.0))],
        WITH: [Compared(run(1.5, 2.0), {"written": 3.0}), Failed("it hung", hung=True)],
    }
    rows = {row.name: row for row in rows_of_pairs("snapshots", "here", told, at_most(2.0))}
    ratio = rows["a step with snapshots over one without"]
    assert (ratio.median, ratio.n, ratio.hangs, ratio.met) == (1.5, 1, 1, False)
    assert (rows["a step with snapshots"].n, rows["a step without snapshots"].n) == (1, 2)
    assert rows["written"].median == 3.0


def test_overhead_counts_the_sides_own_failures_and_tells_torchruns() -> None:
    redid = Failed("SideError: 247 steps were told of 240: it wasn't undisturbed", hung=False)
    ours_each, differing = Metered(run(1.0, 2.0), {"rank": 0.9, "raylet": 0.0001}), run(1.1, 1.9)
    same, slower = Metered(run(1.0, 2.0), {"rank": 0.8}), Metered(run(1.1, 2.0), {})
    told: dict[str, list[Metered | Failed]] = {
        "octavo": [ours_each, redid, ours_each],
        "torchrun": [same, same, Failed("it hung", hung=True)],
        "deepspeed": [slower, Metered(differing, {}), slower],
    }
    rows = {(row.name, row.side): row for row in rows_of_sides("here", told)}
    ours = rows["a step over torchrun's", "octavo"]
    assert (ours.n, ours.failures, ours.hangs, ours.met) == (1, 1, 0, False)
    assert ours.note == "torchrun: it hung"
    assert rows["a step", "octavo"].note.startswith("SideError: 247 steps")
    assert rows["steps of another loss than torchrun's", "deepspeed"].values == (0, 1)
    taken = rows["processor time a step", "octavo"]
    assert (taken.median, taken.n) == (0.9001, 2)
    # What hardly counts has no name in it.
    assert taken.note == "in the last round, ms: rank 900"


def test_losses_that_differ_are_counted() -> None:
    told: dict[str, list[Compared | Failed]] = {
        WITHOUT: [Compared(run(1.0, 2.0, 1.9))],
        WITH: [Compared(run(1.0, 2.0, 1.8))],
    }
    rows = {row.name: row for row in rows_of_pairs("snapshots", "here", told, None)}
    differing = rows["steps whose loss snapshots change"]
    assert differing.median == 1 and differing.met is False


def test_detection_is_told_over_all_cases_of_each_rule() -> None:
    seen, missed = Score(delays=[3], healthy_steps=100), Score(misses=1, healthy_steps=100)
    sick = {"spike": {rule.name: seen for rule in RULES}}
    sick["growth"] = {rule.name: missed for rule in RULES}
    rows = rows_of(sick, {}, [4])
    octavo = [row for row in rows if row.side == "octavo"]
    assert [(row.median, row.met) for row in octavo[:3]] == [(1, False), (3, None), (0, True)]
    assert len({row.side for row in rows}) == len(RULES)
