"""A storage that doesn't say what it holds: waited for, told, never taken for an empty one."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import pytest

from launch.checkpoints import list_checkpoints
from launch.commands import CopyFailed
from launch.snapshots import UnreadSnapshotError
from orchestrator.cli.close import saved
from orchestrator.recovery.controls import Control
from orchestrator.saved import checkpoint_shelf
from orchestrator.saved.checkpoint_shelf import AGAIN_S, STORAGE_S
from orchestrator.supervision.copy_troubles import GATHER_S
from orchestrator.supervision.phases import Phase
from tests.unit.control_plane import ControlPlane
from tests.unit.scripted_job import Bench, Make, Script
from tests.unit.storage_away import Storage, restarted, saved_at
from tests.unit.test_checkpoint_shelf import shelf_of, written
from tests.unit.test_rescue import RestingJob


class TestSupervisor:
    def test_training_goes_on_though_a_copy_fails_while_it_is_away(
        self, bench: Make, storage: Storage, storage_answer: int
    ) -> None:
        job = bench()
        saved_at(job, 12)
        storage.number = storage_answer
        place = (job.ranks.attempt, job.ranks.timeline, 0, job.ranks.step)
        job.supervision.deliver([CopyFailed(*place, "disk", "OSError: no")])
        job.train(3)
        assert job.supervision.phase is Phase.TRAINING and job.ranks.running
        job.step(GATHER_S)
        assert job.settled().event("copy_failed").detail["ranks"] == [0]

    def test_an_attempt_starts_at_once_from_memory_that_no_checkpoint_outdoes(
        self, bench: Make, storage: Storage, storage_answer: int
    ) -> None:
        job = bench()
        job.train(12)
        storage.number = storage_answer
        restarted(job)
        restore = job.ranks.attempts[1][0].restore
        assert restore is not None and (restore.step, restore.tier) == (10, "memory")

    def test_it_is_waited_for_where_it_has_what_nobody_else_has(
        self, bench: Make, storage: Storage, storage_answer: int
    ) -> None:
        job = bench(recovery={"init_timeout_s": 30})
        saved_at(job, 12)
        job.ranks.held.clear()
        storage.number = storage_answer
        restarted(job, passes=20, seconds=5.0)
        assert len(job.ranks.attempts) == 1 and job.controller.attempt == 2
        (told,) = [e for e in job.settled().events if e.kind == "storage_awaited"]
        assert "checkpoints can't be looked at" in told.message
        storage.number = 0
        job.step(5.0)
        restore = job.ranks.attempts[1][0].restore
        assert restore is not None and (restore.step, restore.tier) == (12, "disk")

    def test_where_it_stays_away_the_job_is_paused_and_says_why(
        self, bench: Make, storage: Storage, storage_answer: int
    ) -> None:
        job = bench()
        saved_at(job, 12)
        job.ranks.held.clear()
        storage.number = storage_answer
        restarted(job, passes=int(STORAGE_S / 10) + 3, seconds=10.0)
        told = job.settled()
        assert told.states[-1] == ("paused", "STATE_GONE") and len(job.ranks.attempts) == 1
        assert "can't be looked at" in told.event("ended").message

    def test_where_it_stays_away_an_older_copy_in_memory_is_taken_in_the_end(
        self, bench: Make, storage: Storage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job = bench()
        saved_at(job, 12)
        monkeypatch.setattr(job.supervision._job.journal, "step_time_s", lambda: 10 * STORAGE_S)
        storage.number = errno.EIO
        restarted(job)
        assert len(job.ranks.attempts) == 1, "memory has step 10 alone"
        for _ in range(int(STORAGE_S / 10) + 1):
            job.step(10.0)
        restore = job.ranks.attempts[1][0].restore
        assert restore is not None and (restore.step, restore.tier) == (10, "memory")

    def test_it_is_not_waited_for_longer_than_to_train_again_what_it_has(
        self, bench: Make, storage: Storage
    ) -> None:
        job = bench()
        saved_at(job, 12)
        storage.number = errno.EIO
        # Two steps of a tenth of a second.
        restarted(job, passes=5)
        restore = job.ranks.attempts[1][0].restore
        assert restore is not None and (restore.step, restore.tier) == (10, "memory")
        assert "for up to 0.2 s" in job.settled().event("storage_awaited").message

    def test_a_job_whose_last_checkpoint_was_written_is_done_though_it_is_away_then(
        self, bench: Make, storage: Storage
    ) -> None:
        job = bench(training={"steps": 12})
        job.train(12)
        job.ranks._write_checkpoint()
        job.step()
        storage.number = errno.EIO
        job.ranks.finish("still there")
        job.step()
        assert job.controller.states[-1] == ("succeeded", "STEPS_DONE")

    def test_an_attempt_that_began_without_it_writes_its_next_checkpoint(
        self, bench: Make, storage: Storage
    ) -> None:
        job = bench()
        job.train(12)
        storage.number = errno.EIO
        restarted(job)
        job.train(1)
        storage.number = 0
        job.step(AGAIN_S)
        job.train(3)
        job.ranks._write_checkpoint()
        job.step()
        assert job.settled().event("checkpoint_written").detail["step"] == 14

    def test_a_pass_over_many_steps_looks_once_and_the_next_ones_wait(
        self, bench: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        looks: list[float] = []

        def away(*of: object) -> None:
            looks.append(job.now if looks else 0.0)
            if len(looks) > 1:
                job.now += 2 * AGAIN_S
            raise OSError(errno.ETIMEDOUT, "Connection timed out")

        monkeypatch.setattr(checkpoint_shelf, "open_attempt", away)
        job = bench()
        job.step()
        job.ranks.train(20)
        looks[:] = looks[:1]
        job.step(2 * AGAIN_S)
        assert len(looks) == 2, "however many steps came"
        job.train(10)
        assert len(looks) == 2, "and however long it took"
        job.step(AGAIN_S)
        assert len(looks) == 3

    def test_what_no_rank_could_read_for_a_while_is_what_the_next_attempt_starts_from(
        self, bench: Make
    ) -> None:
        job = bench()
        saved_at(job, 12)
        job.ranks.held.clear()
        restarted(job)
        for rank in range(2):
            job.ranks.fail(rank, UnreadSnapshotError(0, 12, "disk", "Input/output error"))
        for _ in range(40):
            job.step(1.0)
        assert job.settled().states[-1][0] != "paused"
        restore = job.ranks.attempts[2][0].restore
        assert restore is not None and (restore.step, restore.tier) == (12, "disk")

    def test_what_no_rank_can_read_is_given_more_time_each_time_and_accuses_no_node(
        self, bench: Make
    ) -> None:
        job = bench()
        saved_at(job, 12)
        job.ranks.held.clear()
        restarted(job)
        job.ranks.fail(1, UnreadSnapshotError(1, 12, "disk", "Stale file handle"))
        for _ in range(20):
            job.step(1.0)
        assert len(job.ranks.attempts) == 2, "it rests"
        for _ in range(20):
            job.step(1.0)
        assert len(job.ranks.attempts) == 3
        action = job.settled().actions[-1]
        assert "after 30 s, in which what is away may come back" in action.reason
        assert action.incidents[0].evidence == {"raised": 1.0, "outside": 1.0}


class TestCommit:
    """All ranks have written; the storage is away as the supervisor makes a checkpoint of it."""

    def written_while_away(self, job: Bench, storage: Storage, number: int) -> None:
        job.ranks._write_checkpoint()
        storage.number = number
        job.step()
        assert not job.supervision._job.shelf.failed and job.supervision._job.shelf.waiting()

    def test_what_all_ranks_have_written_is_a_checkpoint_once_it_is_back(
        self, bench: Make, storage: Storage, storage_answer: int
    ) -> None:
        job = bench()
        job.train(12)
        self.written_while_away(job, storage, storage_answer)
        job.train(60)
        assert "checkpoint" not in " ".join(e.kind for e in job.settled().events)
        storage.number = 0
        for _ in range(6):
            job.step(1.0)
        assert job.settled().event("checkpoint_written").detail["step"] == 12
        assert [c.step for c in list_checkpoints(job.controller.job_dir)] == [12]

    def test_a_try_that_takes_long_is_not_tried_again_in_the_next_pass(
        self, bench: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tries: list[float] = []

        def slow(*of: object, **named: object) -> None:
            tries.append(job.now)
            job.now += 2 * AGAIN_S
            raise OSError(errno.ETIMEDOUT, "Connection timed out")

        job = bench()
        job.train(12)
        monkeypatch.setattr(checkpoint_shelf, "commit_checkpoint", slow)
        job.ranks._write_checkpoint()
        job.train(5)
        assert len(tries) == 1
        job.step(AGAIN_S)
        assert len(tries) == 2

    @pytest.mark.parametrize("kind", ["pause", "preempt"])
    def test_a_stop_waits_for_it_once_the_ranks_have_stopped(
        self, bench: Make, storage: Storage, kind: str
    ) -> None:
        job = bench()
        job.train(12)
        asked = Control("k", kind, "ada", 0.0)  # type: ignore[arg-type]
        job.supervision.ask([asked])
        job.step()
        job.ranks.train(1)
        storage.number = errno.EIO
        for _ in range(20):
            job.step(10.0)
        assert job.supervision.phase is Phase.STOPPING
        storage.number = 0
        job.step(10.0)
        job.step()
        assert job.supervision.phase is Phase.OVER
        assert [c.step for c in list_checkpoints(job.controller.job_dir)] == [12]

    @pytest.mark.parametrize("kind", ["pause", "cancel"])
    def test_a_stop_that_gives_it_up_says_why(
        self, bench: Make, storage: Storage, kind: str
    ) -> None:
        job = bench()
        job.train(12)
        if kind == "cancel":
            job.supervision.ask_stop("enough")
        else:
            job.supervision.ask([Control("k", "pause", "ada", 0.0)])
        job.step()
        job.ranks.train(1)
        storage.number = errno.EIO
        for _ in range(3 if kind == "cancel" else 40):
            job.step(10.0)
        told = job.settled().event("ended" if kind == "cancel" else "control_refused").message
        assert "Input/output error" in told and "did not stop" not in told

    def test_the_last_one_is_waited_for_and_the_job_is_done(
        self, bench: Make, storage: Storage
    ) -> None:
        job = bench(training={"steps": 12})
        job.train(12)
        self.written_while_away(job, storage, errno.EIO)
        job.ranks.finish("no word of the disk")
        for _ in range(10):
            job.step(10.0)
        assert job.supervision.phase is Phase.TRAINING, "neither failed nor restarted"
        storage.number = 0
        job.step(10.0)
        job.step()
        assert job.controller.states[-1] == ("succeeded", "STEPS_DONE")

    def test_where_it_stays_away_that_is_told_and_the_files_are_given_back(
        self, bench: Make, storage: Storage
    ) -> None:
        job = bench()
        job.train(12)
        self.written_while_away(job, storage, errno.EIO)
        for _ in range(int(STORAGE_S / 10) + 2):
            job.train(1)
            job.step(10.0)
        told = job.settled().event("checkpoint_failed")
        assert told.detail["step"] == 12 and "Input/output error" in told.message

    def test_a_disk_that_is_full_gets_its_space_back_at_once(
        self, bench: Make, storage: Storage
    ) -> None:
        job = bench()
        job.train(12)
        job.ranks._write_checkpoint()
        storage.number = errno.ENOSPC
        job.step()
        assert job.settled().event("checkpoint_failed").detail["step"] == 12

    def test_what_the_job_goes_back_from_meanwhile_is_told_and_made_no_checkpoint(
        self, bench: Make, storage: Storage
    ) -> None:
        job = bench(Script(spike=lambda _, batch: batch == 42))
        job.train(40)
        self.written_while_away(job, storage, errno.EIO)
        job.train(3)
        assert job.settled().actions[-1].to_step == 35
        storage.number = 0
        for _ in range(10):
            job.train(1)
            job.step(1.0)
        assert "went back" in job.settled().event("checkpoint_failed").message
        assert list_checkpoints(job.controller.job_dir) == []


class TestShelf:
    @pytest.mark.parametrize("name", ["manifest.json", "rank-00001.safetensors"])
    def test_what_cannot_be_looked_at_is_not_taken_for_damaged(
        self, bench: Make, storage: Storage, name: str
    ) -> None:
        folder = bench().controller.job_dir
        shelf = shelf_of(folder, 7)
        for rank in range(2):
            report = written(folder, rank, 20, attempt=7)
            shelf.add(report)
        assert shelf.commit(report) == ""
        storage.within, storage.number = f"step-00000020/{name}", errno.EIO
        assert shelf.points() == [] and "Input/output error" in shelf.unseen
        assert shelf.left_out() == []
        storage.number = 0
        assert [point.step for point in shelf.points()] == [20] and not shelf.unseen


class TestRescue:
    def test_it_is_waited_for_and_what_memory_holds_is_kept(
        self,
        plane: ControlPlane,
        storage: Storage,
        storage_answer: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("orchestrator.nodes.rescue.AGAIN_S", 0.01)
        job = RestingJob(plane)
        job.hold(15)
        tries, copies = [], plane.groups.copies
        storage.number = storage_answer

        def back_at_the_fourth(of: str) -> object:
            tries.append(of)
            storage.number = storage_answer if len(tries) < 4 else 0
            return copies(of)

        plane.groups.copies = back_at_the_fourth  # type: ignore[method-assign, assignment]
        job.end()
        assert job.on_disk() == [15] and not plane.told(job.id, "checkpoint_failed")

    def test_where_it_stays_away_that_is_told_and_the_nodes_go_back(
        self,
        plane: ControlPlane,
        storage: Storage,
        storage_answer: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("orchestrator.nodes.rescue.AGAIN_S", 0.01)
        monkeypatch.setattr("orchestrator.nodes.rescue.STORAGE_S", 0.1)
        job = RestingJob(plane)
        job.hold(15)
        storage.number = storage_answer
        job.end()
        (told,) = plane.told(job.id, "checkpoint_failed")
        assert "step 15" in told and job.id not in plane.groups.held

    def test_one_old_checkpoint_that_never_says_what_it_is_does_not_keep_it_from_being_written(
        self, plane: ControlPlane, storage: Storage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("orchestrator.nodes.rescue.AGAIN_S", 0.01)
        monkeypatch.setattr("orchestrator.nodes.rescue.STORAGE_S", 0.1)
        job = RestingJob(plane)
        job.write(10)
        job.hold(15)
        storage.within, storage.number = "step-00000010/manifest.json", errno.EIO
        job.end()
        storage.number = 0
        assert job.on_disk() == [15, 10]

    def test_nor_does_one_of_which_a_look_takes_all_the_time_that_there_is(
        self, plane: ControlPlane, storage: Storage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job = RestingJob(plane)
        job.write(10)
        job.hold(15)
        storage.within, storage.number = "step-00000010/manifest.json", errno.EIO
        ahead, points = [0.0], checkpoint_shelf.CheckpointShelf.points

        def slow(shelf: checkpoint_shelf.CheckpointShelf) -> object:
            ahead[0] += STORAGE_S
            return points(shelf)

        monkeypatch.setattr(checkpoint_shelf.CheckpointShelf, "points", slow)
        clock = SimpleNamespace(monotonic=lambda: ahead[0], sleep=lambda seconds: None)
        monkeypatch.setattr("orchestrator.nodes.rescue.time", clock)
        job.end()
        storage.number = 0
        assert job.on_disk() == [15, 10]

    def test_the_newest_state_is_waited_for_before_an_older_one_is_written(
        self, plane: ControlPlane, storage: Storage, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("orchestrator.nodes.rescue.AGAIN_S", 0.01)
        job = RestingJob(plane)
        job.hold(10)
        job.hold(15)
        write, orders = plane.groups.write_copies, []

        def refused_once(order: object) -> object:
            orders.append(order)
            if len(orders) == 1:
                return dict.fromkeys(range(4), "OSError: [Errno 5] Input/output error")
            return write(order)  # type: ignore[arg-type]

        plane.groups.write_copies = refused_once  # type: ignore[method-assign, assignment]
        job.end()
        assert job.on_disk() == [15]

    def test_an_error_that_nobody_foresaw_is_told(
        self, plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job = RestingJob(plane)
        job.hold(15)

        def broken(order: object) -> None:
            raise ValueError("no one")

        monkeypatch.setattr(plane.groups, "write_copies", broken)
        job.end()
        (told,) = plane.told(job.id, "checkpoint_failed")
        assert "no one" in told and job.id not in plane.groups.held


def test_a_job_of_which_nothing_can_be_looked_at_is_not_said_to_begin_again(
    plane: ControlPlane, storage: Storage, storage_answer: int
) -> None:
    job = RestingJob(plane)
    job.write(10)
    told = {"job_dir": str(job.folder)}
    assert saved(told) == "its newest checkpoint is of step 10"
    storage.number = storage_answer
    assert "not known" in saved(told) and os.strerror(storage_answer) in saved(told)
