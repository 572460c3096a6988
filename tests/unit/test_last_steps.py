"""Trouble in the last steps, which the ranks may have left behind when it is found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.checkpoint_writer import WRITE_TIMEOUT_S
from launch.checkpoints import list_checkpoints
from launch.commands import Rollback, SnapshotReport
from launch.snapshots import MissingSnapshotError
from orchestrator.recovery.controls import Control
from orchestrator.replay.replay import replay
from orchestrator.spec.config import RecoveryConfig
from orchestrator.supervision.attempt import step_timeout_s
from orchestrator.supervision.job_end import DRAIN_S
from orchestrator.supervision.phases import Phase
from orchestrator.supervision.supervision import BLAME_S
from tests.unit.scripted_job import LAYERS, Bench, Make, Script
from tests.unit.stored_job import StoredJob

STEPS = {"steps": 40}


def saturates_from(step: int) -> Script:
    return Script(saturated=lambda s, name: s >= step and name == LAYERS[1])


def to_the_end(job: Bench) -> None:
    """All steps that are left, and the job's end."""
    while job.ranks.step < 40 or not job.ranks.running:
        job.train(1)
    job.ranks.finish()
    job.step()


def checkpoints(folder: Path) -> list[int]:
    return [c.step for c in list_checkpoints(folder)]


@pytest.mark.parametrize("found", ["by a pass", "while the ranks end", "after their end"])
def test_trouble_in_the_last_step_is_undone_by_another_attempt(
    bench: Make, tmp_path: Path, found: str
) -> None:
    job = bench(saturates_from(39), training=STEPS)
    job.train(39)
    if found == "by a pass":
        job.train(1)
    else:
        job.ranks.train(1)
        if found == "after their end":
            job.ranks.finish()
        job.step()
    (action,) = job.settled().actions
    assert (action.kind, action.in_place, action.to_step) == ("layer_fallback", False, 39)
    assert not job.ranks.commands, "nobody would have carried it out"
    job.step()
    first = job.ranks.attempts[-1][0]
    assert first.restore is not None and first.restore.step == 35
    assert first.ledger == (39,) and first.precision == {LAYERS[1]: "bf16"}
    to_the_end(job)
    assert job.settled().states[-1] == ("succeeded", "STEPS_DONE")
    assert checkpoints(tmp_path) == [40]
    assert not [e for e in job.controller.events if e.kind == "unrecorded"]


def test_a_rollback_that_comes_too_late_is_done_by_the_next_attempt(
    bench: Make, tmp_path: Path
) -> None:
    job = bench(saturates_from(37), training=STEPS)
    job.train(37)
    kept: list[Any] = []
    job.ranks.deliver = kept.extend
    job.ranks.train(3)
    # The supervisor learns of step 37 while the ranks do their last one.
    job.supervision.deliver([r for r in kept if r.step == 37])
    job.step()
    (action,) = job.settled().actions
    assert action.in_place and isinstance(job.ranks.commands[-1].order, Rollback)
    job.ranks.deliver = job.supervision.deliver
    job.supervision.deliver([r for r in kept if r.step > 37])
    job.ranks.finish()
    job.step()
    assert job.settled().kinds() == ["layer_fallback"]
    told = job.controller.event("way_back_missed")
    assert "had done their last step before they could go back to step 30" in told.message
    job.step()
    first = job.ranks.attempts[-1][0]
    assert first.restore is not None and first.restore.step == 30
    assert first.ledger == (37,) and first.timeline == 1
    to_the_end(job)
    assert job.settled().states[-1] == ("succeeded", "STEPS_DONE")
    assert checkpoints(tmp_path) == [40]
    assert job.controller.event("recovered").detail["in_place"] is False
    assert not [e for e in job.controller.events if e.kind == "unrecorded"]


def test_a_pause_that_comes_too_late_says_what_its_resume_starts_from(bench: Make) -> None:
    spent = {"max_layer_fallbacks": 0, "max_lr_cuts": 0, "max_whole_fallbacks": 0}
    job = bench(saturates_from(37), training=STEPS, recovery={**spent, "max_rollbacks": 0})
    job.train(37)
    kept: list[Any] = []
    job.ranks.deliver = kept.extend
    job.ranks.train(3)
    job.supervision.deliver([r for r in kept if r.step == 37])
    job.step()
    assert job.settled().kinds() == ["pause"] and job.supervision.phase is Phase.STOPPING
    job.ranks.finish()
    job.step(0.1)
    job.step(DRAIN_S + 1)
    assert job.controller.states[-1] == ("paused", "BUDGET_SPENT")
    assert "before they could go back to step 30" in job.controller.event("ended").message


def test_a_job_without_the_state_of_its_last_step_on_disk_has_not_succeeded(bench: Make) -> None:
    job = bench(Script(disk_full=True), training=STEPS)
    job.train(40)
    job.ranks.finish()
    job.step()
    assert job.settled().states[-1] == ("failed", "ERROR")
    told = job.controller.event("ended").message
    assert "no checkpoint of step 40" in told and "octavo resume scripted-000001" in told


def test_what_a_person_asks_in_the_last_moment_is_no_command_to_ranks_that_are_done(
    bench: Make,
) -> None:
    job = bench(training=STEPS)
    job.train(40)
    job.supervision.ask([Control("k", "rollback", "ada", 0.0, to_step=30)])
    job.step()
    assert not job.ranks.commands and job.settled().kinds() == []


def test_a_checkpoint_that_takes_long_at_the_end_is_no_hung_step(bench: Make) -> None:
    job = bench(training=STEPS, recovery={"step_timeout_s": 5.0})
    job.train(40)
    job.step(WRITE_TIMEOUT_S)
    assert job.settled().kinds() == []
    job.step(step_timeout_s(RecoveryConfig(step_timeout_s=5.0), ()) + 60.0)
    assert job.settled().kinds() == ["restart"], "every wait has an end"


def test_a_last_checkpoint_may_take_as_long_as_those_before_it_took(bench: Make) -> None:
    job = bench(Script(nbytes=500_000_000_000), training=STEPS)
    job.train(21)
    for _ in range(30):
        job.ranks.train()
        job.step(40.0)
        if job.ranks.step == 38:
            break
    of = (job.ranks.attempt, job.ranks.timeline)
    job.supervision.deliver(
        [SnapshotReport(*of, rank, 20, "disk", 500_000_000_000, "d", "p") for rank in range(2)]
    )
    job.step()
    job.train(40 - job.ranks.step)
    job.step(2 * WRITE_TIMEOUT_S)
    assert job.settled().kinds() == [] and job.supervision.phase is Phase.TRAINING
    job.ranks.finish()
    job.step()
    assert job.settled().states[-1] == ("succeeded", "STEPS_DONE")


def test_a_ring_that_has_gone_on_costs_an_attempt_and_no_budget(bench: Make) -> None:
    job = bench(saturates_from(22), recovery={"max_restarts": 0})
    job.train(23)
    for rank in range(2):
        missing = MissingSnapshotError(rank, 15, "ring", "the ring holds steps [20, 25]")
        job.ranks.fail(rank, missing)
    job.step()
    job.step(BLAME_S)
    job.step()
    assert job.settled().kinds() == ["layer_fallback"]
    assert "held step 15 no longer" in job.controller.event("way_back_missed").message
    first = job.ranks.attempts[-1][0]
    assert first.restore is not None and (first.restore.step, first.restore.tier) == (15, "memory")
    assert first.ledger == (22,)


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[StoredJob]:
    job = StoredJob(tmp_path, saturates_from(37), training=STEPS)
    yield job
    job.close()


@pytest.mark.parametrize("late", [False, True])
def test_a_replay_decides_the_same(stored: StoredJob, late: bool) -> None:
    job = stored
    job.train(37)
    kept: list[Any] = []
    job.ranks.deliver = kept.extend
    job.ranks.train(3)
    job.ranks.deliver = job.supervision.deliver
    if late:
        job.supervision.deliver([r for r in kept if r.step == 37])
        job.step()
        kept = [r for r in kept if r.step > 37]
    job.ranks.finish()
    job.supervision.deliver(kept)
    job.step()
    to_the_end(job)
    found = replay(job.trace())
    (decision,) = found.decisions
    assert decision.stored is not None and decision.stored.in_place is late
    assert found.exact
