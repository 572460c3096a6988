"""What "back on the undisturbed curve" means, on curves whose answer one can see."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.back_on_curve import (
    Executed,
    back_at,
    curve_of,
    judge,
    tolerance,
)

STEPS, ONSET = 100, 50
CURVE = {step: 4.0 - 0.01 * step for step in range(STEPS)}
WITHIN = 0.05


def disturbed(**by_step: float) -> dict[int, float]:
    """The curve with other losses at some steps, as ``s52=9.0``."""
    return CURVE | {int(name[1:]): loss for name, loss in by_step.items()}


def back(losses: dict[int, float], **options: int) -> int | None:
    return back_at(losses, CURVE, onset=ONSET, within=WITHIN, **options)


def straight(losses: dict[int, float]) -> list[Executed]:
    """Every step done once, a second each."""
    return [Executed(step, loss, float(step)) for step, loss in losses.items()]


def test_an_undisturbed_run_is_back_at_once() -> None:
    assert back(CURVE) == ONSET


def test_a_spike_costs_its_own_steps_and_none_of_the_healthy_ones_behind_it() -> None:
    assert back(disturbed(s50=9.0, s51=9.0)) == 52
    assert back(disturbed(s50=math.nan)) == 51
    assert back(disturbed(s50=math.inf)) == 51


def test_a_loss_below_the_curve_is_no_trouble() -> None:
    assert back(disturbed(**{f"s{step}": 1.0 for step in range(50, 70)})) == ONSET


def test_a_visit_to_the_curve_that_does_not_last_is_no_return() -> None:
    again = disturbed(s50=9.0, s65=9.0)
    assert back(again) == 66
    assert back(again, window=4, hold=4) == 66
    # Nor is one that lasts and doesn't stay: what diverges later never came back.
    for first in (75, 85, 99):
        later = disturbed(s50=9.0, **{f"s{step}": 9.0 for step in range(first, STEPS)})
        assert back(later) is None


def test_a_moment_a_little_above_the_limit_does_not_undo_a_return() -> None:
    losses = disturbed(s50=9.0, **{f"s{step}": CURVE[step] + 0.08 for step in range(70, 79)})
    assert back(losses) == 51


def test_a_run_that_stays_above_or_ends_too_soon_never_came_back() -> None:
    assert back({step: loss + 2 * WITHIN for step, loss in CURVE.items()}) is None
    assert back({step: CURVE[step] for step in range(ONSET + 15)}) is None
    assert back(disturbed(**{f"s{step}": math.nan for step in range(50, 100)})) is None


@given(st.floats(0.0, 10.0), st.integers(ONSET, 70), st.integers(1, 5))
def test_the_answer_is_the_first_step_whose_windows_are_all_within(
    height: float, at: int, length: int
) -> None:
    spike = {step: CURVE[step] + height for step in range(at, at + length)}
    found = back(CURVE | spike)
    if height * length / 10 <= WITHIN - 1e-9:
        assert found == ONSET
    elif height / 10 > WITHIN + 1e-9:
        assert found == at + length


def test_what_was_done_again_is_counted_as_it_was_executed() -> None:
    losses = disturbed(s50=9.0)
    first = [Executed(step, losses[step], float(step)) for step in range(51)]
    again = [Executed(step, CURVE[step], 100.0 + step) for step in range(45, STEPS)]
    verdict = judge([*first, *again], CURVE, onset=ONSET, steps=STEPS, within=WITHIN)
    # Step 50, then 45 to 49 once more, then a step 50 that is good; 49 had ended at 49 s.
    assert (verdict.steps, verdict.seconds, verdict.lost) == (6, 101.0, 6)
    assert verdict.final == pytest.approx(0.0)


def test_a_step_whose_update_was_left_out_is_lost_though_done_once() -> None:
    executed = straight(disturbed(s50=math.nan))
    executed[50] = Executed(50, math.nan, 50.0, applied=False)
    verdict = judge(executed, CURVE, onset=ONSET, steps=STEPS, within=WITHIN)
    assert (verdict.steps, verdict.seconds, verdict.lost) == (1, 2.0, 1)


def test_a_run_without_trouble_takes_no_step_and_the_time_of_one() -> None:
    verdict = judge(straight(CURVE), CURVE, onset=ONSET, steps=STEPS, within=WITHIN)
    assert (verdict.steps, verdict.seconds, verdict.lost, verdict.final) == (0, 1.0, 0, 0.0)


def test_a_run_that_ended_early_has_no_final_loss_and_its_losses_are_those_kept() -> None:
    executed = straight({step: CURVE[step] for step in range(60)})
    verdict = judge(executed, CURVE, onset=ONSET, steps=STEPS, within=WITHIN)
    assert (verdict.steps, verdict.seconds, verdict.final) == (None, None, None)
    assert curve_of([*executed, Executed(58, 1.0, 99.0)])[58] == 1.0
    assert max(curve_of([*executed, Executed(58, 1.0, 99.0)])) == 58


def test_the_tolerance_is_how_far_seeds_lie_apart_at_most_and_of_sides_the_median() -> None:
    def side(apart: float) -> list[dict[int, float]]:
        return [CURVE, {step: loss + apart for step, loss in CURVE.items()}]

    sides = {"a": side(0.2), "b": side(0.3), "c": side(9.0)}
    assert tolerance(sides, ONSET) == pytest.approx(0.3)
    seeds = [*side(0.2), {step: loss - 0.1 for step, loss in CURVE.items()}]
    within = tolerance({"a": seeds}, ONSET)
    assert within == pytest.approx(0.3)
    for one in seeds:
        for other in seeds:
            assert back_at(one, other, onset=ONSET, within=within + 1e-9) == ONSET


def test_one_seed_alone_leaves_a_share_of_the_loss() -> None:
    assert tolerance({"a": [CURVE]}, ONSET) == pytest.approx(0.02 * 3.3, rel=0.05)
    broken = dict.fromkeys(CURVE, math.nan)
    assert tolerance({"a": [CURVE, broken], "b": []}, ONSET) == tolerance({"a": [CURVE]}, ONSET)
    with pytest.raises(ValueError, match="no side"):
        tolerance({"a": [broken]}, ONSET)
