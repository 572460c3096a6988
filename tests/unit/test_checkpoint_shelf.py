"""The supervisor's side of checkpoints: what ranks wrote becomes one, or gives its space back."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from launch import checkpoint_files
from launch.attempt_folder import open_attempt
from launch.checkpoints import list_checkpoints, write_rank_file
from launch.commands import CopyFailed, Report, SnapshotReport
from launch.digests import digest_of
from launch.snapshots import SnapshotKey
from orchestrator.actions import Action
from orchestrator.protocol import FencedError
from orchestrator.saved import checkpoint_shelf, undertaker
from orchestrator.saved.checkpoint_shelf import CheckpointShelf
from tests.unit.scripted_job import WORLD, Make, Script

STATE = b"state" * 1000


def written(
    job_dir: Path, rank: int, step: int, attempt: int = 1, timeline: int = 0
) -> SnapshotReport:
    key = SnapshotKey("job", attempt, timeline, rank, step)
    path = str(write_rank_file(job_dir, key, STATE, digest_of(STATE)))
    place = (attempt, timeline, rank, step)
    return SnapshotReport(*place, "disk", len(STATE), digest_of(STATE), path)


def failed(rank: int, step: int, timeline: int = 0) -> CopyFailed:
    return CopyFailed(1, timeline, rank, step, "disk", "OSError: No space left on device")


def shelf_of(job_dir: Path, attempt: int = 1) -> CheckpointShelf:
    shelf = CheckpointShelf(job_dir, 2, 2)
    shelf.begin(attempt)
    return shelf


def states_on_disk(job_dir: Path) -> int:
    """Rank files, once what is being deleted is gone."""
    for thread in threading.enumerate():
        if thread.name == "undertaker":
            thread.join()
    return len(list(job_dir.rglob("*.safetensors")))


def test_the_last_rank_makes_a_step_a_checkpoint_and_points_name_it(tmp_path: Path) -> None:
    shelf = shelf_of(tmp_path)
    assert not shelf.add(written(tmp_path, 0, 10))
    report = written(tmp_path, 1, 10)
    assert shelf.waiting() and shelf.add(report)
    assert shelf.commit(report) == "" and not shelf.waiting()
    (point,) = shelf.points()
    assert (point.step, point.tier, point.attempt) == (10, "disk", 1)


def test_a_storage_works_again_once_any_step_was_written(tmp_path: Path) -> None:
    shelf = shelf_of(tmp_path)
    assert shelf.works
    shelf.lose(failed(1, 200))
    assert not shelf.works and shelf.failed is not None and "No space left" in shelf.failed[1]
    # One that was left out was not tried, and what a ring lacks is no fault of the disk.
    shelf.lose(replace(failed(1, 210), left_out=True))
    shelf.lose(replace(failed(1, 220), tier="ring"))
    assert shelf.failed[0] == 200
    # The job has gone back since: an older step it is.
    shelf.add(written(tmp_path, 0, 150, timeline=1))
    assert shelf.add(report := written(tmp_path, 1, 150, timeline=1))
    assert shelf.commit(report) == "" and shelf.works and shelf.failed is None


@pytest.mark.parametrize("late", [True, False])
def test_a_step_that_one_rank_has_no_room_for_takes_none_and_the_next_one_works(
    tmp_path: Path, late: bool
) -> None:
    shelf = shelf_of(tmp_path)
    if late:
        shelf.lose(failed(1, 10))
        assert not shelf.add(written(tmp_path, 0, 10))
    else:
        assert not shelf.add(written(tmp_path, 0, 10))
        shelf.lose(failed(1, 10))
    assert not shelf.waiting()
    assert states_on_disk(tmp_path) == 0
    shelf.add(written(tmp_path, 0, 20))
    assert shelf.add(report := written(tmp_path, 1, 20))
    assert shelf.commit(report) == ""
    assert [point.step for point in shelf.points()] == [20]


def test_a_commit_that_fails_is_told_and_its_space_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = shelf_of(tmp_path)
    shelf.add(written(tmp_path, 0, 10))
    report = written(tmp_path, 1, 10)

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("launch.checkpoint_manifest.write_durably", full)
    assert "No space" in shelf.commit(report)
    assert shelf.failed is not None and "step 10" in shelf.failed[1]
    assert states_on_disk(tmp_path) == 0


def test_a_disk_that_could_not_be_taken_over_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    shelf = shelf_of(tmp_path)
    (tmp_path / "checkpoints").unlink()
    shelf.lose(failed(0, 10))
    shelf.add(written(tmp_path, 0, 20))
    assert shelf.add(report := written(tmp_path, 1, 20))
    assert shelf.commit(report) == ""


def test_a_storage_that_comes_back_without_the_attempts_folder_is_written_again(
    tmp_path: Path,
) -> None:
    shelf = shelf_of(tmp_path)
    (tmp_path / "checkpoints").rename(tmp_path / "what-was-there-while-it-was-away")
    with pytest.raises(FileNotFoundError):
        written(tmp_path, 0, 10)
    for rank in range(2):
        shelf.lose(failed(rank, 10))
    reports = [written(tmp_path, rank, 20) for rank in range(2)]
    assert [shelf.add(report) for report in reports] == [False, True]
    assert shelf.commit(reports[1]) == "" and [p.step for p in shelf.points()] == [20]


def test_nothing_is_taken_away_under_ranks_that_still_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = shelf_of(tmp_path)
    read_back = checkpoint_files._read_back

    def meanwhile(path: Path, digests: list[bytes]) -> None:
        monkeypatch.setattr(checkpoint_files, "_read_back", read_back)
        shelf.lose(failed(0, 10))
        read_back(path, digests)

    monkeypatch.setattr(checkpoint_files, "_read_back", meanwhile)
    report = written(tmp_path, 1, 10)
    assert states_on_disk(tmp_path) == 1
    assert not shelf.add(report) and not shelf.waiting()
    assert states_on_disk(tmp_path) == 0


def test_ranks_that_all_fail_cost_one_look_and_one_undertaker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = CheckpointShelf(tmp_path, 2, 500)
    shelf.begin(1)
    states_on_disk(tmp_path)
    looks, discards, graves = [], [], []
    dug = threading.Event()
    is_open, discard = checkpoint_shelf.attempt_is_open, checkpoint_shelf.discard_step
    monkeypatch.setattr(
        checkpoint_shelf, "attempt_is_open", lambda *of: looks.append(of) or is_open(*of)
    )
    monkeypatch.setattr(
        checkpoint_shelf, "discard_step", lambda *of: discards.append(of) or discard(*of)
    )
    monkeypatch.setattr(undertaker, "bury", lambda *of: graves.append(of) or dug.wait(10))
    for step in (10, 20):
        for rank in range(500):
            shelf.lose(failed(rank, step))
            shelf.lose(failed(rank, step))
    assert len(looks) == len(discards) == 2
    assert sum(thread.name == "undertaker" for thread in threading.enumerate()) == 1
    dug.set()
    states_on_disk(tmp_path)
    assert 1 <= len(graves) <= 2


def test_an_undertaker_that_cannot_be_begun_is_no_error_and_the_next_one_digs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = shelf_of(tmp_path)
    states_on_disk(tmp_path)
    start = threading.Thread.start

    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def both_fail(step: int) -> None:
        written(tmp_path, 0, step)
        for rank in range(2):
            shelf.lose(failed(rank, step))

    monkeypatch.setattr(threading.Thread, "start", none_left)
    both_fail(10)
    assert states_on_disk(tmp_path) == 1
    monkeypatch.setattr(threading.Thread, "start", start)
    both_fail(20)
    assert states_on_disk(tmp_path) == 0


def test_reports_that_come_again_are_of_no_step_that_is_over(tmp_path: Path) -> None:
    shelf = shelf_of(tmp_path)
    reports = [written(tmp_path, rank, 10) for rank in range(2)]
    assert not shelf.add(reports[0]) and not shelf.add(reports[0]), "one rank, told twice"
    assert shelf.add(reports[1]) and shelf.commit(reports[1]) == ""
    assert [shelf.add(report) for report in reports] == [False, False]
    shelf.lose(failed(0, 10))
    assert not shelf.waiting() and shelf.failed is None
    assert [point.step for point in shelf.points()] == [10]


def test_the_job_goes_back_to_after_a_step_that_is_being_written_and_it_is_kept(
    tmp_path: Path,
) -> None:
    shelf = shelf_of(tmp_path)
    reports = {(rank, step): written(tmp_path, rank, step) for step in (30, 40) for rank in (0, 1)}
    for step in (30, 40):
        assert not shelf.add(reports[0, step])
    back = Action("rollback", attempt=1, timeline=0, step=42, time=9.0, reason="", to_step=30)
    shelf.go_back([back])
    assert shelf.rolled_back() == [40] and shelf.rolled_back() == []
    assert shelf.waiting() and shelf.add(reports[1, 30], [back])
    assert shelf.commit(reports[1, 30], [back]) == ""
    assert not shelf.add(reports[1, 40], [back]) and not shelf.waiting()
    assert shelf.rolled_back() == [], "told already"
    assert [point.step for point in shelf.points()] == [30] and states_on_disk(tmp_path) == 2


def test_what_was_written_of_a_branch_that_is_given_up_is_told_though_it_comes_late(
    tmp_path: Path,
) -> None:
    shelf = shelf_of(tmp_path)
    back = Action("rollback", attempt=1, timeline=0, step=42, time=9.0, reason="", to_step=30)
    for rank in range(2):
        assert not shelf.add(written(tmp_path, rank, 40), [back])
    assert shelf.rolled_back() == [40] and states_on_disk(tmp_path) == 0


@pytest.mark.parametrize("step", [36, 40, 60])
@pytest.mark.parametrize("full", [True, False])
def test_what_was_rolled_back_is_given_back_with_the_next_one_though_a_rank_never_speaks_of_it(
    tmp_path: Path, full: bool, step: int
) -> None:
    """Its copy was dropped before it came to the disk."""
    shelf = shelf_of(tmp_path)
    back = Action("rollback", attempt=1, timeline=0, step=41, time=9.0, reason="", to_step=35)
    shelf.add(written(tmp_path, 0, 40))
    shelf.go_back([back])
    assert states_on_disk(tmp_path) == 1
    for rank in range(2):
        if full:
            shelf.lose(failed(rank, step, timeline=1))
        else:
            shelf.add(report := written(tmp_path, rank, step, timeline=1), [back])
    assert full or shelf.commit(report, [back]) == ""
    assert states_on_disk(tmp_path) == (0 if full else 2)


def test_what_the_job_went_back_from_makes_room_first(tmp_path: Path) -> None:
    shelf = shelf_of(tmp_path)
    for step in (100, 110, 113):
        report = [written(tmp_path, rank, step) for rank in range(2)][-1]
        assert shelf.commit(report) == ""
    shelf.begin(2)
    report = [written(tmp_path, rank, 120, attempt=2) for rank in range(2)][-1]
    back = Action("rollback", attempt=1, timeline=0, step=112, time=9.0, reason="", to_step=110)
    assert shelf.commit(report, [back]) == ""
    assert [c.step for c in list_checkpoints(tmp_path)] == [120, 110]


def test_who_comes_late_is_fenced(tmp_path: Path) -> None:
    late = shelf_of(tmp_path, attempt=1)
    late.add(written(tmp_path, 0, 10))
    late.add(report := written(tmp_path, 1, 10))
    open_attempt(tmp_path, 2)
    assert late.commit(report) != ""
    with pytest.raises(FencedError, match="attempt 2"):
        late.begin(1)
    assert list_checkpoints(tmp_path) == []


@pytest.mark.parametrize("damage", ["cut off", "gone", "no manifest", "garbage"])
def test_what_can_be_seen_to_be_damaged_is_not_offered(tmp_path: Path, damage: str) -> None:
    shelf = shelf_of(tmp_path)
    for step in (10, 20):
        shelf.add(written(tmp_path, 0, step))
        shelf.add(report := written(tmp_path, 1, step))
        shelf.commit(report)
    folder = tmp_path / "checkpoints" / "step-00000020"
    file = folder / "rank-00001.safetensors"
    if damage == "cut off":
        file.write_bytes(STATE[:-1])
    elif damage == "gone":
        file.unlink()
    elif damage == "no manifest":
        (folder / "manifest.json").unlink()
    else:
        (folder / "manifest.json").write_text('{"format": 2, "step": 20}')
    assert [point.step for point in shelf.points()] == [10]


def test_what_is_no_checkpoint_any_more_is_left_out_and_told_once(tmp_path: Path) -> None:
    shelf = shelf_of(tmp_path)
    for step in (10, 20):
        report = [written(tmp_path, rank, step) for rank in range(2)][-1]
        shelf.add(report)
        shelf.commit(report)
    first, second = sorted((tmp_path / "checkpoints").glob("step-*"))
    assert [p.step for p in shelf.points()] == [20, 10] and shelf.left_out() == []
    cut = next(second.glob("*.safetensors"))
    cut.write_bytes(cut.read_bytes()[:100])
    assert [p.step for p in shelf.points()] == [10]
    ((folder, why),) = shelf.left_out()
    assert folder == second and "has 100 bytes" in why
    (first / "manifest.json").unlink()
    assert shelf.points() == []
    ((folder, why),) = shelf.left_out()
    assert folder == first and "manifest.json" in why
    shelf.points()
    assert shelf.left_out() == [], "what was told is no news"


def test_what_attempts_before_left_is_given_back_before_the_nodes_are_looked_at(
    bench: Make,
) -> None:
    job = bench()
    folder = job.controller.job_dir
    job.train(12)
    for rank in range(WORLD - 1):
        written(folder, rank, 15)
    assert states_on_disk(folder) == WORLD - 1
    job.ranks.importing = True
    job.ranks.lose(1)
    for _ in range(3):
        job.step()
    assert job.controller.attempt == 2 and len(job.ranks.attempts) == 1, "its workers start"
    assert states_on_disk(folder) == 0


class TestRolledBack:
    @pytest.mark.parametrize("step", [30, 40])
    def test_a_checkpoint_under_way_survives_a_way_back_to_after_it_and_is_told_else(
        self, bench: Make, step: int
    ) -> None:
        """The ranks go back from 42 to 35; one of two has written ``step`` by then."""
        job = bench(Script(spike=lambda _, batch: batch == 42))
        job.train(step)
        late: list[Report] = []
        deliver, job.ranks.deliver = job.ranks.deliver, late.extend
        job.ranks._write_checkpoint()
        job.ranks.deliver = deliver
        job.supervision.deliver(late[:1])
        job.train(43 - step)
        (back,) = job.settled().actions
        assert back.in_place and back.to_step == 35
        job.train(2)
        job.supervision.deliver(late[1:])
        job.train(1)
        folder = job.controller.job_dir
        told = [e for e in job.settled().events if e.kind.startswith("checkpoint")]
        (event,) = told
        assert event.detail["step"] == step
        if step == 30:
            assert event.kind == "checkpoint_written"
            assert [c.step for c in list_checkpoints(folder)] == [30]
        else:
            assert event.kind == "checkpoint_failed" and "went back" in event.message
            assert list_checkpoints(folder) == [] and states_on_disk(folder) == 0
