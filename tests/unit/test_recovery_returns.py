"""What fell back to BF16 returns to FP8 after a calm stretch, and stays away once it fell again."""

from __future__ import annotations

from typing import Any

from orchestrator.recovery.policy import Action, History, exchange_to_fp8, return_to_fp8
from tests.unit.recovery_cases import DOWN, LAYERS, POLICY, act, history, incident


class TestReturnToFP8:
    def fallen(self, step: int, *more: Action, **changes: Any) -> History:
        first = act(history(), incident("amax_saturation", 61, 61, DOWN))
        values: dict[str, Any] = {"precision": {DOWN: "bf16"}, "last_incident_step": 61}
        return history(step, actions=(first, *more), **(values | changes))

    def test_it_follows_a_calm_stretch(self) -> None:
        action = return_to_fp8(self.fallen(161), POLICY)
        assert action.kind == "return_to_fp8" and action.precision == {DOWN: "fp8"}

    def test_it_does_not_come_a_step_early(self) -> None:
        action = return_to_fp8(self.fallen(160), POLICY)
        assert action.kind == "none" and "99 healthy steps" in action.reason

    def test_any_incident_starts_the_count_again(self) -> None:
        assert return_to_fp8(self.fallen(161, last_incident_step=90), POLICY).kind == "none"

    def test_a_layer_that_failed_again_after_its_return_stays(self) -> None:
        back = return_to_fp8(self.fallen(161), POLICY)
        again = act(self.fallen(170, back, precision={}), incident("loss_spike", 170, 170, DOWN))
        assert again.precision == {DOWN: "bf16"}
        hist = self.fallen(900, back, again, last_incident_step=170)
        action = return_to_fp8(hist, POLICY)
        assert action.kind == "none" and "failed after a return" in action.reason

    def test_the_others_return_without_it(self) -> None:
        back = return_to_fp8(self.fallen(161), POLICY)
        again = act(self.fallen(170, back, precision={}), incident("loss_spike", 170, 170, DOWN))
        other = act(self.fallen(175, back, again), incident("amax_saturation", 175, 175, LAYERS[2]))
        hist = self.fallen(900, back, again, other, precision={DOWN: "bf16", LAYERS[2]: "bf16"})
        assert return_to_fp8(hist, POLICY).precision == {LAYERS[2]: "fp8"}

    def test_nothing_fallen_is_nothing_to_return(self) -> None:
        assert return_to_fp8(history(900), POLICY).kind == "none"


class TestExchangeToFP8:
    FALLEN = act(history(10), incident("exchange_error", 10))

    def fallen(self, step: int, **changes: Any) -> History:
        values = {"actions": (self.FALLEN,), "exchange": "bf16", "last_incident_step": 10}
        return history(step, **{**values, **changes})

    def test_it_returns_after_the_calm_stretch_and_not_before(self) -> None:
        early = exchange_to_fp8(self.fallen(109), POLICY)
        assert early.kind == "none" and "99 healthy steps since step 10" in early.reason
        action = exchange_to_fp8(self.fallen(110), POLICY)
        assert (action.kind, action.exchange) == ("exchange_fp8", "fp8")

    def test_any_incident_begins_the_stretch_anew(self) -> None:
        assert exchange_to_fp8(self.fallen(110, last_incident_step=50), POLICY).kind == "none"

    def test_the_last_fallback_of_the_budget_is_for_good(self) -> None:
        again = (self.FALLEN, exchange_to_fp8(self.fallen(110), POLICY), self.FALLEN)
        answer = exchange_to_fp8(self.fallen(900, actions=again), POLICY)
        assert answer.kind == "none" and "stays in BF16" in answer.reason

    def test_an_exchange_that_the_spec_has_in_bf16_stays(self) -> None:
        assert exchange_to_fp8(history(900, exchange="bf16"), POLICY).kind == "none"
