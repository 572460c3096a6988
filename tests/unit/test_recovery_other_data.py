"""A loss that leaps as high whatever is tried is other data; what only looks like it is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from monitoring.records import Incident
from orchestrator.recovery.policy import Action, Restorable, return_to_fp8
from orchestrator.spec.config import RecoveryConfig
from tests.unit.recovery_cases import LAYERS, POLICY, act, history, incident, why


def leap(step: int, loss: float) -> Incident:
    return replace(incident("loss_spike", step), evidence={"loss": loss})


def leaping(losses: list[float], step: int = 61, **changes: Any) -> Action:
    """The answer to a loss that leaps at ``step``, again and again."""
    hist = history(guessing_loss=5.5, **changes)
    for loss in losses[:-1]:
        action = act(hist, leap(step, loss))
        precision = {**hist.precision, **action.precision}
        hist = replace(hist, actions=(*hist.actions, action), precision=precision)
    return act(hist, leap(step, losses[-1]))


def test_the_same_leap_with_other_batches_and_in_bf16_is_other_data() -> None:
    assert leaping([3.1, 3.3, 2.6, 3.2]).kind == "whole_bf16"
    action = leaping([3.1, 3.3, 2.6, 3.2, 3.0])
    assert action.kind == "accept" and action.to_step is None and not action.skip_batches
    assert "goes up to 3.3 at most, with 5 different" in action.reason


def test_where_nothing_is_in_fp8_other_batches_are_enough() -> None:
    assert leaping([3.1, 3.3, 2.6, 3.2], fp8_layers=()).kind == "accept"


def test_leaps_of_other_heights_are_not() -> None:
    action = leaping([3.1, 3.3, 2.6, 5.2, 3.0])
    assert action.kind == "lower_lr" and "not the same leap" in why(action, "accept")


def test_a_domain_that_shows_in_the_gradients_first_is_too() -> None:
    """The loss was noisy before: its leap is no spike, and its first batch was easy."""
    hist = history(guessing_loss=5.5)
    for step in (100, 100, 100, 101):
        seen = replace(incident("grad_norm_spike", step), evidence={"loss": 5.9})
        action = act(replace(hist, step=step), seen)
        precision = {**hist.precision, **action.precision}
        hist = replace(hist, actions=(*hist.actions, action), precision=precision)
    assert action.kind == "whole_bf16"
    assert act(replace(hist, step=101), leap(101, 4.6)).kind == "accept"


def test_a_plateau_that_bf16_has_too_is_other_data_a_rise_or_drift_is_not() -> None:
    def slow(**evidence: float) -> Incident:
        seen = incident("slow_divergence", 161, 110)
        return replace(seen, evidence={"loss": 3.8, "fast": 3.8, **evidence})

    rise, drift = slow(slow=2.7), slow(lowest=2.7)
    for last, kind in ((slow(best=2.7), "accept"), (rise, "lower_lr"), (drift, "lower_lr")):
        hist = history(161, guessing_loss=5.5)
        for answer in ("rollback", "whole_bf16"):
            action = act(hist, slow(best=2.7))
            assert action.kind == answer
            precision = {**hist.precision, **action.precision}
            hist = replace(hist, actions=(*hist.actions, action), precision=precision)
        assert act(hist, last).kind == kind


def test_a_loss_much_worse_than_guessing_is_not() -> None:
    action = leaping([9.1, 9.3, 9.6, 9.2, 9.0])
    assert action.kind == "lower_lr" and "more than 1.5 times that of guessing" in why(
        action, "accept"
    )


def test_a_leap_at_another_step_is_not() -> None:
    hist = history(guessing_loss=5.5)
    for step in (61, 61, 61, 61, 65):
        action = act(replace(hist, step=step), leap(step, 3.0))
        precision = {**hist.precision, **action.precision}
        hist = replace(hist, actions=(*hist.actions, action), precision=precision)
    assert action.kind == "lower_lr"


def test_after_it_a_leap_is_a_new_trouble() -> None:
    action = leaping([3.1, 3.3, 2.6, 3.2, 3.0])
    hist = history(90, actions=(action,), precision=dict.fromkeys(LAYERS, "bf16"))
    again = act(replace(hist, restorable=(Restorable(80, 4, True),)), leap(90, 4.0))
    assert (again.kind, again.skip_batches) == ("rollback", (90,))


def test_its_budget_is_spent_like_others() -> None:
    spent = (leaping([3.1, 3.3, 2.6, 3.2, 3.0]),) * POLICY.max_accepted_leaps
    action = leaping([3.1, 3.3, 2.6, 3.2, 3.0], actions=spent)
    assert action.kind == "pause" and "max_accepted_leaps = 2" in why(action, "accept")
    assert "the data is another" in why(action, "lower_lr")
    assert "the data changes more often than recovery.max_accepted_leaps" in action.reason


def test_where_it_is_not_wanted_the_learning_rate_is_lowered() -> None:
    policy = RecoveryConfig(max_accepted_leaps=0)
    hist = history(guessing_loss=5.5)
    for loss in (3.1, 3.3, 2.6, 3.2, 3.0):
        action = act(hist, leap(61, loss), policy=policy)
        precision = {**hist.precision, **action.precision}
        hist = replace(hist, actions=(*hist.actions, action), precision=precision)
    assert action.kind == "lower_lr"


def test_layers_that_went_to_bf16_for_it_have_not_failed() -> None:
    policy = RecoveryConfig(max_accepted_leaps=3, max_whole_fallbacks=3)
    hist = history(guessing_loss=5.5)
    for step in (61, 261, 461):
        for loss in (3.1, 3.3, 2.6, 3.2, 3.0):
            seen = replace(hist, step=step, restorable=(Restorable(step - 11, 1, True),))
            action = act(seen, leap(step, loss), policy=policy)
            precision = {**hist.precision, **action.precision}
            hist = replace(hist, actions=(*hist.actions, action), precision=precision)
        assert action.kind == "accept"
        back = return_to_fp8(replace(hist, step=step + 120, last_incident_step=step), POLICY)
        assert set(back.precision) == set(LAYERS) and set(back.precision.values()) == {"fp8"}
        precision = {**hist.precision, **back.precision}
        hist = replace(hist, actions=(*hist.actions, back), precision=precision)
