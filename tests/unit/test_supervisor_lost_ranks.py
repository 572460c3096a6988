"""Ranks that die, hang or fail, and copies that are damaged: what the supervisor goes on from."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.commands import (
    CopyRefused,
    RestoredOlder,
    RestorePoint,
)
from launch.data import DataAwayError
from launch.process_group import JoinError
from launch.rank_errors import in_one_line
from launch.rank_group import RankEnd
from launch.snapshots import DamagedSnapshotError, SnapshotKey
from launch.worker import failure_of
from monitoring.job_view import JobView
from monitoring.records import StepRecord
from monitoring.summary import summarize
from orchestrator.controller.lost_supervisor import supervisor_lost
from orchestrator.controller.supervisors import LastWords
from orchestrator.recovery.policy import decide
from orchestrator.spec.config import RecoveryConfig
from orchestrator.supervision.copy_troubles import GATHER_S
from orchestrator.supervision.lost_ranks import died
from orchestrator.supervision.phases import Phase
from orchestrator.supervision.supervision import BLAME_S, NODE_BLAME_S
from tests.unit.recovery_cases import incident
from tests.unit.scripted_job import LAYERS, WORLD, Bench, Make, Script


def saturates_from(step: int, layer: str = LAYERS[1]) -> Script:
    return Script(saturated=lambda s, name: s >= step and name == layer)


def outlive(job: Bench, steps: int) -> None:
    """Ranks go on for a moment after their supervisor died."""
    job.ranks.deliver = lambda reports: None
    job.ranks.running = True
    job.ranks.train(steps)


def after_a_stale_handle(bench: Make) -> Bench:
    """A job whose storage was away for a moment, and which has rested and begun again."""
    job = bench()
    job.train(12)
    job.ranks.fail(0, failure_of(0, 12, OSError(116, "Stale file handle"), {}))
    job.step()
    job.step(BLAME_S)
    while not job.ranks.running:
        job.step(1.0)
    return job


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

    @pytest.mark.parametrize(
        "error", [ValueError("no such layer"), DataAwayError("/typo does not exist")]
    )
    def test_an_error_of_the_ranks_themselves_fails_the_job_the_second_time(
        self, bench: Make, error: Exception
    ) -> None:
        job = bench()
        for _ in range(2):
            job.step()
            for rank in range(WORLD):
                cause = failure_of(rank, 0, error, {})
                job.ranks.fail(rank, cause)
                job.ranks.ends[rank] = replace(job.ranks.ends[rank], error=in_one_line(cause))
            job.step()
            job.step(BLAME_S)
        assert job.controller.kinds() == ["restart", "fail"]
        assert job.controller.states[-1] == ("failed", "ERROR")
        assert "Ranks 0, 1 raised" in job.controller.actions[-1].incidents[0].message

    @pytest.mark.parametrize("error", [DataAwayError("/data does not exist"), OSError(5, "EIO")])
    def test_a_storage_that_is_away_is_waited_for_longer_each_time_and_fails_no_job(
        self, bench: Make, error: Exception
    ) -> None:
        job = bench()
        job.train(12)
        rests = []
        for _ in range(4):
            for rank in range(WORLD):
                job.ranks.fail(rank, failure_of(rank, 12, error, {}))
            job.step()
            job.step(BLAME_S)
            if job.supervision.phase is Phase.OVER:
                break
            began = job.now
            while not job.ranks.running:
                job.step(1.0)
            rests.append(job.now - began)
        assert rests == pytest.approx([30, 120, 480], abs=1.5)
        told = job.controller
        assert told.kinds() == ["restart", "restart", "restart", "pause"]
        assert told.states[-1] == ("paused", "BUDGET_SPENT")
        assert "after 120 s, in which what is away may come back" in told.actions[1].reason
        assert all(a.incidents[0].evidence["raised"] for a in told.actions), "no node is accused"

    def test_a_storage_that_comes_back_costs_the_restarts_alone(self, bench: Make) -> None:
        job = after_a_stale_handle(bench)
        job.train(10)
        job.ranks.lose(1)
        job.step()
        job.step()
        assert job.ranks.running, "what is no fault of the surroundings is not waited for"
        assert job.settled().kinds() == ["restart", "restart"]

    def test_a_new_supervisor_of_a_job_that_has_trained_since_starts_at_once(
        self, bench: Make
    ) -> None:
        job = after_a_stale_handle(bench)
        job.train(50)
        attempt = job.settled().attempt
        job.supervision.close()
        job.take_over(job.controller.next_attempt("scripted-000001", attempt, "supervisor lost"))
        job.step()
        job.step()
        assert job.ranks.running

    @pytest.mark.parametrize("spoke", [False, True])
    def test_who_did_not_come_to_the_meeting_is_accused_and_nobody_who_waited(
        self, bench: Make, spoke: bool
    ) -> None:
        job = bench()
        job.train(12)
        job.ranks.lose(1)
        job.step()
        for _ in range(3):
            job.step()
            # Rank 1 says nothing; or the link is cut, and each names the other.
            late = JoinError("rank 1 did not come to 10.0.0.1:29500 within 60 s", (1,))
            alone = JoinError("rank 0 was not reached at 10.0.0.1:29500 within 60 s", (0,))
            said = (late, alone) if spoke else (late,)
            for rank, error in enumerate(said):
                job.ranks.fail(rank, error)
                cause = failure_of(rank, 12, error, {})
                job.ranks.ends[rank] = RankEnd(rank, "raised", None, in_one_line(cause), cause)
            job.step()
            job.step(NODE_BLAME_S)
        told = job.settled()
        assert told.kinds() == ["restart", "restart", "restart", "pause"]
        incident = told.actions[-1].incidents[0]
        assert incident.ranks == (() if spoke else (1,)) and not incident.evidence.get("raised")
        assert incident.message.startswith("Rank 0 raised: JoinError: rank 1 did not come")

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


@pytest.mark.parametrize(
    ("said", "accused"),
    [
        # Rank 3 never came.
        ({0: (3,), 1: (), 2: ()}, (3,)),
        # Rank 0 can't be reached by rank 3, nor the other way round.
        ({0: (3,), 1: (), 2: (), 3: (0,)}, ()),
        # Rank 0's node is cut off from both others.
        ({0: (1, 2), 1: (0,), 2: (0,)}, ()),
        # Rank 0 can't open the meeting's address.
        ({0: (0,), 1: (0,), 2: (0,)}, (0,)),
        # Rank 0 says nothing.
        ({1: (0,), 2: (0,)}, (0,)),
    ],
)
def test_of_ranks_that_did_not_meet_those_are_accused_who_can_alone_have_done_it(
    said: dict[int, tuple[int, ...]], accused: tuple[int, ...]
) -> None:
    ends = []
    for rank, absent in said.items():
        cause = failure_of(rank, 0, JoinError("not all came", absent), {})
        ends.append(RankEnd(rank, "raised", error=in_one_line(cause), cause=cause))
    facts: Any = SimpleNamespace(step=5, attempt=2, timeline=0)
    assert died(ends, facts, 0.0).ranks == accused


def test_keys_of_other_jobs_ranks_do_not_complete_a_step() -> None:
    from orchestrator.saved.restore import points_in_memory

    keys = [SnapshotKey("j", 1, 0, 0, 5), SnapshotKey("j", 2, 0, 1, 5)]
    assert points_in_memory(keys, 2) == []
    assert points_in_memory([*keys, SnapshotKey("j", 2, 0, 0, 5)], 2) == [
        RestorePoint(5, "memory", 2, 0)
    ]
    assert points_in_memory([SnapshotKey("j", 1, 0, rank, 5) for rank in range(3)], 2) == []


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
        job.step(GATHER_S)
        message = job.settled().event("copy_passed_over").message
        assert message == (
            "Rank 1 leaves out the copy of step 20 in the node's own keeper, and takes another "
            "one: digest is a…, b… was."
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
        detectors = job.supervision._job.bank.state_dict()
        job.supervision.deliver([RestoredOlder(2, 0, 0, older.step, older)])
        job.step()
        assert job.supervision._job.bank.state_dict() == detectors, "told again, it is no news"
        assert [e.kind for e in job.settled().events].count("restored_older") == 1
        again = [s["step"] for s in job.controller.steps if s["attempt"] == 2]
        assert again[0] == 15 and job.controller.event("recovered").detail["steps_lost"] == 8
        job.ranks.lose(0)
        job.step()
        job.step()
        restore = job.ranks.attempts[-1][0].restore
        assert restore is not None and restore != first, "it is never offered again"
