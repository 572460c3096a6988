"""The supervisor one pass at a time, against ranks and a controller that break on demand."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from launch.commands import (
    Command,
    ExchangeReport,
    RankReport,
    RestorePoint,
    Rollback,
    SetExchange,
    SetPrecision,
    Stop,
)
from monitoring.report import render_report
from monitoring.summary import summarize
from orchestrator.lifecycle import JobState
from orchestrator.node_slot import NodeSlot
from tests.unit.scripted_job import LAYERS, WORLD, Make, Script


def saturates_from(step: int, layer: str = LAYERS[1]) -> Script:
    return Script(saturated=lambda s, name: s >= step and name == layer)


class TestStart:
    def test_ranks_are_given_out_once_all_workers_are_there(self, bench: Make) -> None:
        job = bench()
        job.ranks.importing = True
        job.step()
        assert not job.ranks.attempts
        job.ranks.importing = False
        job.step()
        (assignments,) = job.ranks.attempts
        assert [a.rank for a in assignments] == [0, 1]
        assert assignments[0].restore is None and assignments[0].attempt == 1

    def test_the_job_runs_with_its_first_step_and_standby_workers_come_after_it(
        self, bench: Make
    ) -> None:
        job = bench()
        job.step()
        assert job.ranks.standby == 0
        job.train(1)
        assert job.ranks.standby == WORLD
        assert job.settled().states == [("running", "FIRST_STEP")]

    def test_after_a_restart_they_come_with_the_first_step_that_had_not_been_done(
        self, bench: Make
    ) -> None:
        job = bench()
        job.train(13)
        job.ranks.lose(1)
        job.settled()
        job.ranks.standby = 0
        job.train(2)
        assert job.ranks.step < 13 and job.ranks.standby == 0
        job.train(13 - job.ranks.step)
        assert job.ranks.standby == 0
        job.train(1)
        assert job.ranks.standby == WORLD

    def test_spares_have_theirs_too_also_those_that_come_later(self, bench: Make) -> None:
        job = bench()
        job.train(1)
        assert job.ranks.standby == WORLD
        spare = NodeSlot("c" * 56, "10.0.0.9", 7, slots=2, spare=True)
        job.supervision.restocking.stand_ready([spare])
        job.step()
        assert job.ranks.standby == WORLD + 2
        job.supervision.restocking.stand_ready([])
        job.step()
        assert job.ranks.standby == WORLD

    def test_no_standby_workers_come_where_the_spec_says_so(self, bench: Make) -> None:
        job = bench(resources={"standby": False})
        job.train(2)
        assert job.ranks.standby == 0

    def test_a_step_counts_once_all_ranks_have_reported_it(self, bench: Make) -> None:
        job = bench()
        job.step()
        reports: list[Any] = []
        job.ranks.deliver = reports.extend
        job.ranks.train()
        rank_0, rank_1 = [r for r in reports if isinstance(r, RankReport)]
        job.supervision.deliver([rank_0])
        job.step()
        assert job.settled().steps == []
        job.supervision.deliver([rank_1])
        job.step()
        (step,) = job.settled().steps
        assert step["comm"]["bytes"] == 15.0

    def test_a_first_step_that_does_not_come_restarts_the_attempt(self, bench: Make) -> None:
        job = bench(recovery={"init_timeout_s": 30.0})
        job.step()
        job.step(29.0)
        assert job.controller.kinds() == []
        job.step(2.0)
        assert job.controller.kinds() == ["restart"]
        assert job.controller.actions[0].incidents[0].kind == "rank_hung"


class TestInPlace:
    def test_a_saturated_layer_goes_to_bf16_on_every_rank(self, bench: Make) -> None:
        job = bench(saturates_from(22))
        job.train(23)
        (action,) = job.controller.actions
        assert action.kind == "layer_fallback" and action.precision == {LAYERS[1]: "bf16"}
        (command,) = job.ranks.commands
        assert command.number == 1 and isinstance(command.order, Rollback)
        assert command.order.to_step == 15, "20 has not been followed by enough healthy steps"
        assert command.order.skip_batches == (22,)
        assert command.order.precision == {LAYERS[0]: "fp8", LAYERS[1]: "bf16"}
        job.train(1)
        assert job.ranks.kills == 0
        assert job.settled().states[-2:] == [("recovering", "INCIDENT"), ("running", "RECOVERED")]
        assert job.controller.steps[-1]["timeline"] == 1
        assert job.controller.steps[-1]["step"] == 15

    def test_recovery_says_how_long_it_took_and_what_it_cost(self, bench: Make) -> None:
        job = bench(saturates_from(22))
        job.train(23)
        job.now += 1.5
        job.ranks.train()
        job.step(9.0)
        told = job.settled()
        detail = told.event("recovered").detail
        spent = told.steps[-1]["time"] - told.actions[0].incidents[0].time
        assert detail["time_to_recover_s"] == spent == pytest.approx(1.6)
        assert detail["steps_lost"] == 22 + 1 - 15
        assert detail["in_place"] is True

    def test_the_action_is_stored_before_its_command_is_posted(self, bench: Make) -> None:
        job = bench(saturates_from(22))
        stored: list[list[str]] = []
        job.ranks.on_post = lambda command: stored.append(list(job.controller.order))
        job.train(23)
        assert stored and "action layer_fallback" in stored[0]

    def test_the_same_steps_without_saturation_are_left_alone(self, bench: Make) -> None:
        job = bench()
        job.train(40)
        assert job.settled().kinds() == [] and job.ranks.commands == []

    def test_reports_of_the_timeline_that_was_left_are_refused(self, bench: Make) -> None:
        job = bench(saturates_from(22))
        job.step()
        job.ranks.train(25)  # ranks are ahead: 23 and 24 ran before the command came
        job.step()
        assert max(s["step"] for s in job.settled().steps) == 22
        job.train(1)
        detail = job.settled().event("recovered").detail
        assert detail["step"] == 15

    def test_a_bad_batch_is_skipped_and_the_spike_does_not_come_back(self, bench: Make) -> None:
        job = bench(Script(spike=lambda step, batch: batch == 22))
        job.train(60)
        assert job.settled().kinds() == ["rollback"]
        assert job.ranks.ledger == {22}
        assert [s["batch"] for s in job.controller.steps if s["timeline"] == 1][7] == 23

    def test_two_bad_batches_in_a_row_cost_two_rollbacks_and_no_precision(
        self, bench: Make
    ) -> None:
        job = bench(Script(spike=lambda step, batch: batch in (22, 23)))
        job.train(80)
        assert job.settled().kinds() == ["rollback", "rollback"]
        assert job.ranks.ledger == {22, 23, 24, 25}
        assert set(job.ranks.precision.values()) == {"fp8"}

    def test_a_spike_that_stays_climbs_to_bf16_and_pauses_with_a_good_state(
        self, bench: Make
    ) -> None:
        job = bench(Script(spike=lambda step, batch: step >= 22), recovery={"max_lr_cuts": 1})
        job.train(200)
        last = ["whole_bf16", "lower_lr", "pause"]
        assert job.settled().kinds() == ["rollback", "rollback", "rollback", *last]
        assert job.ranks.ledger >= {22, 23, 24, 25, 26, 27, 28, 29, 30}, "a stretch of batches"
        back, stop = job.ranks.commands[-2:]
        assert isinstance(back.order, Rollback) and isinstance(stop.order, Stop)
        assert stop.order.checkpoint
        assert job.controller.states[-1] == ("paused", "BUDGET_SPENT")
        assert job.ranks.closed

    def test_other_data_is_gone_on_with_and_its_level_is_the_usual_one_from_there(
        self, bench: Make
    ) -> None:
        harder = Script(loss=lambda step: 1.0 if step < 22 else 3.0)
        job = bench(harder, recovery={"calm_steps": 40})
        job.train(120)
        answers = ["rollback", "rollback", "rollback", "whole_bf16", "accept"]
        assert job.settled().kinds() == [*answers, "return_to_fp8"]
        assert job.controller.states[-1][0] == "running"
        assert [s["step"] for s in job.controller.steps[-30:]] == list(
            range(job.controller.steps[-1]["step"] - 29, job.controller.steps[-1]["step"] + 1)
        ), "it did not go back again"

    def test_a_nonfinite_step_is_noted_and_nothing_is_commanded(self, bench: Make) -> None:
        job = bench(Script(nonfinite=frozenset({22})))
        job.train(40)
        assert job.settled().kinds() == ["skip_step"]
        assert job.ranks.commands == []
        assert job.controller.states == [("running", "FIRST_STEP")]

    def test_layers_return_to_fp8_after_the_calm_stretch(self, bench: Make) -> None:
        job = bench(Script(saturated=lambda s, name: s == 22 and name == LAYERS[1]))
        job.train(23 + 7 + 20)
        assert job.settled().kinds() == ["layer_fallback"]
        job.train(1)
        assert job.settled().kinds() == ["layer_fallback", "return_to_fp8"]
        order = job.ranks.commands[-1].order
        assert isinstance(order, SetPrecision) and order.precision == {LAYERS[1]: "fp8"}
        job.train(2)
        assert job.ranks.precision[LAYERS[1]] == "fp8"

    def test_a_restart_from_before_a_return_still_runs_the_layer_in_fp8(self, bench: Make) -> None:
        job = bench(Script(saturated=lambda s, name: s == 22 and name == LAYERS[1]))
        job.train(23 + 7 + 21)
        assert job.settled().kinds() == ["layer_fallback", "return_to_fp8"]
        job.ranks.lose(0)
        job.step()
        job.step()
        assert job.ranks.attempts[-1][0].precision == {LAYERS[1]: "fp8"}, (
            "the copy it starts from knows it in BF16"
        )

    def test_an_incident_before_the_first_snapshots_restarts_further_back(
        self, bench: Make
    ) -> None:
        job = bench(saturates_from(22))
        job.step()
        keep = job.supervision.deliver
        job.ranks.deliver = lambda reports: keep(
            [r for r in reports if getattr(r, "tier", "") != "ring"]
        )
        job.train(23)
        (action,) = job.settled().actions
        assert not action.in_place and action.to_step == 22
        job.step()
        assert job.ranks.attempts[-1][0].restore == RestorePoint(20, "memory", 1, 0)
        assert job.ranks.attempts[-1][0].precision == {LAYERS[1]: "bf16"}
        assert job.ranks.attempts[-1][0].ledger == (22,)


class TestEarlyTroubles:
    def test_a_layer_leaves_fp8_where_training_is_and_returns_after_the_calm_stretch(
        self, bench: Make
    ) -> None:
        job = bench(Script(flushed=lambda step, layer: step >= 30 and layer == LAYERS[1]))
        job.train(40)
        assert job.settled().kinds() == ["early_fallback"]
        assert job.ranks.commands[-1].order == SetPrecision({LAYERS[1]: "bf16"})
        assert job.ranks.timeline == 0 and job.ranks.step == 40
        assert ("recovering", "INCIDENT") not in job.controller.states
        event = job.controller.event("early_fallback")
        assert f"{LAYERS[1]} computes in BF16 from here on" in event.message
        view = job.supervision._journal.view(JobState.RUNNING)
        assert "Layers to BF16" in render_report(view)


class TestReplicasThatDiffer:
    def test_are_restarted_from_the_last_step_at_which_they_did_not(self, bench: Make) -> None:
        job = bench(Script(differs=lambda step: step == 37))
        job.train(38)
        job.settled()
        job.step()
        (action,) = [a for a in job.controller.actions if a.kind == "restart"]
        assert (action.to_step, action.in_place, action.incidents[0].ranks) == (36, False, (0, 1))
        restore = job.ranks.attempts[-1][0].restore
        assert len(job.ranks.attempts) == 2
        assert restore is not None and restore.step <= 36


class TestExchange:
    def coarse_until(self, step: int) -> Script:
        return Script(coarse=lambda s: 20 <= s < step)

    def test_a_coarse_exchange_falls_back_in_place_and_is_told(self, bench: Make) -> None:
        job = bench(self.coarse_until(28))
        job.train(29)
        assert job.settled().kinds() == ["exchange_bf16"]
        order = job.ranks.commands[-1].order
        assert order == SetExchange("bf16") and len(job.ranks.commands) == 1
        assert job.ranks.timeline == 0 and job.ranks.step == 29
        event = job.controller.event("exchange_bf16")
        assert event.detail["exchange"] == "bf16" and "limits 4 %" in event.message
        assert ("recovering", "INCIDENT") not in job.controller.states
        assert job.supervision.status()["exchange"] == "bf16"
        view = job.supervision._journal.view(JobState.RUNNING)
        assert summarize(view)["gradient_exchange"] == "bf16"
        assert "Gradient exchange to BF16" in render_report(view)

    def test_it_returns_after_the_calm_stretch_and_stays_away_the_second_time(
        self, bench: Make
    ) -> None:
        job = bench(self.coarse_until(200))
        job.train(27 + 20)
        assert job.settled().kinds() == ["exchange_bf16"]
        job.train(1)
        assert job.settled().kinds() == ["exchange_bf16", "exchange_fp8"]
        job.train(90)
        assert job.settled().kinds() == ["exchange_bf16", "exchange_fp8", "exchange_bf16"]
        assert job.ranks.exchange == "bf16"

    def test_without_a_budget_it_is_noted_once_and_nothing_is_commanded(self, bench: Make) -> None:
        job = bench(self.coarse_until(200), recovery={"max_exchange_fallbacks": 0})
        job.train(60)
        assert job.settled().kinds() == ["none"]
        assert not job.ranks.commands

    def test_a_restart_of_ranks_keeps_it(self, bench: Make) -> None:
        job = bench(self.coarse_until(28))
        job.train(31)
        assert job.ranks.attempts[-1][0].exchange == "fp8"
        job.ranks.lose(0)
        job.step()
        job.step()
        assert {a.exchange for a in job.ranks.attempts[-1]} == {"bf16"}

    def test_what_the_first_attempt_measured_is_stored_and_holds_for_all(self, bench: Make) -> None:
        job = bench(communication_data_type="auto")
        job.step()
        assert {a.exchange for a in job.ranks.attempts[-1]} == {None}
        told = (1, 0, 0, 0, 0.0, "bf16", "8 elements take 2 ms in FP8 and 1 ms in BF16")
        job.supervision.deliver([ExchangeReport(*told)])
        job.train(12)
        (action,) = job.settled().actions
        assert (action.kind, action.exchange, action.step) == ("exchange_chosen", "bf16", 0)
        assert "Gradients cross the network in BF16: 8 elements" in action.reason
        assert job.controller.order.index("action exchange_chosen") < job.controller.order.index(
            "state running"
        )
        job.supervision.deliver([ExchangeReport(*told[:5], "fp8", "again")])
        job.ranks.lose(0)
        job.step()
        job.step()
        assert {a.exchange for a in job.ranks.attempts[-1]} == {"bf16"}
        job.settled()
        job.take_over(job.controller.next_attempt("scripted-000001", 2, "supervisor lost"))
        job.step()
        assert {a.exchange for a in job.ranks.attempts[-1]} == {"bf16"}
        assert "Gradient exchange chosen" in render_report(
            job.supervision._journal.view(JobState.RUNNING)
        )

    def test_a_new_supervisor_keeps_it_and_brings_it_back(self, bench: Make) -> None:
        job = bench(self.coarse_until(28))
        job.train(31)
        job.settled()
        job.take_over(job.controller.next_attempt("scripted-000001", 1, "supervisor lost"))
        job.step()
        assert {a.exchange for a in job.ranks.attempts[-1]} == {"bf16"}
        job.train(24)
        assert job.settled().kinds()[-1] == "exchange_fp8"


def test_reports_may_come_from_many_threads(bench: Make) -> None:
    job = bench()
    job.step()
    kept: list[Any] = []
    job.ranks.deliver = kept.extend
    job.ranks.train(50)
    threads = [
        threading.Thread(
            target=lambda r=rank: [
                job.supervision.deliver([x]) for x in kept if getattr(x, "rank", None) == r
            ]
        )
        for rank in range(WORLD)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    job.step()
    assert [s["step"] for s in job.settled().steps] == list(range(50))


def test_commands_are_numbered_without_gaps(bench: Make) -> None:
    job = bench(Script(spike=lambda step, batch: step >= 22), recovery={"max_lr_cuts": 1})
    numbers: list[Command] = []
    job.ranks.on_post = numbers.append
    job.train(200)
    assert [c.number for c in numbers] == list(range(1, len(numbers) + 1))
