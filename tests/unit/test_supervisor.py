"""The supervisor one pass at a time, against ranks and a controller that break on demand."""

from __future__ import annotations

import json
import math
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.commands import (
    Command,
    CopyRefused,
    ExchangeReport,
    RankReport,
    RestoredOlder,
    RestorePoint,
    Rollback,
    SetExchange,
    SetPrecision,
    Stop,
)
from launch.snapshots import DamagedSnapshotError, SnapshotKey
from monitoring.job_view import JobView
from monitoring.records import StepRecord
from monitoring.report import render_report
from monitoring.summary import summarize
from orchestrator.controller.lost_supervisor import supervisor_lost
from orchestrator.controller.supervisors import LastWords
from orchestrator.lifecycle import JobState
from orchestrator.node_slot import NodeSlot
from orchestrator.recovery.policy import decide
from orchestrator.spec.config import RecoveryConfig
from orchestrator.supervision.phases import Phase
from orchestrator.supervision.stop_time import LEAST_STOP_S
from orchestrator.supervision.supervision import BLAME_S, NODE_BLAME_S
from tests.unit.scripted_job import LAYERS, WORLD, Bench, Make, Script, ScriptedRanks
from tests.unit.test_recovery import incident


def saturates_from(step: int, layer: str = LAYERS[1]) -> Script:
    return Script(saturated=lambda s, name: s >= step and name == layer)


def outlive(job: Bench, steps: int) -> None:
    """Ranks go on for a moment after their supervisor died."""
    job.ranks.deliver = lambda reports: None
    job.ranks.running = True
    job.ranks.train(steps)


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


class TestLostRanks:
    def test_a_dead_rank_ends_the_others_and_the_newest_copies_are_taken(self, bench: Make) -> None:
        job = bench()
        job.train(23)
        job.ranks.lose(1)
        job.step()
        assert job.controller.kinds() == ["restart"] and job.ranks.kills == 1
        assert job.controller.actions[0].incidents[0].ranks == (1,)
        job.train(1)
        again = job.ranks.attempts[-1]
        assert again[0].restore == RestorePoint(20, "memory", 1, 0)
        assert {a.attempt for a in again} == {2}
        assert again[0].master_port != job.ranks.attempts[0][0].master_port
        assert [s for s, _ in job.settled().states] == ["running", "recovering", "running"]
        assert job.controller.states[-1] == ("running", "FIRST_STEP")
        assert job.controller.event("recovered").detail["steps_lost"] == 23 - 20

    def test_an_error_that_ends_with_a_full_stop_is_told_with_one(self, bench: Make) -> None:
        job = bench()
        job.train(3)
        job.ranks.lose(1)
        job.ranks.ends[1] = replace(job.ranks.ends[1], error="The actor died.")
        job.step()
        told = job.settled()
        assert told.event("incident").message == "Rank 1 died: The actor died."
        assert told.actions[0].reason.endswith("that all ranks have: Rank 1 died: The actor died.")

    def test_a_rank_that_dies_during_a_restart_is_part_of_the_same_recovery(
        self, bench: Make
    ) -> None:
        job = bench()
        job.train(23)
        job.ranks.lose(1)
        job.step()
        job.ranks.lose(0)
        job.step()
        job.train(1)
        told = job.settled()
        assert told.kinds() == ["restart", "restart"]
        (recovered,) = [e for e in told.events if e.kind == "recovered"]
        assert recovered.detail["steps_lost"] == 23 - 20
        assert recovered.detail["time_to_recover_s"] == pytest.approx(0.2), "of the ranks' clock"

    def test_steps_lost_are_the_recorded_ones_as_in_the_summary(self, bench: Make) -> None:
        job = bench()
        job.train(23)
        reports: list[Any] = []
        job.ranks.deliver = reports.extend
        job.ranks.train()
        job.supervision.deliver(
            [r for r in reports if getattr(r, "rank", 1) == 0]  # rank 1 dies before it reports
        )
        job.step()
        job.ranks.lose(1)
        job.ranks.deliver = job.supervision.deliver
        job.step()
        job.train(5)
        told = job.settled()
        view = JobView(
            "scripted-000001",
            "running",
            {},
            steps=[StepRecord.from_json(step) for step in told.steps],
            actions=[action.to_json() for action in told.actions],
        )
        lost = summarize(view)["steps_lost"]
        assert told.event("recovered").detail["steps_lost"] == lost == 23 - 20

    def test_a_healthy_group_is_not_ended(self, bench: Make) -> None:
        job = bench()
        job.train(23)
        assert job.ranks.kills == 0 and len(job.ranks.attempts) == 1

    def test_a_step_that_some_rank_has_no_copy_of_is_not_taken(self, bench: Make) -> None:
        job = bench()
        job.train(23)
        job.ranks.held = [k for k in job.ranks.held if (k.rank, k.step) != (1, 20)]
        job.ranks.lose(0)
        job.step()
        job.step()
        assert job.ranks.attempts[-1][0].restore == RestorePoint(15, "memory", 1, 0)

    def test_without_any_copy_the_seed_is_where_it_starts(self, bench: Make) -> None:
        job = bench()
        job.train(23)
        job.ranks.held = []
        job.ranks.lose(0)
        job.step()
        job.step()
        assert job.ranks.attempts[-1][0].restore is None

    def test_copies_of_a_branch_that_was_rolled_back_are_not_taken(self, bench: Make) -> None:
        job = bench(saturates_from(22))
        job.train(23)
        assert job.controller.kinds() == ["layer_fallback"]
        job.ranks.lose(0)
        job.step()
        job.step()
        assert job.ranks.attempts[-1][0].restore == RestorePoint(15, "memory", 1, 0)
        assert job.ranks.attempts[-1][0].precision == {LAYERS[1]: "bf16"}

    def test_a_damaged_copy_is_told_and_the_next_one_is_taken(self, bench: Make) -> None:
        job = bench()
        job.train(23)
        job.ranks.lose(0)
        job.step()
        job.step()
        damage = DamagedSnapshotError(1, 20, "memory", "digest differs")
        job.ranks.fail(1, damage)
        job.step()
        job.step(BLAME_S)
        assert job.settled().event("copy_refused").detail == {"step": 20, "tier": "memory"}
        job.step()
        assert job.ranks.attempts[-1][0].restore == RestorePoint(15, "memory", 1, 0)

    def test_a_checkpoint_that_is_none_any_more_is_told(self, bench: Make) -> None:
        job = bench()
        job.train(23)
        folder = Path(job.supervision.attempt.resume.job_dir) / "checkpoints" / "step-00000020"
        folder.mkdir(parents=True)
        job.ranks.lose(0)
        job.step()
        job.step()
        told = job.settled().event("copy_refused")
        assert told.detail == {"checkpoint": "step-00000020", "tier": "disk"}
        assert "manifest.json" in told.message

    def test_a_rollback_to_a_damaged_copy_restarts_from_the_one_outside_the_rank(
        self, bench: Make
    ) -> None:
        job = bench(saturates_from(22))
        job.train(23)
        job.ranks.fail(1, DamagedSnapshotError(1, 15, "ring", "its digest differs"))
        job.step()
        job.step(BLAME_S)
        job.step()
        assert job.settled().kinds() == ["layer_fallback", "restart"]
        assert job.ranks.attempts[-1][0].restore == RestorePoint(15, "memory", 1, 0)

    def test_a_peers_broken_connection_is_blamed_on_the_rank_that_died(self, bench: Make) -> None:
        job = bench()
        job.train(12)
        job.ranks.fail(0, RuntimeError("gloo: Connection closed by peer"))
        job.step(0.1)
        # As long as it takes to hear that a whole node is gone.
        job.step(2.0)
        assert job.controller.kinds() == [], "the cause may still be on its way"
        job.ranks.lose(1)
        job.step(0.1)
        incident = job.controller.actions[0].incidents[0]
        assert incident.ranks == (1,) and "rank 1 died" in incident.message.lower()

    def test_a_broken_connection_that_nobody_explains_is_told_as_it_is(self, bench: Make) -> None:
        job = bench()
        job.train(12)
        job.ranks.fail(0, RuntimeError("gloo: Connection reset by peer"))
        job.step(0.1)
        job.step(NODE_BLAME_S)
        incident = job.controller.actions[0].incidents[0]
        assert incident.ranks == (0,) and "reset by peer" in incident.message

    def test_an_error_of_the_ranks_themselves_fails_the_job_the_second_time(
        self, bench: Make
    ) -> None:
        job = bench()
        for _ in range(2):
            job.step()
            for rank in range(WORLD):
                job.ranks.fail(rank, FileNotFoundError("no such corpus"))
            job.step()
            job.step(BLAME_S)
        assert job.controller.kinds() == ["restart", "fail"]
        assert job.controller.states[-1] == ("failed", "ERROR")
        assert "Ranks 0, 1 raised" in job.controller.actions[-1].incidents[0].message

    def test_ranks_that_stop_reporting_are_restarted(self, bench: Make) -> None:
        job = bench(recovery={"step_timeout_s": 5.0})
        job.train(12)
        job.step(4.0)
        assert job.controller.kinds() == []
        job.step(2.0)
        assert job.controller.kinds() == ["restart"]

    def test_a_rollback_after_a_restart_knows_the_batches_of_before_it(self, bench: Make) -> None:
        job = bench(saturates_from(22))
        job.train(31)
        assert job.settled().kinds() == ["layer_fallback"]
        job.ranks.lose(1)
        job.train(2)
        facts = job.supervision.attempt.facts
        assert [facts.batches[step] for step in (14, 21, 22)] == [14, 21, 23], "22 was left out"
        trouble = incident("slow_divergence", facts.step, 18)
        back = decide([trouble], facts.history(0.0, ()), RecoveryConfig())
        assert back.skip_batches == tuple(facts.batches[s] for s in range(18, facts.step + 1))

    def test_restarts_run_out(self, bench: Make) -> None:
        job = bench(recovery={"max_restarts": 2})
        for _ in range(3):
            job.train(8)
            job.ranks.lose(0)
            job.step()
        assert job.controller.kinds() == ["restart", "restart", "pause"]
        assert job.controller.states[-1] == ("paused", "BUDGET_SPENT")

    def test_a_new_supervisor_goes_on_with_what_the_store_and_the_keepers_hold(
        self, bench: Make
    ) -> None:
        job = bench(saturates_from(22))
        job.train(30)
        job.settled()
        job.supervision.close()
        job.take_over(job.controller.next_attempt("scripted-000001", 1, "supervisor lost"))
        job.step()
        first = job.ranks.attempts[-1][0]
        assert first.restore == RestorePoint(20, "memory", 1, 1)
        assert first.precision == {LAYERS[1]: "bf16"} and first.ledger == (22,)
        job.train(10)
        assert job.settled().kinds() == ["layer_fallback"], "its detectors know what they knew"

    def test_the_recovery_from_a_lost_supervisor_is_told_by_the_next_one(self, bench: Make) -> None:
        job = bench()
        job.train(23)
        job.settled()
        job.supervision.close()
        row = SimpleNamespace(attempt=1, timeline=0, step=22, spec=job.controller.spec)
        lost = supervisor_lost(row, [], job.now, LastWords())  # type: ignore[arg-type]
        assert lost is not None
        job.controller.actions.append(lost)
        job.take_over(job.controller.next_attempt("scripted-000001", 1, lost.reason))
        job.train(1)
        detail = job.settled().event("recovered").detail
        assert (detail["action"], detail["steps_lost"]) == ("restart", 23 - 20)
        assert detail["time_to_recover_s"] == pytest.approx(0.1)

    def test_copies_of_steps_that_nobody_recorded_are_not_taken(self, bench: Make) -> None:
        job = bench()
        job.train(13)
        job.settled()
        job.supervision.close()
        outlive(job, 15)
        assert max(key.step for key in job.ranks.held) == 25
        job.take_over(job.controller.next_attempt("scripted-000001", 1, "supervisor lost"))
        job.step()
        assert job.ranks.attempts[-1][0].restore == RestorePoint(10, "memory", 1, 0)

    def test_a_gap_that_is_cheaper_than_the_way_back_is_no_spike_after_it(
        self, bench: Make
    ) -> None:
        job = bench(
            Script(loss=lambda step: 2.5 + 3.0 * math.exp(-step / 17) + 0.01 * (step % 3)),
            detection={"min_history": 16, "settle_steps": 8},
        )
        job.train(23)
        job.settled()
        job.supervision.close()
        outlive(job, 38)
        job.ranks.held = [key for key in job.ranks.held if key.step > 45]
        job.take_over(job.controller.next_attempt("scripted-000001", 1, "supervisor lost"))
        job.step()
        assert job.ranks.attempts[-1][0].restore == RestorePoint(60, "memory", 1, 0)
        job.train(60)
        assert job.settled().kinds() == []
        assert job.controller.event("unrecorded").detail == {"first": 23, "last": 59}


class TestController:
    def test_a_refusal_ends_the_ranks_and_nothing_more_is_written(self, bench: Make) -> None:
        job = bench()
        job.train(10)
        before = len(job.settled().steps)
        job.controller.fenced = True
        job.ranks.train(3)
        job.step()
        deadline = time.monotonic() + 60
        while job.supervision.phase is not Phase.OVER and time.monotonic() < deadline:
            job.step()
            time.sleep(0.01)
        assert job.supervision.phase is Phase.OVER
        assert job.ranks.closed and len(job.controller.steps) == before

    def test_a_refused_action_is_not_carried_out(self, bench: Make) -> None:
        job = bench(saturates_from(22))
        job.train(22)
        job.settled()
        job.controller.fenced = True
        job.train(1)
        assert job.ranks.commands == [] and job.ranks.closed

    def test_training_goes_on_while_the_controller_restarts_and_nothing_is_lost(
        self, bench: Make
    ) -> None:
        job = bench()
        job.train(5)
        job.settled()
        job.controller.down = 3
        job.train(10)
        assert job.ranks.step == 15
        assert [s["step"] for s in job.settled().steps] == list(range(15))

    def test_an_action_waits_for_the_controller(self, bench: Make) -> None:
        job = bench(saturates_from(22))
        job.train(22)
        job.settled()
        job.controller.down = 2
        job.train(1)
        assert job.controller.kinds() == ["layer_fallback"] and job.controller.down == 0
        assert len(job.ranks.commands) == 1


class TestEnd:
    def test_all_steps_done_succeeds_with_a_report(self, bench: Make, tmp_path: Path) -> None:
        job = bench(training={"steps": 12})
        job.train(12)
        job.ranks.finish()
        job.step()
        assert job.supervision.phase is Phase.OVER
        assert job.controller.states[-1] == ("succeeded", "STEPS_DONE")
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert summary["state"] == "succeeded" and summary["steps"] == 12
        assert (tmp_path / "report.html").stat().st_size > 0

    def test_an_end_that_the_store_refuses_leaves_no_report(
        self, bench: Make, tmp_path: Path
    ) -> None:
        job = bench(training={"steps": 12})
        job.train(12)
        job.settled()
        job.controller.fenced = True
        job.ranks.finish()
        job.step()
        assert job.supervision.phase is Phase.OVER
        assert not (tmp_path / "summary.json").exists()
        assert not (tmp_path / "report.html").exists()

    def test_a_supervisor_that_slept_through_the_next_attempt_leaves_its_report_alone(
        self, bench: Make, tmp_path: Path
    ) -> None:
        job = bench(training={"steps": 40})
        job.train(8)
        job.supervision.ask_stop("cancelled by a user")
        job.step()
        job.settled()
        asleep = job.supervision
        job.controller.attempt += 1
        job.ranks = ScriptedRanks(Script())
        job.ranks.clock = lambda: job.now
        job.take_over(job.controller.resume())
        job.train(40)
        job.ranks.finish()
        job.step()
        left = {name: (tmp_path / name).read_text() for name in ("summary.json", "report.html")}
        assert json.loads(left["summary.json"])["state"] == "succeeded"
        job.now += 600
        asleep.step()
        assert asleep.phase is Phase.OVER
        assert {name: (tmp_path / name).read_text() for name in left} == left

    def test_the_end_waits_for_the_last_reports(self, bench: Make) -> None:
        job = bench(training={"steps": 12})
        job.step()
        kept: list[Any] = []
        job.ranks.deliver = kept.extend
        job.ranks.train(12)
        job.ranks.finish()
        job.step()
        assert job.supervision.phase is Phase.TRAINING
        job.supervision.deliver(kept)
        job.step()
        assert job.supervision.phase is Phase.OVER and len(job.controller.steps) == 12

    def test_a_job_whose_last_state_is_not_on_disk_has_not_succeeded(self, bench: Make) -> None:
        job = bench(training={"steps": 12})
        job.train(12)
        job.ranks.finish("no checkpoint of step 12: OSError: No space left on device")
        job.step()
        assert job.settled().states[-1] == ("failed", "ERROR")
        told = job.controller.event("ended").message
        assert "No space left on device" in told and "octavo resume scripted-000001" in told

    def test_steps_whose_reports_never_came_are_told_at_the_end(self, bench: Make) -> None:
        job = bench(training={"steps": 12})
        job.train(8)
        job.ranks.deliver = lambda reports: None
        job.ranks.train(4)
        job.ranks.finish()
        job.step()
        job.step(11.0)
        assert job.supervision.phase is Phase.OVER
        assert job.settled().event("unrecorded").detail == {"first": 8, "last": 11}
        assert "Steps 8 to 11" in job.controller.event("ended").message

    def test_a_stop_takes_a_checkpoint_first(self, bench: Make) -> None:
        job = bench()
        job.train(8)
        job.supervision.ask_stop("cancelled by a user")
        job.step()
        (command,) = job.ranks.commands
        assert command.order == Stop("cancelled by a user", checkpoint=True)
        assert job.supervision.phase is Phase.STOPPING and not job.ranks.closed
        job.ranks.train()
        job.step()
        assert job.controller.states[-1] == ("cancelled", "ENDED") and job.ranks.closed

    def test_a_stop_before_the_first_step_is_done_at_once(self, bench: Make) -> None:
        job = bench()
        job.step()
        job.supervision.ask_stop("cancelled by a user")
        job.step()
        assert job.controller.states[-1] == ("cancelled", "ENDED") and job.ranks.closed
        assert job.ranks.commands == []

    def test_ranks_that_do_not_stop_are_ended(self, bench: Make) -> None:
        job = bench()
        job.train(8)
        job.supervision.ask_stop("cancelled by a user")
        job.step()
        job.step(LEAST_STOP_S - 1.0)
        assert job.supervision.phase is Phase.STOPPING
        job.step(2.0)
        assert job.controller.states[-1] == ("cancelled", "ENDED") and job.ranks.closed
        assert "without a checkpoint" in job.controller.event("ended").message


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


def test_keys_of_other_jobs_ranks_do_not_complete_a_step() -> None:
    from orchestrator.saved.restore import points_in_memory

    keys = [SnapshotKey("j", 1, 0, 0, 5), SnapshotKey("j", 2, 0, 1, 5)]
    assert points_in_memory(keys, 2) == []
    assert points_in_memory([*keys, SnapshotKey("j", 2, 0, 0, 5)], 2) == [
        RestorePoint(5, "memory", 2, 0)
    ]


def test_commands_are_numbered_without_gaps(bench: Make) -> None:
    job = bench(Script(spike=lambda step, batch: step >= 22), recovery={"max_lr_cuts": 1})
    numbers: list[Command] = []
    job.ranks.on_post = numbers.append
    job.train(200)
    assert [c.number for c in numbers] == list(range(1, len(numbers) + 1))


class TestDamagedCopies:
    def told(self, job: Bench, rank: int, point: RestorePoint | None, tier: Any) -> None:
        job.supervision.deliver([CopyRefused(2, 0, rank, 20, tier, "digest is a…, b… was", point)])

    def restarted(self, bench: Make) -> Bench:
        job = bench()
        job.train(23)
        job.ranks.lose(1)
        job.step()
        job.step()
        assert [p.step for p in job.ranks.attempts[-1][0].fallbacks] == [15, 10, 5, 0]
        return job

    def test_a_copy_that_has_another_one_is_told_and_stays_a_point_to_start_from(
        self, bench: Make
    ) -> None:
        job = self.restarted(bench)
        self.told(job, 1, None, "memory")
        job.train(1)
        message = job.settled().event("copy_passed_over").message
        assert message == (
            "Rank 1's copy of step 20 in its node's keeper is left out, another copy of it is "
            "taken: digest is a…, b… was."
        )
        job.ranks.lose(0)
        job.step()
        job.step()
        assert job.ranks.attempts[-1][0].restore.step == 20  # type: ignore[union-attr]

    def test_ranks_that_go_down_to_an_older_step_cost_no_restart(self, bench: Make) -> None:
        job = self.restarted(bench)
        first, older = job.ranks.attempts[-1][0].restore, job.ranks.attempts[-1][0].fallbacks[0]
        self.told(job, 1, first, "partner")
        job.supervision.deliver([RestoredOlder(2, 0, 0, older.step, older)])
        job.ranks.step = older.step
        job.train(20)
        assert job.settled().kinds() == ["restart"], "the one that the lost rank cost"
        assert "starts at step 15" in job.controller.event("restored_older").message
        again = [s["step"] for s in job.controller.steps if s["attempt"] == 2]
        assert again[0] == 15 and job.controller.event("recovered").detail["steps_lost"] == 8
        job.ranks.lose(0)
        job.step()
        job.step()
        restore = job.ranks.attempts[-1][0].restore
        assert restore is not None and restore != first, "it is never offered again"
