"""What people ask of a running job: the answers, and their way through the supervisor."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.commands import Rollback, SetExchange, SetPrecision
from launch.data import MOST_SKIPPED, batch_of
from orchestrator.actions import Action, Asked
from orchestrator.lifecycle import JobState
from orchestrator.recovery.controls import (
    Control,
    Grounds,
    Refused,
    decide_control,
    in_vain,
    left_unanswered,
    put_off,
    refused_at_once,
)
from orchestrator.recovery.policy import decide, exchange_to_fp8, return_to_fp8
from orchestrator.spec.config import RecoveryConfig
from tests.unit.recovery_cases import DOWN, LAYERS, history, incident
from tests.unit.scripted_job import LAYERS as SCRIPTED_LAYERS
from tests.unit.scripted_job import Bench, Make, spec

GROUNDS = Grounds(points=(0, 20), fixed_layers=("layers.9.mlp.down",), runs_fp8=True, steps=100)
POLICY = RecoveryConfig()


def control(kind: str, key: str = "k1", **order: Any) -> Control:
    return Control(key=key, kind=kind, by="alice", time=5.0, **order)  # type: ignore[arg-type]


def rollback(to_step: int, *skip: int, key: str = "k1") -> Control:
    return control("rollback", key, to_step=to_step, skip_batches=skip)


def precision(to: str, *patterns: str, key: str = "k1") -> Control:
    return control("precision", key, layers=patterns, to=to)


def done(asked: Control, hist: Any, grounds: Grounds = GROUNDS) -> Action:
    action = decide_control(asked, hist, grounds)
    assert isinstance(action, Action), action
    assert action.asked == Asked("alice", asked.key, asked.reason)
    assert Action.from_json(json.loads(json.dumps(action.to_json()))) == action
    return action


def why(asked: Control, hist: Any, grounds: Grounds = GROUNDS) -> str:
    answer = decide_control(asked, hist, grounds)
    assert isinstance(answer, Refused), answer
    return answer.why


class TestRollback:
    def test_a_snapshot_in_memory_is_gone_back_to_in_place_certified_or_not(self) -> None:
        action = done(rollback(60, 61), history())
        assert (action.kind, action.to_step, action.in_place) == ("rollback", 60, True)
        assert action.skip_batches == (61,) and action.incidents == ()
        assert action.reason == (
            "Asked by alice: go back to the snapshot of step 60 and skip batch 61."
        )

    def test_a_checkpoint_is_gone_back_to_by_a_restart(self) -> None:
        action = done(replace(rollback(20), reason="a bad shard."), history())
        assert (action.to_step, action.in_place) == (20, False)
        assert action.reason.endswith("restart from the state kept of step 20 (a bad shard).")

    def test_a_step_without_either_is_refused_with_those_that_have_one(self) -> None:
        told = why(rollback(33), history())
        assert "no snapshot or checkpoint of step 33" in told
        assert "in memory: 40, 50, 60" in told and "after a restart: 0, 20" in told
        nothing = why(rollback(33), history(restorable=()), replace(GROUNDS, points=()))
        assert "none at all so far" in nothing

    def test_a_batch_of_before_the_step_is_refused_for_it_would_move_all_others(self) -> None:
        assert "batches 38-39 came before step 40" in why(rollback(40, 38, 39, 41), history())
        assert done(rollback(40, 40), history()).skip_batches == (40,)

    def test_a_batch_that_is_left_out_already_is_so_once_and_one_never_used_is_refused(
        self,
    ) -> None:
        hist = history(ledger=(10, 45))
        assert done(rollback(40, 10, 45, 46), hist).skip_batches == (46,)
        # 100 steps with 10 and 45 left out end with batch 101.
        assert done(rollback(40, 101), hist).skip_batches == (101,)
        assert "will never be used: the last step's is 101" in why(rollback(40, 102), hist)

    def test_more_batches_than_a_snapshot_can_name_are_refused(self) -> None:
        ledger = tuple(range(100, 100 + MOST_SKIPPED))
        assert "is the most" in why(rollback(40, 50), history(ledger=ledger))
        assert done(rollback(40, 50), history(ledger=ledger[1:])).skip_batches == (50,)

    @given(
        st.sets(st.integers(0, 120), max_size=8),
        st.sampled_from([0, 20, 40, 50, 60]),
        st.sets(st.integers(0, 130), max_size=6),
    )
    def test_steps_before_the_landing_keep_their_batches_whatever_is_skipped(
        self, ledger: set[int], step: int, skip: set[int]
    ) -> None:
        hist = history(ledger=tuple(sorted(ledger)))
        answer = decide_control(rollback(step, *sorted(skip)), hist, GROUNDS)
        if isinstance(answer, Refused):
            return
        after = ledger | set(answer.skip_batches)
        assert skip <= after
        for earlier in range(step):
            assert batch_of(earlier, after) == batch_of(earlier, ledger)


class TestPrecision:
    def test_every_layer_that_a_pattern_matches_is_moved(self) -> None:
        action = done(precision("bf16", "layers.[01].mlp.*", DOWN), history())
        assert action.kind == "precision" and action.to_step is None
        assert action.precision == {LAYERS[0]: "bf16", LAYERS[1]: "bf16"}

    def test_a_pattern_without_a_layer_is_refused_with_the_nearest_name(self) -> None:
        told = why(precision("bf16", "layers.1.mpl.down"), history())
        assert "'layers.1.mpl.down' matches none of the 3 linears" in told
        assert "did you mean 'layers.1.mlp.down'?" in told

    def test_what_the_spec_keeps_in_bf16_is_not_moved(self) -> None:
        told = why(precision("fp8", "layers.9.*"), history())
        assert "stays in BF16 by the spec's fp8.high_precision_layers" in told
        assert "precision is bf16" in why(
            precision("fp8", "*"), history(), replace(GROUNDS, runs_fp8=False)
        )

    def test_layers_that_compute_so_already_are_refused_and_the_others_moved(self) -> None:
        assert f"{DOWN} computes in FP8 already" in why(precision("fp8", DOWN), history())
        by_hand = done(precision("bf16", DOWN), history())
        hist = history(precision={DOWN: "bf16"}, actions=(by_hand,))
        assert "in BF16 already" in why(precision("bf16", DOWN), hist)
        assert done(precision("bf16", "*"), hist).precision == {
            LAYERS[0]: "bf16",
            LAYERS[2]: "bf16",
        }

    def test_what_was_put_into_bf16_by_hand_stays_there_until_asked_back(self) -> None:
        by_hand = done(precision("bf16", DOWN), history(10))
        hist = history(5000, precision={DOWN: "bf16"}, actions=(by_hand,))
        answer = return_to_fp8(hist, POLICY)
        assert answer.kind == "none" and "by hand" in answer.reason
        back = done(precision("fp8", DOWN), hist)
        assert back.precision == {DOWN: "fp8"}

    def test_what_fell_back_by_itself_returns_after_calm_unless_it_is_kept_by_hand(self) -> None:
        fell = decide([incident("amax_saturation", 61, 61, DOWN)], history(), POLICY)
        assert fell.precision == {DOWN: "bf16"}
        hist = history(5000, precision={DOWN: "bf16"}, actions=(fell,))
        assert return_to_fp8(hist, POLICY).precision == {DOWN: "fp8"}
        kept = done(precision("bf16", DOWN), hist)
        assert kept.precision == {DOWN: "bf16"}, "a pin, though it computes so already"
        hist = replace(hist, actions=(fell, kept))
        assert return_to_fp8(hist, POLICY).kind == "none"

    def test_a_move_by_hand_is_no_failure_and_a_return_by_hand_begins_anew(self) -> None:
        fell = decide([incident("amax_saturation", 61, 61, DOWN)], history(), POLICY)
        back = return_to_fp8(history(5000, precision={DOWN: "bf16"}, actions=(fell,)), POLICY)
        again = replace(fell, step=5100)
        failed = history(9000, precision={DOWN: "bf16"}, actions=(fell, back, again))
        assert return_to_fp8(failed, POLICY).kind == "none", "failed after a return"
        by_hand = done(precision("fp8", DOWN), failed)
        anew = replace(failed, actions=(*failed.actions, by_hand, replace(fell, step=9100)))
        assert return_to_fp8(replace(anew, step=20_000), POLICY).precision == {DOWN: "fp8"}


class TestExchange:
    def test_it_is_changed_and_what_is_so_already_refused(self) -> None:
        action = done(control("exchange", to="bf16"), history())
        assert (action.kind, action.exchange) == ("exchange_bf16", "bf16")
        assert "in FP8 already" in why(control("exchange", to="fp8"), history())

    def test_bf16_by_hand_stays_and_bf16_by_policy_returns(self) -> None:
        fell = decide([incident("exchange_error", 61)], history(), POLICY)
        hist = history(5000, exchange="bf16", actions=(fell,))
        assert exchange_to_fp8(hist, POLICY).exchange == "fp8"
        by_hand = done(control("exchange", to="bf16"), hist)
        hist = replace(hist, actions=(fell, by_hand))
        answer = exchange_to_fp8(hist, POLICY)
        assert answer.kind == "none" and "by alice" in answer.reason
        assert "already" in why(control("exchange", to="bf16"), hist)

    def test_auto_asks_the_ranks_to_measure_and_leaves_the_answer_open(self) -> None:
        action = done(control("exchange", to="auto"), history())
        assert (action.kind, action.exchange) == ("exchange_auto", None)


class TestTheLadderBesideIt:
    def test_no_budget_is_charged(self) -> None:
        hand = [done(rollback(60), history()), done(rollback(20), history())]
        policy = RecoveryConfig(max_rollbacks=1, max_restarts=1)
        hist = history(actions=tuple(hand))
        assert decide([incident("loss_spike", 61)], hist, policy).kind == "rollback"
        assert decide([incident("rank_died", 61)], hist, policy).kind == "restart"

    def test_a_row_of_nonfinite_steps_goes_on_across_a_change_of_precision(self) -> None:
        hist = history(58)
        for step in (58, 59, 60):
            action = decide([incident("nonfinite", step)], replace(hist, step=step), POLICY)
            assert action.kind == "skip_step"
            hand = done(precision("bf16", LAYERS[step - 58], key=f"k{step}"), hist)
            hist = replace(hist, actions=(*hist.actions, action, hand))
        last = decide([incident("nonfinite", 61)], replace(hist, step=61), POLICY)
        assert last.kind == "rollback"

    def test_trouble_after_a_way_back_by_hand_is_no_recurrence(self) -> None:
        hist = history(actions=(done(rollback(60), history()),))
        assert decide([incident("loss_spike", 61)], hist, POLICY).kind == "rollback"


@pytest.mark.parametrize("state", list(JobState))
@pytest.mark.parametrize("kind", ["rollback", "precision", "exchange", "pause"])
def test_a_job_takes_controls_while_it_has_nodes_and_goes_on(state: JobState, kind: Any) -> None:
    told = in_vain("toy-1", state, kind)
    runs = state in (JobState.STARTING, JobState.RUNNING, JobState.RECOVERING)
    waits = state is (JobState.QUEUED if kind == "pause" else JobState.PAUSED)
    assert (told == "") == (runs or waits)
    assert put_off(state, kind) == (waits and kind != "pause")
    assert not told or "toy-1" in told


def test_what_the_spec_alone_tells_is_refused_before_it_is_stored() -> None:
    job = spec(model={"num_layers": 2}, fp8={"high_precision_layers": {"first": 1}})
    assert "still to come" in refused_at_once(rollback(30), job, 20)
    assert not refused_at_once(rollback(21), job, 20)
    assert "did you mean" in refused_at_once(precision("bf16", "layers.1.attn.ot"), job, 20)
    assert "stay in BF16" in refused_at_once(precision("bf16", "layers.0.*"), job, 20)
    assert not refused_at_once(precision("bf16", "layers.*"), job, 20)
    assert "precision is bf16" in refused_at_once(
        precision("bf16", "*"), spec(precision="bf16"), 20
    )


def test_a_pause_is_done_when_the_job_is_paused_and_nothing_else_is() -> None:
    pause, other = control("pause"), rollback(3)
    assert left_unanswered(pause, JobState.PAUSED, 9, "Paused.").state == "applied"
    assert left_unanswered(pause, JobState.SUCCEEDED, 9, "").state == "refused"
    assert left_unanswered(other, JobState.PAUSED, 9, "").message.startswith("the job is paused")


# Through the supervisor.


def answers(job: Bench) -> dict[str, tuple[str, str, int]]:
    return {a.key: (a.state, a.message, a.step) for a in job.settled().answers}


class TestThroughTheSupervisor:
    def test_a_rollback_is_stored_then_posted_then_answered_with_its_step(
        self, bench: Make
    ) -> None:
        job = bench()
        job.train(23)
        stored: list[list[str]] = []
        job.ranks.on_post = lambda command: stored.append(list(job.controller.order))
        job.supervision.ask([rollback(15, 17)])
        job.step()
        assert stored == [job.controller.order] and "action rollback" in stored[0]
        (command,) = job.ranks.commands
        order = command.order
        assert isinstance(order, Rollback)
        assert (order.to_step, order.skip_batches, order.timeline) == (15, (17,), 1)
        assert answers(job) == {}, "no rank has told yet"
        job.train(4)
        assert answers(job) == {"k1": ("applied", "Training goes on from step 15.", 15)}
        assert job.controller.event("control_applied").detail["asked_by"] == "alice"
        assert [s["batch"] for s in job.controller.steps[-4:]] == [15, 16, 18, 19]
        assert job.controller.states[-2:] == [
            ("recovering", "CONTROL_ASKED"),
            ("running", "RECOVERED"),
        ]
        assert job.controller.event("recovered").detail["steps_lost"] == 8

    def test_what_comes_again_is_done_once_and_all_in_the_order_they_came(
        self, bench: Make
    ) -> None:
        job = bench()
        job.train(12)
        asked = [
            precision("bf16", SCRIPTED_LAYERS[0], key="a"),
            control("exchange", "b", to="bf16"),
            precision("bf16", SCRIPTED_LAYERS[0], key="c"),
            rollback(10, key="d"),
        ]
        for _ in range(3):
            job.supervision.ask(asked)
            job.step()
        job.train(2)
        assert job.settled().kinds() == ["precision", "exchange_bf16", "rollback"]
        orders = [type(c.order) for c in job.ranks.commands]
        assert orders == [SetPrecision, SetExchange, Rollback]
        found = answers(job)
        assert {k: v[0] for k, v in found.items()} == {
            "a": "applied",
            "b": "applied",
            "c": "refused",
            "d": "applied",
        }
        assert "in BF16 already" in found["c"][1]
        # A way back keeps what was ordered since.
        restored = job.ranks.commands[-1].order
        assert isinstance(restored, Rollback)
        assert dict(restored.precision or {})[SCRIPTED_LAYERS[0]] == "bf16"
        assert job.ranks.exchange == "bf16"

    def test_layers_and_exchange_by_hand_outlast_the_calm(self, bench: Make) -> None:
        job = bench(recovery={"calm_steps": 5})
        job.train(8)
        job.supervision.ask(
            [precision("bf16", SCRIPTED_LAYERS[0], key="a"), control("exchange", "b", to="bf16")]
        )
        job.train(30)
        assert job.settled().kinds() == ["precision", "exchange_bf16"]
        assert job.ranks.precision[SCRIPTED_LAYERS[0]] == "bf16"
        assert job.ranks.exchange == "bf16"

    def test_two_who_ask_to_measure_at_once_are_both_answered(self, bench: Make) -> None:
        job = bench()
        job.train(12)
        job.supervision.ask([control("exchange", to="auto"), control("exchange", "k2", to="auto")])
        job.train(3)
        job.settled()
        assert {key: state for key, (state, _, _) in answers(job).items()} == {
            "k1": "applied",
            "k2": "applied",
        }

    def test_auto_is_answered_with_what_was_measured(self, bench: Make) -> None:
        job = bench()
        job.train(8)
        job.supervision.ask([control("exchange", to="auto")])
        job.train(3)
        assert job.settled().kinds() == ["exchange_auto", "exchange_chosen"]
        state, message, _ = answers(job)["k1"]
        assert state == "applied" and "in FP8: it took 1 ms" in message

    def test_before_the_first_step_they_wait_and_then_have_their_turn(self, bench: Make) -> None:
        job = bench()
        job.ranks.importing = True
        job.supervision.ask([precision("bf16", SCRIPTED_LAYERS[1])])
        job.step()
        assert job.settled().kinds() == [] and answers(job) == {}
        job.ranks.importing = False
        job.step()
        job.train(3)
        assert answers(job)["k1"][0] == "applied"

    def test_what_a_paused_job_was_asked_is_done_first_when_it_is_resumed(
        self, bench: Make
    ) -> None:
        job = bench()
        job.train(23)
        job.settled()
        job.close()
        job.ranks.closed = False
        job.take_over(job.controller.next_attempt("scripted-000001", 1, "resumed"))
        job.ranks.attempts.clear()
        asked = [rollback(10, 12, key="a"), precision("bf16", SCRIPTED_LAYERS[0], key="b")]
        job.supervision.ask([*asked, control("exchange", "c", to="bf16")])
        job.step()
        job.step()
        (first,) = [ranks[0] for ranks in job.ranks.attempts]
        assert first.restore is not None and first.restore.step == 10
        assert first.ledger == (12,)
        job.train(3)
        assert answers(job)["a"] == ("applied", "Training goes on from step 10.", 10)
        assert {key: state for key, (state, _, _) in answers(job).items()} == dict.fromkeys(
            "abc", "applied"
        )

    def test_a_checkpoint_that_memory_lost_is_gone_back_to_by_a_restart(self, bench: Make) -> None:
        job = bench(snapshots={"every": 5, "keep": 3, "certify_after": 5})
        job.train(41)
        job.ranks.held = [key for key in job.ranks.held if key.step in (10, 40)]
        job.supervision.ask([rollback(10)])
        job.step()
        assert job.ranks.kills == 1 and job.controller.actions[-1].in_place is False
        job.train(2)
        assert answers(job)["k1"] == ("applied", "Training goes on from step 10.", 10)
        assert job.ranks.attempts[-1][0].restore is not None
        assert job.ranks.attempts[-1][0].restore.step == 10

    def test_a_supervisor_that_dies_after_the_decision_leaves_it_to_the_next(
        self, bench: Make
    ) -> None:
        job = bench()
        job.train(23)
        asked = [rollback(15, 17, key="a"), precision("bf16", SCRIPTED_LAYERS[0], key="b")]
        job.supervision.ask(asked)
        job.step()
        assert job.controller.kinds() == ["rollback", "precision"]
        job.settled()
        job.close()
        job.ranks.closed = False
        job.take_over(job.controller.next_attempt("scripted-000001", 1, "lost"))
        # The controller sends until it is answered.
        job.supervision.ask(asked)
        job.train(4)
        assert job.controller.kinds() == ["rollback", "precision"], "decided once"
        assert {k: v[0] for k, v in answers(job).items()} == {"a": "applied", "b": "applied"}
        first = job.ranks.attempts[-1][0]
        assert first.restore is not None and first.restore.step == 15
        assert first.ledger == (17,) and first.precision == {SCRIPTED_LAYERS[0]: "bf16"}

    def test_ranks_that_die_before_the_command_take_it_along_in_the_next_attempt(
        self, bench: Make
    ) -> None:
        job = bench()
        job.train(23)
        job.supervision.ask([precision("bf16", SCRIPTED_LAYERS[0])])
        job.step()
        job.ranks.lose(1)
        job.step()
        assert answers(job) == {}
        job.train(3)
        assert answers(job)["k1"][0] == "applied"
        assert job.ranks.attempts[-1][0].precision == {SCRIPTED_LAYERS[0]: "bf16"}
