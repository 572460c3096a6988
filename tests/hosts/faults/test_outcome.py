"""What counts as recovered, and how the matrix is told."""

from __future__ import annotations

import math

import pytest

from tests.hosts.faults.outcome import Outcome, judge, outage_s
from tests.hosts.faults.rows import ROWS
from tests.hosts.faults.scene import Step
from tests.hosts.faults.table import markdown

REFERENCE = {n: 5.0 - n / 10 for n in range(6)}


def run_of(*steps: tuple[int, int, float]) -> list[Step]:
    """Steps by (attempt, step, time), with the undisturbed losses."""
    return [Step(attempt, step, time, REFERENCE[step]) for attempt, step, time in steps]


RECOVERED = run_of(
    (1, 0, 10.0), (1, 1, 11.0), (1, 2, 12.0), (2, 1, 15.0), (2, 2, 15.5), (2, 3, 16.0),
    (2, 4, 17.0), (2, 5, 18.0),
)  # fmt: skip


def test_the_outage_lasts_until_a_step_that_had_not_been_done() -> None:
    assert outage_s(RECOVERED, 12.5) == 3.5, "steps done again are no progress"
    assert outage_s(RECOVERED, 11.5) == 4.5, "what the old ranks still did is no recovery"
    later = [*RECOVERED[:-1], Step(2, 5, 99.0, REFERENCE[5])]
    assert outage_s(later, 12.5) == 3.5, "what comes after it has other causes"


def test_without_a_restart_the_longest_time_without_a_step_counts() -> None:
    steps = run_of((1, 0, 10.0), (1, 1, 11.0), (1, 2, 19.0), (1, 3, 20.0))
    assert outage_s(steps, 10.5) == 8.0
    assert outage_s(steps, 19.5) == 0.5


def test_a_run_that_came_back_to_the_same_losses_is_ok() -> None:
    outcome = judge("row", RECOVERED, "succeeded", 12.5, REFERENCE)
    assert outcome.ok and outcome.trouble == ""
    assert (outcome.steps_lost, outcome.attempts, outcome.compared) == (2, 2, 6)


def test_the_last_bit_of_a_loss_counts() -> None:
    steps = [*RECOVERED[:-1], Step(2, 5, 18.0, math.nextafter(REFERENCE[5], 9.0))]
    outcome = judge("row", steps, "succeeded", 12.5, REFERENCE)
    assert not outcome.ok and "1 losses differ, the first at step 5" in outcome.trouble


def test_a_loss_that_only_a_step_done_again_corrected_is_no_difference() -> None:
    steps = [Step(1, 1, 11.0, 9.9) if s.time == 11.0 else s for s in RECOVERED]
    assert judge("row", steps, "succeeded", 12.5, REFERENCE).ok


@pytest.mark.parametrize(
    ("changes", "trouble"),
    [
        ({"hang": "step 4 did not come"}, "hang: step 4 did not come"),
        ({"state": "paused"}, "the job paused"),
        ({"steps": RECOVERED[:-1]}, "1 steps without a record, the first 5"),
        ({"problems": ["no event says so"]}, "no event says so"),
    ],
)
def test_everything_else_is_a_failure(changes: dict[str, object], trouble: str) -> None:
    given = {"steps": RECOVERED, "state": "succeeded", "hang": "", "problems": ()} | changes
    outcome = judge("row", fault_at=12.5, reference=REFERENCE, **given)  # type: ignore[arg-type]
    assert not outcome.ok and outcome.trouble == trouble


def test_on_other_degrees_a_loss_may_be_off_by_the_tolerance_alone() -> None:
    near = [*RECOVERED[:-1], Step(2, 5, 18.0, REFERENCE[5] * 1.0005)]
    outcome = judge("row", near, "succeeded", 12.5, REFERENCE, tolerance=0.001)
    assert outcome.ok and outcome.differing == 1 and 0.0004 < outcome.furthest < 0.0006
    far = [*RECOVERED[:-1], Step(2, 5, 18.0, REFERENCE[5] * 1.002)]
    outcome = judge("row", far, "succeeded", 12.5, REFERENCE, tolerance=0.001)
    assert not outcome.ok and "1 losses differ, by 0.20% at most" in outcome.trouble
    none = [*RECOVERED[:-1], Step(2, 5, 18.0, math.nan)]
    assert not judge("row", none, "succeeded", 12.5, REFERENCE, tolerance=0.001).ok


NAME, TOLD = ROWS[0].name, ROWS[0].told
RUNS = [Outcome(NAME, True, s, n, 2, 60, 0) for s, n in ((1.0, 2), (1.5, 4), (9.0, 3))]


def test_the_table_has_medians_the_worst_and_what_failed() -> None:
    shown = markdown([*RUNS, Outcome(NAME, False, 99.0, 50, 3, 60, 7, trouble="7 losses differ")])
    proof = "233 of 240 equal to the bit, the others within 0"
    assert f"| {TOLD} | 4 | 3 | {proof} | 3, 4 | 1.50, 9.00 (aim: 1.5) |" in shown
    assert f"- {NAME}: 7 losses differ" in shown


def test_a_row_without_a_good_run_has_no_times_and_one_that_was_skipped_says_why() -> None:
    assert "| – | – |" in markdown([Outcome.failed(NAME, "no cluster")])
    assert "skipped: no redis-server" in markdown([Outcome.not_run(NAME, "no redis-server")])


def test_rows_have_names_of_their_own() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
