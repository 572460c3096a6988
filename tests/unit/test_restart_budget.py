"""Restarts count within a window of steps, and end where they get a job nowhere."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.actions import Action, Asked
from orchestrator.recovery.restart_budget import (
    rest_before_s,
    rest_s,
    restarts_spent,
    restarts_within,
    without_progress,
)
from orchestrator.spec.config import RecoveryConfig
from tests.unit.recovery_cases import act, history, incident, why

DEFAULTS = RecoveryConfig()


def restart(step: int, **changes: object) -> Action:
    action = act(history(step), incident("rank_died", step))
    assert action.kind == "restart"
    return replace(action, **changes)  # type: ignore[arg-type]


def ended(*steps: int, now: int) -> int:
    """Attempts without progress, of a job whose attempts ended at these steps and now."""
    return without_progress(history(now, actions=tuple(map(restart, steps))))


def test_restarts_out_of_the_window_cost_nothing() -> None:
    policy = RecoveryConfig(max_restarts=2, restart_window_steps=100)
    actions = (restart(50), restart(120))
    told = restarts_spent(history(149, actions=actions), policy)
    assert told == "2 of recovery.max_restarts = 2 are used since step 49"
    assert restarts_spent(history(150, actions=actions), policy) == ""


def test_a_pause_for_a_spent_budget_says_so() -> None:
    policy = RecoveryConfig(max_restarts=1)
    action = act(history(70, actions=(restart(61),)), incident("rank_died", 70), policy=policy)
    assert action.kind == "pause" and "1 of recovery.max_restarts = 1 are used:" in action.reason


def test_attempts_that_redo_steps_and_come_no_further_are_counted() -> None:
    assert ended(now=-1) == 1
    assert ended(now=45) == 0
    assert ended(45, now=45) == 1
    assert ended(45, 43, now=44) == 2
    assert ended(45, 43, now=46) == 0
    assert ended(45, 43, 46, now=46) == 1


def test_a_job_that_gets_nowhere_ends_with_the_reason_instead_of_looping() -> None:
    actions = (restart(61), restart(61), restart(60))
    action = act(history(61, actions=actions), incident("rank_died", 61))
    assert action.kind == "pause"
    assert why(action, "restart") == (
        "3 attempts in a row ended without a new step (recovery.max_attempts_without_progress = 3)"
    )
    assert "ended without a new step" in action.reason
    # A way back that needs another attempt is one too.
    bad = history(61, actions=actions, restorable=(), fp8_layers=())
    assert act(bad, incident("loss_spike", 61)).kind == "pause"


def test_failed_preflights_charge_no_restart_and_are_in_vain_all_the_same() -> None:
    def failed(step: int, *before: Action, policy: RecoveryConfig = DEFAULTS) -> Action:
        past = history(step, actions=before)
        return act(past, incident("preflight_failed", step), policy=policy)

    row = [failed(-1)]
    row += [failed(-1, *row)]
    assert [action.kind for action in row] == ["restart", "restart"]
    assert restarts_within(history(-1, actions=tuple(row)), 1000) == 0
    last = failed(-1, *row)
    assert last.kind == "pause" and "3 attempts in a row ended without a new step" in last.reason
    # Nor are they kept from another node where none is left for lost ranks.
    none_left = RecoveryConfig(max_restarts=0)
    assert failed(5, policy=none_left).kind == "restart"
    lost = act(history(5), incident("rank_died", 5), policy=none_left)
    assert lost.kind == "pause"


def test_what_is_away_is_given_more_time_each_time_in_a_row() -> None:
    def away(step: int) -> Action:
        found = replace(incident("rank_died", step), evidence={"raised": 1.0, "outside": 1.0})
        return restart(step, incidents=(found,))

    assert rest_s(()) == rest_s((restart(61),)) == rest_s((away(61), restart(61))) == 0
    rests = [rest_s((restart(61), *[away(61)] * n)) for n in range(1, 6)]
    assert rests == [30, 120, 480, 600, 600]
    assert rest_s((away(61), away(61), away(62))) == 30, "there was a step between"
    paused = replace(away(61), kind="pause")
    assert rest_s((away(61), paused)) == 0


def test_only_the_attempt_right_after_what_was_away_rests() -> None:
    found = replace(incident("rank_died", 61), evidence={"raised": 1.0, "outside": 1.0})
    away = restart(61, incidents=(found,), attempt=4)

    assert rest_before_s((away,), 5, 61) == 30 and rest_before_s((away, away), 5, 61) == 120
    assert rest_before_s((away,), 6, 61) == 0, "another attempt was since"
    assert rest_before_s((away,), 5, 62) == 0, "a step was since"
    # Of a job that begins where another one was, nothing is recorded before its first step.
    assert rest_before_s((away,), 5, -1) == 30
    assert rest_before_s((), 1, -1) == 0


def test_what_a_person_did_begins_the_row_anew() -> None:
    by_hand = restart(61, asked=Asked("me", "k"))
    pause = replace(restart(61), kind="pause")
    for action in (by_hand, pause):
        past = (restart(61), restart(61), action)
        assert without_progress(history(61, actions=past)) == 1


def test_a_way_back_lowers_what_counts_as_progress() -> None:
    back = replace(restart(100), kind="rollback", in_place=True, to_step=60)
    assert without_progress(history(70, actions=(restart(100), back))) == 0
    assert without_progress(history(59, actions=(restart(100), back))) == 1


@given(
    gains=st.lists(st.integers(-5, 5), max_size=30),
    window=st.integers(1, 40),
    most=st.integers(1, 4),
    vain=st.integers(1, 4),
)
def test_no_row_of_attempts_without_progress_is_longer_than_allowed(
    gains: list[int], window: int, most: int, vain: int
) -> None:
    policy = RecoveryConfig(
        max_restarts=most, restart_window_steps=window, max_attempts_without_progress=vain
    )
    actions: list[Action] = []
    step, best, row = -1, -1, 0
    for gain in gains:
        step = max(-1, step + gain)
        row = 0 if step > best else row + 1
        best = max(best, step)
        past = history(step, actions=tuple(actions))
        spent = restarts_spent(past, policy)
        assert bool(spent) == (restarts_within(past, window) >= most or row >= vain)
        if spent:
            return
        actions.append(restart(step))
