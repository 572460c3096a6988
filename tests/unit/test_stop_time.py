"""A stop waits for its checkpoint as long as the job's own state and disk take, and no longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.attempt_folder import open_attempt
from launch.checkpoint_writer import (
    LEAST_WRITE_RATE,
    MOST_WRITE_S,
    WRITE_TIMEOUT_S,
    CheckpointWriter,
    last_write_s,
)
from launch.commands import SnapshotReport
from launch.digests import digest_of
from launch.snapshots import SnapshotKey
from orchestrator.controller.tending import CANCEL_GRACE_S
from orchestrator.lifecycle import LONGEST_STOP_S
from orchestrator.recovery.controls import Control
from orchestrator.supervision.phases import Phase
from orchestrator.supervision.stop_time import (
    END_MARGIN_S,
    END_TIMEOUT_S,
    LEAST_STOP_S,
    Saves,
    StopTime,
)
from tests.unit.scripted_job import WORLD, Bench, Make, Script

STEP_S = 0.1
"""Of the scripted ranks."""
LARGE = Script(nbytes=6_000_000_000)
"""Two ranks' checkpoint is 12 GB."""


def report(rank: int = 0, step: int = 5, attempt: int = 1, nbytes: int = 10) -> SnapshotReport:
    return SnapshotReport(attempt, 0, rank, step, "ring", nbytes, "d")


def ask(job: Bench, kind: str = "pause", key: str = "k1") -> None:
    job.supervision.ask([Control(key, kind, "alice", job.now, "")])  # type: ignore[arg-type]
    job.step()
    assert job.supervision.phase is Phase.STOPPING


def refusal(job: Bench) -> str:
    (answer,) = [a for a in job.settled().answers if a.state == "refused"][-1:]
    return answer.message


class TestStopTime:
    def test_without_word_of_what_the_state_weighs_it_is_what_a_jobs_end_has(self) -> None:
        assert Saves().stop_time(2, []) == StopTime(LEAST_STOP_S, END_TIMEOUT_S)

    def test_a_small_state_has_the_least(self) -> None:
        saves = Saves()
        saves.sealed(report(), 0.0)
        given = saves.stop_time(2, [])
        assert given.silent_s == pytest.approx(LEAST_STOP_S)
        assert given.most_s == pytest.approx(LEAST_STOP_S)

    def test_it_grows_with_what_all_ranks_write(self) -> None:
        saves = Saves()
        saves.sealed(report(nbytes=10**9), 0.0)
        of_two, of_eight = saves.stop_time(2, []), saves.stop_time(8, [])
        assert of_two.most_s == LEAST_STOP_S + 2e9 / LEAST_WRITE_RATE
        assert of_eight.most_s == LEAST_STOP_S + 8e9 / LEAST_WRITE_RATE
        assert of_two.silent_s == of_eight.silent_s == LEAST_STOP_S + 5.0
        assert of_eight.nbytes == 8 * 10**9

    def test_it_grows_with_what_a_checkpoint_took(self) -> None:
        saves = Saves()
        for rank, ended in ((0, 120.0), (1, 150.0)):
            saves.sealed(report(rank), 100.0)
            saves.written(report(rank), ended)
        assert saves.stop_time(2, []).most_s == LEAST_STOP_S + 3 * 50.0
        for step in range(10, 60, 5):
            saves.sealed(report(step=step), 200.0)
            saves.written(report(step=step), 201.0)
        assert saves.stop_time(2, []).most_s == LEAST_STOP_S + 3 * 1.0, "that was long ago"

    def test_it_has_an_end_however_slow_the_disk_is(self) -> None:
        saves = Saves()
        saves.sealed(report(nbytes=10**13), 0.0)
        assert saves.stop_time(512, []) == StopTime(END_TIMEOUT_S, END_TIMEOUT_S, 512 * 10**13)
        assert saves.end_time(512) == MOST_WRITE_S + END_MARGIN_S
        saves.written(report(nbytes=10**13), 1e6)
        assert saves.stop_time(512, []).most_s == MOST_WRITE_S
        assert saves.end_time(512) == MOST_WRITE_S + END_MARGIN_S

    def test_a_job_whose_checkpoints_take_long_can_stop_and_end(self) -> None:
        saves = Saves()
        saves.sealed(report(nbytes=10**12), 0.0)
        saves.written(report(nbytes=10**12), 1200.0)
        assert saves.stop_time(2, []).most_s == LEAST_STOP_S + 3 * 1200.0
        assert saves.end_time(2) == 3 * 1200.0 + END_MARGIN_S
        assert last_write_s(10**10, 1200.0) == 3 * 1200.0
        assert last_write_s(10**11, 0.0) == 10**11 / LEAST_WRITE_RATE > WRITE_TIMEOUT_S
        assert last_write_s(10, 0.0) == last_write_s(10**10, 5.0) == WRITE_TIMEOUT_S

    def test_the_steps_that_run_come_on_top(self) -> None:
        assert Saves().stop_time(2, [1.0, 40.0]).most_s == END_TIMEOUT_S + 80.0

    def test_ranks_that_became_fewer_are_weighed_anew(self) -> None:
        saves = Saves()
        saves.sealed(report(nbytes=10**9), 0.0)
        saves.sealed(report(attempt=2, nbytes=10), 0.0)
        assert saves.stop_time(4, []).nbytes == 40

    def test_what_it_remembers_is_bounded(self) -> None:
        saves = Saves()
        for step in range(1000):
            saves.sealed(report(step=step), 0.0)
            saves.written(report(step=step), 1.0)
        assert len(saves._sealed) <= 64 and len(saves._took) <= 8


@pytest.mark.parametrize(("kind", "state"), [("pause", "paused"), ("preempt", "queued")])
def test_a_large_state_has_the_time_that_its_bytes_take(bench: Make, kind: str, state: str) -> None:
    job = bench(LARGE)
    job.train(12)
    ask(job, kind)
    job.step(40.0)
    job.ranks.copied("ring")
    job.step()
    job.step(200.0)
    assert job.supervision.phase is Phase.STOPPING
    job.ranks.train()
    job.step()
    assert job.settled().states[-1][0] == state and job.controller.attempt == 1


def test_a_cancelled_job_has_it_too(bench: Make) -> None:
    job = bench(LARGE)
    job.train(12)
    job.supervision.ask_stop("cancelled by a user")
    job.step()
    job.ranks.copied("ring")
    job.step(200.0)
    job.ranks.train()
    job.step()
    assert job.settled().event("ended").message == "cancelled by a user."


def test_how_long_it_may_take_is_told_as_it_begins(bench: Make) -> None:
    job = bench(LARGE)
    job.train(12)
    ask(job)
    told = job.settled().event("stopping")
    given = 2 * STEP_S + LEAST_STOP_S + 12e9 / LEAST_WRITE_RATE
    assert told.detail == {"given_s": pytest.approx(given), "nbytes": 12_000_000_000}
    assert told.message == "The ranks stop after a checkpoint of 12 GB, for which they have 285 s."


def test_a_refusal_says_what_was_waited_for_and_how_long(bench: Make) -> None:
    job = bench(LARGE)
    job.train(12)
    ask(job)
    job.ranks.copied("ring")
    job.step()
    job.step(284.0)
    assert job.supervision.phase is Phase.STOPPING
    job.step(2.0)
    assert "the ranks did not stop in the 285 s given for a checkpoint of 12 GB" in refusal(job)
    assert job.controller.kinds() == ["pause", "restart"]


def test_ranks_that_hang_are_not_waited_for_as_if_they_wrote(bench: Make) -> None:
    job = bench(LARGE)
    job.train(12)
    ask(job)
    job.step(75.0)
    assert job.supervision.phase is Phase.STOPPING
    job.step(1.0)
    assert "no word of the ranks in the 75 s after they were told to stop" in refusal(job)


def test_a_disk_that_was_too_slow_once_is_given_more(bench: Make) -> None:
    job = bench()
    job.train(12)
    ask(job, key="k1")
    job.ranks.copied("ring")
    job.step()
    job.step(LEAST_STOP_S + 1.0)
    assert "did not stop in the 45 s" in refusal(job)
    job.train(8)
    ask(job, key="k2")
    job.ranks.copied("ring")
    job.step()
    job.step(100.0)
    assert job.supervision.phase is Phase.STOPPING
    job.ranks.train()
    job.step()
    assert job.settled().states[-1] == ("paused", "PAUSE_ASKED")


def test_ranks_that_gave_up_on_their_disk_say_so_in_the_refusal(bench: Make) -> None:
    job = bench()
    job.train(12)
    ask(job)
    job.ranks.finish("copies of step 12 were still on their way at the end")
    job.step()
    assert "copies of step 12 were still on their way" in refusal(job)


def test_who_waits_for_a_stop_waits_longer_than_it_may_take() -> None:
    assert LONGEST_STOP_S > END_TIMEOUT_S + CANCEL_GRACE_S
    assert END_TIMEOUT_S > WRITE_TIMEOUT_S, "ranks that give up say why"


def test_all_ranks_bytes_are_known_from_their_snapshots(bench: Make) -> None:
    job = bench(LARGE)
    job.train(1)
    ask(job)
    assert job.settled().event("stopping").detail["nbytes"] == WORLD * LARGE.nbytes


def test_a_write_that_fails_shows_nothing_of_how_long_one_takes(tmp_path: Path) -> None:
    told: list[object] = []
    writer = CheckpointWriter(tmp_path)
    key = SnapshotKey("job", 1, 0, 0, 5)
    writer.write(key, b"state", digest_of(b"state"), told.append)  # no attempt has its folder
    assert writer.wait(10.0)
    assert isinstance(told[0], OSError) and writer.longest_s == 0.0
    open_attempt(tmp_path, 1)
    writer.write(key, b"state", digest_of(b"state"), told.append)
    assert writer.wait(10.0)
    assert isinstance(told[1], Path) and writer.longest_s > 0.0
    writer.close()
