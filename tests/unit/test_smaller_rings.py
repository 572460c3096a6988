"""Rings for which nodes had no room: what can be gone back to is what the ranks hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from launch.commands import RingReport, Rollback
from orchestrator.replay.replay import replay
from tests.unit.scripted_job import LAYERS, Bench, Make, Script
from tests.unit.stored_job import StoredJob

SATURATES = Script(saturated=lambda step, name: step >= 22 and name == LAYERS[1])


def with_rings_of(job: Bench, kept: int) -> Bench:
    """Its ranks tell so as they start."""
    if not job.ranks.running:
        job.step()
    attempt = job.ranks.assignments[0].attempt
    job.ranks.deliver([RingReport(attempt, job.ranks.timeline, 0, job.ranks.step, kept)])
    return job


def restorable(job: Bench) -> list[int]:
    found = job.supervision.status()["restorable"]
    assert isinstance(found, list)
    return [step for step, _ in found]


def test_ranks_go_back_in_place_to_what_a_smaller_ring_still_holds(bench: Make) -> None:
    job = with_rings_of(bench(SATURATES), 3)
    job.train(22)
    assert restorable(job) == [15, 20], "of 0, 5, …, 20 those are with the ranks"
    job.train(1)
    (action,) = job.settled().actions
    (command,) = job.ranks.commands
    assert isinstance(command.order, Rollback) and command.order.to_step == action.to_step == 15
    smallest = with_rings_of(bench(SATURATES), 2)
    smallest.train(23)
    (action,) = smallest.settled().actions
    assert (action.to_step, action.in_place) == (20, True), "15, which is certified, is gone"


def test_it_is_told_once_which_attempt_holds_fewer(bench: Make) -> None:
    job = with_rings_of(bench(), 3)
    with_rings_of(job, 3).train(2)
    (event,) = [e for e in job.settled().events if e.kind == "fewer_snapshots"]
    assert event.detail == {"attempt": 1, "kept": 3, "keep": 6}
    assert event.message == (
        "The ranks of attempt 1 hold 3 snapshots each: their nodes have no memory for "
        "snapshots.keep: 6, so that they can go back less far without a restart."
    )


def test_the_attempt_after_it_is_taken_to_hold_as_many_as_ever(bench: Make) -> None:
    job = with_rings_of(bench(), 2)
    job.train(22)
    assert restorable(job) == [20]
    job.ranks.lose(0)
    job.step()
    job.train(22)
    assert restorable(job) == [20, 25, 30, 35, 40]


def test_a_replay_knows_what_the_ranks_held(tmp_path: Path) -> None:
    job = StoredJob(tmp_path, SATURATES)
    try:
        with_rings_of(job, 2)
        job.train(40)
        assert replay(job.trace()).exact
        (begun,) = job.trace().attempts
        unknown = replace(job.trace(), attempts=(replace(begun, kept=None),))
        assert not replay(unknown).exact, "it would go back to a snapshot that was gone"
    finally:
        job.close()
