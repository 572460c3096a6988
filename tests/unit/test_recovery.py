"""The recovery policy as tables: each remedy with a case that it is not for."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from orchestrator.recovery.policy import Action, Restorable, decide, return_to_fp8
from orchestrator.spec.config import RecoveryConfig
from tests.unit.recovery_cases import DOWN, LAYERS, POLICY, act, history, incident, why


class TestSkipStep:
    def test_it_answers_a_nonfinite_step_and_changes_nothing_else(self) -> None:
        action = act(history(), incident("nonfinite", 61))
        assert action.kind == "skip_step"
        assert action.to_step is None and not action.skip_batches and not action.precision

    def test_it_does_not_answer_a_loss_spike(self) -> None:
        action = act(history(), incident("loss_spike", 61))
        assert action.kind == "rollback"
        assert "not loss_spike" in why(action, "skip_step")

    def test_it_does_not_answer_a_nonfinite_step_that_saturation_explains(self) -> None:
        action = act(
            history(), incident("nonfinite", 61), incident("amax_saturation", 61, 61, DOWN)
        )
        assert action.kind == "layer_fallback"

    def test_a_row_longer_than_allowed_goes_back_to_before_its_first_step(self) -> None:
        hist = history(58)
        for step in (58, 59, 60):
            action = act(replace(hist, step=step), incident("nonfinite", step))
            assert action.kind == "skip_step"
            hist = replace(hist, actions=(*hist.actions, action))
        action = act(history(61, actions=hist.actions), incident("nonfinite", 61))
        assert action.kind == "rollback"
        assert action.to_step == 50 and action.skip_batches == (58, 59, 60, 61)
        assert "4 non-finite steps in a row" in why(action, "skip_step")

    def test_where_nonfinite_values_were_seen_names_no_cause(self) -> None:
        policy = RecoveryConfig(max_skips=0)
        action = act(history(), incident("nonfinite", 61, 61, DOWN), policy=policy)
        assert action.kind == "rollback"

    def test_nonfinite_steps_that_come_back_after_a_rollback_move_the_layers_seen(self) -> None:
        policy = RecoveryConfig(max_skips=0)
        first = act(history(), incident("nonfinite", 61, 61, DOWN), policy=policy)
        hist = history(63, actions=(first,))
        action = act(hist, incident("nonfinite", 63, 63, DOWN), policy=policy)
        assert action.kind == "layer_fallback" and action.precision == {DOWN: "bf16"}

    def test_nonfinite_steps_with_a_good_one_between_are_no_row(self) -> None:
        hist = history()
        for step in (50, 52, 54, 56, 58):
            action = act(replace(hist, step=step), incident("nonfinite", step))
            assert action.kind == "skip_step"
            hist = replace(hist, actions=(*hist.actions, action))

    def test_an_update_that_was_made_with_it_is_no_step_that_was_skipped(self) -> None:
        seen = replace(incident("nonfinite", 61), evidence={"update_skipped": 0.0})
        action = act(history(), seen)
        assert action.kind == "rollback" and "the update was made" in why(action, "skip_step")

    def test_its_budget_counts_the_newest_steps(self) -> None:
        policy = RecoveryConfig(max_skips=1, budget_window_steps=100)
        first = act(history(10), incident("nonfinite", 10), policy=policy)
        hist = history(110, actions=(first,))
        assert act(hist, incident("nonfinite", 110), policy=policy).kind == "skip_step"

    def test_its_budget_is_spent_where_it_is_used_up(self) -> None:
        policy = RecoveryConfig(max_skips=1)
        first = act(history(10), incident("nonfinite", 10), policy=policy)
        action = act(history(actions=(first,)), incident("nonfinite", 61), policy=policy)
        assert action.kind == "rollback"
        assert why(action, "skip_step") == "1 of recovery.max_skips = 1 are used"


class TestRollback:
    def test_it_lands_on_the_newest_certified_snapshot_before_the_onset(self) -> None:
        action = act(history(), incident("loss_spike", 61, 58))
        assert (action.kind, action.to_step, action.in_place) == ("rollback", 50, True)
        assert action.skip_batches == (58, 59, 60, 61)
        assert not action.precision
        assert "skip batches 58-61" in action.reason

    def test_it_does_not_land_on_a_certified_snapshot_after_the_onset(self) -> None:
        assert act(history(), incident("loss_spike", 61, 45)).to_step == 40

    def test_it_takes_an_uncertified_snapshot_only_if_no_certified_one_is_left(self) -> None:
        hist = history(restorable=(Restorable(50, 0, False), Restorable(60, 0, False)))
        action = act(hist, incident("loss_spike", 61, 58))
        assert action.to_step == 50 and "not certified" in action.reason

    def test_without_a_snapshot_the_next_attempt_goes_back_further(self) -> None:
        action = act(history(), incident("loss_spike", 61, 35))
        assert (action.kind, action.in_place, action.to_step) == ("rollback", False, 35)
        assert action.skip_batches == tuple(range(35, 62))

    def test_it_does_not_restart_beyond_the_restarts_left(self) -> None:
        action = act(
            history(), incident("loss_spike", 61, 35), policy=RecoveryConfig(max_restarts=0)
        )
        assert action.kind == "pause"
        assert "0 of recovery.max_restarts = 0 are used" in why(action, "rollback")

    def test_batches_are_those_of_the_steps_as_the_ledger_maps_them(self) -> None:
        hist = history(ledger=(7, 8), batches={60: 62, 61: 63})
        assert act(hist, incident("loss_spike", 61, 60)).skip_batches == (62, 63)

    def test_a_bad_batch_after_another_is_skipped_too_with_some_more_each_time(self) -> None:
        """A stretch of nine bad batches costs three rollbacks, and no precision."""
        hist, skipped = history(), []
        for _ in range(3):
            action = act(hist, incident("loss_spike", 61))
            assert action.kind == "rollback" and not action.precision
            skipped.append(action.skip_batches)
            ledger = (*hist.ledger, *action.skip_batches)
            left = [b for b in range(80) if b not in ledger]
            hist = replace(
                hist,
                actions=(*hist.actions, action),
                ledger=ledger,
                batches=dict(enumerate(left[:62])),
            )
        assert skipped == [(61,), (62, 63, 64), (65, 66, 67, 68, 69)]
        fourth = act(hist, incident("loss_spike", 61))
        assert fourth.kind == "whole_bf16" and not set(fourth.skip_batches) & set(hist.ledger)
        assert "3 in a row" in why(fourth, "rollback")
        assert fourth.precision == dict.fromkeys(LAYERS, "bf16")

    @pytest.mark.parametrize(("every", "steps"), [(37, 300), (260, 40_000)])
    def test_bad_batches_now_and_then_cost_a_rollback_each_and_nothing_else(
        self, every: int, steps: int
    ) -> None:
        actions: tuple[Action, ...] = ()
        for step in range(61, steps, every):
            hist = history(0, actions=actions, restorable=(Restorable(step - 10, 0, True),))
            hist = replace(hist, step=step, batches={step: step})
            action = act(hist, incident("loss_spike", step))
            assert (action.kind, action.skip_batches) == ("rollback", (step,))
            actions = (*actions, action)

    def test_more_of_them_than_the_budget_climb(self) -> None:
        actions: tuple[Action, ...] = ()
        for step in range(100, 2100, 100):
            hist = history(0, actions=actions, restorable=(Restorable(step - 10, 0, True),))
            action = act(replace(hist, step=step), incident("loss_spike", step))
            actions = (*actions, action)
        kinds = [action.kind for action in actions]
        assert kinds[:12] == ["rollback"] * POLICY.max_rollbacks + ["whole_bf16"] * 2

    def test_another_bad_batch_far_from_the_first_is_skipped_alone(self) -> None:
        first = act(history(), incident("loss_spike", 61))
        hist = history(150, actions=(first,), batches={150: 151}, ledger=(61,))
        hist = replace(hist, restorable=(Restorable(140, 1, True),))
        again = act(hist, incident("grad_norm_spike", 150))
        assert (again.kind, again.skip_batches) == ("rollback", (151,))

    @pytest.mark.parametrize("kind", ["slow_divergence", "nonfinite"])
    def test_what_is_no_bad_batch_climbs_at_once(self, kind: str) -> None:
        policy = RecoveryConfig(max_skips=0)
        first = act(history(), incident(kind, 61, 45), policy=policy)
        assert first.kind == "rollback"
        again = act(history(150, actions=(first,)), incident("loss_spike", 150), policy=policy)
        assert again.kind == "whole_bf16" and "rollback at step 61" in why(again, "rollback")

    def test_a_spike_after_layers_fell_back_for_divergence_climbs(self) -> None:
        first = act(history(), incident("loss_spike", 61, 61, DOWN))
        assert first.kind == "layer_fallback"
        hist = history(80, actions=(first,), precision={DOWN: "bf16"})
        assert act(hist, incident("loss_spike", 80)).kind == "whole_bf16"

    def test_a_snapshot_of_the_onset_itself_is_from_before_it(self) -> None:
        assert act(history(), incident("loss_spike", 61, 50)).to_step == 50
        assert act(history(), incident("loss_spike", 61, 49)).to_step == 40

    def test_the_horizon_ends_with_its_last_step(self) -> None:
        first = act(history(), incident("slow_divergence", 61))
        last = history(61 + POLICY.horizon, actions=(first,))
        assert act(last, incident("loss_spike", last.step)).kind == "whole_bf16"

    def test_a_spike_beyond_the_horizon_does_not_climb(self) -> None:
        first = act(history(), incident("slow_divergence", 61))
        later = history(61 + POLICY.horizon + 1, actions=(first,))
        assert act(later, incident("loss_spike", later.step)).kind == "rollback"

    def test_another_trouble_within_the_horizon_does_not_climb(self) -> None:
        first = act(history(), incident("amax_saturation", 61, 61, DOWN))
        assert first.kind == "layer_fallback"
        hist = history(150, actions=(first,), precision={DOWN: "bf16"})
        assert act(hist, incident("loss_spike", 150)).kind == "rollback"


class TestLayerFallback:
    def test_saturation_goes_to_it_directly_with_the_suspects_alone(self) -> None:
        action = act(
            history(), incident("loss_spike", 61, 61), incident("amax_saturation", 61, 60, DOWN)
        )
        assert action.kind == "layer_fallback"
        assert action.precision == {DOWN: "bf16"}
        assert action.to_step == 50 and action.skip_batches == (60, 61)
        assert "moved first in FP8" in why(action, "rollback")
        assert len(action.incidents) == 2

    def test_gradients_that_saturate_as_the_loss_leaps_are_its_effect(self) -> None:
        """The loss of a step is there before its gradients: the batch is bad, not the layer."""
        seen = incident("amax_saturation", 61, 61, DOWN)
        gradient = replace(seen, suspects=(replace(seen.suspects[0], tensor="grad_output"),))
        action = act(history(), incident("loss_spike", 61, 61), gradient)
        assert (action.kind, action.skip_batches) == ("rollback", (61,))
        earlier = replace(gradient.suspects[0], evidence={"since_step": 60.0})
        action = act(
            history(), incident("loss_spike", 61, 61), replace(gradient, suspects=(earlier,))
        )
        assert action.kind == "layer_fallback", "it moved before the loss"
        assert act(history(), gradient).kind == "layer_fallback", "the loss did not move"

    def test_layers_already_in_bf16_are_no_suspects(self) -> None:
        hist = history(precision={DOWN: "bf16"})
        action = act(hist, incident("loss_spike", 61, 61, DOWN))
        assert action.kind == "rollback"

    def test_layers_that_never_ran_in_fp8_are_no_suspects(self) -> None:
        action = act(history(fp8_layers=()), incident("loss_spike", 61, 61, DOWN))
        assert action.kind == "rollback"

    def test_fresh_suspects_within_the_horizon_are_answered_again(self) -> None:
        first = act(history(), incident("amax_saturation", 61, 61, DOWN))
        hist = history(90, actions=(first,), precision={DOWN: "bf16"})
        second = act(hist, incident("amax_saturation", 90, 90, DOWN, LAYERS[2]))
        assert second.kind == "layer_fallback" and second.precision == {LAYERS[2]: "bf16"}

    def test_it_moves_no_more_layers_than_allowed_most_suspect_first(self) -> None:
        policy = RecoveryConfig(max_suspects=2)
        seen = incident("amax_saturation", 61, 61, LAYERS[2], LAYERS[0], LAYERS[1])
        action = act(history(), seen, policy=policy)
        assert list(action.precision) == [LAYERS[2], LAYERS[0]]

    def test_a_spent_budget_moves_the_whole_model(self) -> None:
        action = act(
            history(),
            incident("amax_saturation", 61, 61, DOWN),
            policy=RecoveryConfig(max_layer_fallbacks=0),
        )
        assert action.kind == "whole_bf16"


class TestLastRungs:
    def test_a_model_without_fp8_gets_a_lower_learning_rate(self) -> None:
        first = act(history(fp8_layers=()), incident("slow_divergence", 61))
        hist = history(70, fp8_layers=(), actions=(first,), lr_scale=0.5)
        action = act(hist, incident("loss_spike", 70))
        assert action.kind == "lower_lr" and action.lr_scale == 0.25
        assert why(action, "whole_bf16") == "no layer computes in FP8"

    def test_a_pause_goes_back_to_a_good_state_first_and_names_all_rungs(self) -> None:
        policy = RecoveryConfig(max_rollbacks=0, max_lr_cuts=0)
        action = act(history(fp8_layers=()), incident("loss_spike", 61), policy=policy)
        assert action.kind == "pause" and action.to_step == 50
        assert [p.rung for p in action.passed_over] == [
            "skip_step",
            "exchange_bf16",
            "early_fallback",
            "rollback",
            "layer_fallback",
            "whole_bf16",
            "accept",
            "lower_lr",
            "restart",
            "none",
        ]

    def test_on_exhausted_fail_fails(self) -> None:
        policy = RecoveryConfig(max_rollbacks=0, max_lr_cuts=0, on_exhausted="fail")
        action = act(history(fp8_layers=()), incident("loss_spike", 61), policy=policy)
        assert action.kind == "fail"


class TestRestart:
    def test_a_lost_rank_starts_the_next_attempt_from_the_newest_state(self) -> None:
        action = act(history(), incident("rank_died", 61))
        assert (action.kind, action.in_place, action.to_step) == ("restart", False, None)
        assert not action.skip_batches

    def test_a_spike_does_not(self) -> None:
        action = act(history(fp8_layers=()), incident("loss_spike", 61))
        assert action.kind == "rollback" and action.in_place

    def test_a_lost_rank_beside_a_saturated_layer_takes_the_remedy_along(self) -> None:
        action = act(
            history(), incident("rank_died", 61), incident("amax_saturation", 61, 58, DOWN)
        )
        assert action.kind == "layer_fallback" and not action.in_place
        assert action.to_step == 58 and action.precision == {DOWN: "bf16"}

    def test_a_lost_rank_beside_a_nonfinite_step_is_a_restart(self) -> None:
        action = act(history(), incident("rank_hung", 61), incident("nonfinite", 61))
        assert action.kind == "restart"

    def test_an_error_raised_twice_without_a_step_between_fails(self) -> None:
        raised = replace(incident("rank_died", 61), evidence={"raised": 1.0})
        first = act(history(), raised)
        assert first.kind == "restart"
        assert act(history(actions=(first,)), raised).kind == "fail"

    def test_an_error_raised_again_after_progress_is_tried_again(self) -> None:
        raised = replace(incident("rank_died", 61), evidence={"raised": 1.0})
        first = act(history(), raised)
        assert act(history(70, actions=(first,)), raised).kind == "restart"

    def test_a_process_killed_twice_is_tried_again(self) -> None:
        first = act(history(), incident("rank_died", 61))
        assert act(history(actions=(first,)), incident("rank_died", 61)).kind == "restart"

    def test_restarts_of_all_kinds_share_one_budget(self) -> None:
        policy = RecoveryConfig(max_restarts=2)
        first = act(history(), incident("rank_died", 61), policy=policy)
        second = act(history(actions=(first,)), incident("loss_spike", 61, 30), policy=policy)
        assert not second.in_place
        third = act(history(actions=(first, second)), incident("rank_died", 61), policy=policy)
        assert third.kind == "pause" and third.to_step is None
        assert why(third, "restart") == "2 of recovery.max_restarts = 2 are used"


def test_no_incident_is_no_action() -> None:
    assert decide((), history(), POLICY).kind == "none"


def test_an_action_survives_json_with_its_evidence() -> None:
    action = act(
        history(), incident("loss_spike", 61, 61), incident("amax_saturation", 61, 60, DOWN)
    )
    assert action.passed_over and action.incidents
    assert Action.from_json(json.loads(json.dumps(action.to_json(), allow_nan=False))) == action


class TestExchangeBF16:
    def test_it_answers_a_coarse_exchange_and_rolls_nothing_back(self) -> None:
        action = act(history(), incident("exchange_error", 61))
        assert (action.kind, action.exchange) == ("exchange_bf16", "bf16")
        assert action.to_step is None and not action.skip_batches and not action.precision
        assert Action.from_json(json.loads(json.dumps(action.to_json()))) == action

    def test_it_leaves_an_instability_to_the_rungs_that_go_back(self) -> None:
        action = act(history(), incident("exchange_error", 61), incident("loss_spike", 61))
        assert action.kind == "rollback" and action.exchange is None
        assert why(action, "exchange_bf16") == "loss_spike comes first"

    def test_an_exchange_that_is_not_in_fp8_is_watched(self) -> None:
        action = act(history(exchange="bf16"), incident("exchange_error", 61))
        assert action.kind == "none" and "goes on as it is" in action.reason
        assert why(action, "rollback") == "rounding in the exchange is no instability of training"

    def test_once_its_budget_is_spent_training_goes_on_without_a_pause(self) -> None:
        policy = RecoveryConfig(max_exchange_fallbacks=0)
        action = act(history(), incident("exchange_error", 61), policy=policy)
        assert action.kind == "none"
        spent = "0 of recovery.max_exchange_fallbacks = 0 are used"
        assert why(action, "exchange_bf16") == spent

    def test_an_action_stored_before_there_were_fallbacks_still_loads(self) -> None:
        row = act(history(), incident("loss_spike", 61)).to_json()
        del row["exchange"]
        assert Action.from_json(row).exchange is None


class TestEarlyFallback:
    KINDS = ("projected_overflow", "underflow", "frozen_scale")

    @pytest.mark.parametrize("kind", KINDS)
    def test_it_moves_the_suspects_and_rolls_nothing_back(self, kind: str) -> None:
        action = act(history(), incident(kind, 61, 50, DOWN))
        assert (action.kind, action.precision) == ("early_fallback", {DOWN: "bf16"})
        assert action.to_step is None and action.in_place and not action.skip_batches
        assert f"{DOWN} computes in BF16 from here on" in action.reason

    def test_beside_another_trouble_its_suspects_go_along_with_the_way_back(self) -> None:
        action = act(history(), incident("underflow", 61, 58, DOWN), incident("loss_spike", 61))
        assert (action.kind, action.precision) == ("layer_fallback", {DOWN: "bf16"})
        assert action.to_step == 50
        assert why(action, "early_fallback") == "loss_spike comes first"

    @pytest.mark.parametrize("kind", KINDS)
    def test_layers_that_are_in_bf16_already_are_watched(self, kind: str) -> None:
        hist = history(precision=dict.fromkeys(LAYERS, "bf16"))
        action = act(hist, incident(kind, 61, 50, DOWN))
        assert action.kind == "none"
        assert why(action, "rollback") == "the state that training is in is still good"

    def test_its_budget_is_that_of_the_fallbacks_after_the_fact(self) -> None:
        policy = RecoveryConfig(max_layer_fallbacks=2)
        early = act(history(20), incident("underflow", 20, 12, LAYERS[0]))
        late = act(history(40), incident("amax_saturation", 40, 40, LAYERS[2]))
        assert [early.kind, late.kind] == ["early_fallback", "layer_fallback"]
        hist = history(actions=(early, late))
        action = act(hist, incident("underflow", 61, 50, DOWN), policy=policy)
        assert action.kind == "none"
        assert why(action, "early_fallback") == "2 of recovery.max_layer_fallbacks = 2 are used"

    def test_a_layer_that_it_moved_returns_and_stays_away_the_second_time(self) -> None:
        first = act(history(20), incident("underflow", 20, 12, DOWN))
        hist = history(400, actions=(first,), precision={DOWN: "bf16"}, last_incident_step=20)
        back = return_to_fp8(hist, POLICY)
        assert back.precision == {DOWN: "fp8"}
        again = act(history(500), incident("underflow", 500, 492, DOWN))
        hist = history(900, actions=(first, back, again), precision={DOWN: "bf16"})
        assert return_to_fp8(hist, POLICY).kind == "none"

    def test_a_surge_goes_back_for_the_state_is_not_good(self) -> None:
        action = act(history(), incident("amax_surge", 61, 58, DOWN))
        assert (action.kind, action.to_step, action.precision) == (
            "layer_fallback", 50, {DOWN: "bf16"},
        )  # fmt: skip


class TestReplicasThatDiffer:
    def test_a_restart_from_before_the_last_comparison_without_moving_layers(self) -> None:
        action = act(history(), incident("replica_disagreement", 60, 50, DOWN))
        assert (action.kind, action.in_place, action.to_step) == ("restart", False, 50)
        assert not action.precision and not action.skip_batches
        assert "before replicas differed, step 50" in action.reason
        assert why(action, "layer_fallback") == "no remedy of training makes replicas the same"

    def test_beside_a_loss_spike_it_comes_first(self) -> None:
        action = act(
            history(), incident("replica_disagreement", 60, 50), incident("loss_spike", 61)
        )
        assert action.kind == "restart"

    def test_again_within_the_horizon_is_for_a_person(self) -> None:
        first = act(history(), incident("replica_disagreement", 60, 50))
        action = act(
            history(121, actions=(first,)), incident("replica_disagreement", 120, 110, DOWN)
        )
        assert action.kind == "pause"
        assert "differ again within the horizon of 200 steps" in why(action, "restart")
        much_later = act(
            history(900, actions=(first,)), incident("replica_disagreement", 900, 890, DOWN)
        )
        assert much_later.kind == "restart"


def test_a_slow_divergence_that_comes_back_climbs_like_a_spike() -> None:
    first = act(history(), incident("slow_divergence", 61, 45))
    assert (first.kind, first.to_step) == ("rollback", 40)
    action = act(history(150, actions=(first,)), incident("slow_divergence", 150, 140))
    assert "came back within the horizon" in why(action, "rollback")
