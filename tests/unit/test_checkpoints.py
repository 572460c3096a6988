"""Checkpoints: valid by one rename, damage found, older ones taken instead."""

from __future__ import annotations

import errno
import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from launch.attempt_folder import bury, open_attempt
from launch.checkpoints import (
    IncompleteCheckpointError,
    commit_checkpoint,
    list_checkpoints,
    newest_checkpoint,
    read_rank_file,
    verify_checkpoint,
    write_rank_file,
)
from launch.digests import digest_of
from launch.snapshots import DamagedSnapshotError, MissingSnapshotError, SnapshotKey
from tests.unit.storage_away import Storage


def payload(rank: int, step: int) -> bytes:
    return np.random.default_rng([rank, step]).bytes(5000)


def write(
    job_dir: Path, step: int, ranks: range = range(2), attempt: int = 1, timeline: int = 0
) -> None:
    open_attempt(job_dir, attempt)
    for rank in ranks:
        key = SnapshotKey("job", attempt, timeline, rank, step)
        data = payload(rank, step)
        write_rank_file(job_dir, key, data, digest_of(data))


def save(job_dir: Path, step: int, attempt: int = 1, timeline: int = 0, keep: int = 3) -> None:
    write(job_dir, step, attempt=attempt, timeline=timeline)
    commit_checkpoint(job_dir, step, attempt, range(2), timeline=timeline, num_to_keep=keep)
    bury(job_dir, attempt)


def steps(job_dir: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(job_dir)]


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def rank_file(job_dir: Path, step: int, rank: int) -> Path:
    return job_dir / "checkpoints" / f"step-{step:08d}" / f"rank-{rank:05d}.safetensors"


class TestCommit:
    def test_what_was_written_is_read_back(self, tmp_path: Path) -> None:
        save(tmp_path, 100)
        found = newest_checkpoint(tmp_path)
        assert found is not None
        assert (found.step, found.attempt, found.timeline) == (100, 1, 0)
        for rank in range(2):
            assert bytes(read_rank_file(found.path, rank, 100).payload) == payload(rank, 100)

    def test_nothing_is_a_checkpoint_before_it_is_committed(self, tmp_path: Path) -> None:
        write(tmp_path, 100)
        assert steps(tmp_path) == []
        assert newest_checkpoint(tmp_path) is None

    def test_a_missing_rank_is_named_and_nothing_changes(self, tmp_path: Path) -> None:
        write(tmp_path, 100, ranks=range(1))
        with pytest.raises(IncompleteCheckpointError) as caught:
            commit_checkpoint(tmp_path, 100, 1, range(2))
        assert pickle.loads(pickle.dumps(caught.value)).missing == (1,)
        assert steps(tmp_path) == []
        write(tmp_path, 100, ranks=range(1, 2))
        assert commit_checkpoint(tmp_path, 100, 1, range(2)).step == 100

    def test_a_file_cut_off_after_its_note_counts_as_missing(self, tmp_path: Path) -> None:
        write(tmp_path, 100)
        (staged,) = (tmp_path / "checkpoints").glob(".attempt-1/*")
        victim = staged / "rank-00001.safetensors"
        victim.write_bytes(victim.read_bytes()[:-1])
        with pytest.raises(IncompleteCheckpointError, match=r"\[1\]"):
            commit_checkpoint(tmp_path, 100, 1, range(2))

    def test_files_of_two_attempts_are_never_mixed(self, tmp_path: Path) -> None:
        write(tmp_path, 100, ranks=range(1), attempt=1)
        write(tmp_path, 100, ranks=range(1, 2), attempt=2)
        with pytest.raises(IncompleteCheckpointError, match=r"\[0\]"):
            commit_checkpoint(tmp_path, 100, 2, range(2))

    def test_files_of_two_timelines_are_never_mixed(self, tmp_path: Path) -> None:
        write(tmp_path, 100, ranks=range(1), timeline=1)
        write(tmp_path, 100, timeline=0)
        assert commit_checkpoint(tmp_path, 100, 1, range(2)).timeline == 0

    def test_only_the_newest_are_kept(self, tmp_path: Path) -> None:
        for step in (10, 20, 30, 40):
            save(tmp_path, step, keep=2)
        assert steps(tmp_path) == [40, 30]
        assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
            ".attempt-1",
            "step-00000030",
            "step-00000040",
        ]
        assert not list((tmp_path / "checkpoints" / ".attempt-1").iterdir())

    def test_a_commit_after_a_rollback_deletes_what_was_rolled_back(self, tmp_path: Path) -> None:
        for step in (10, 20, 30):
            save(tmp_path, step)
        save(tmp_path, 20, timeline=1)
        assert steps(tmp_path) == [20, 10]
        found = newest_checkpoint(tmp_path)
        assert found is not None and found.timeline == 1

    def test_one_of_a_branch_that_was_given_up_does_not_displace_one_that_serves(
        self, tmp_path: Path
    ) -> None:
        for step in (100, 110, 113):
            save(tmp_path, step)
        write(tmp_path, 120, attempt=2, timeline=1)
        living = {100, 110, 120}
        commit_checkpoint(
            tmp_path, 120, 2, range(2), num_to_keep=2, living=lambda c: c.step in living
        )
        assert steps(tmp_path) == [120, 110]

    def test_one_that_was_given_up_stays_while_there_is_room(self, tmp_path: Path) -> None:
        save(tmp_path, 113)
        write(tmp_path, 120, attempt=2, timeline=1)
        commit_checkpoint(tmp_path, 120, 2, range(2), num_to_keep=2, living=lambda c: c.step > 113)
        assert steps(tmp_path) == [120, 113]

    def test_a_later_one_that_an_attempt_did_not_start_from_stays_while_there_is_room(
        self, tmp_path: Path
    ) -> None:
        for step in (10, 30):
            save(tmp_path, step)
        write(tmp_path, 20, attempt=2)
        commit_checkpoint(tmp_path, 20, 2, range(2), num_to_keep=3, living=lambda c: True)
        assert steps(tmp_path) == [30, 20, 10]
        write(tmp_path, 25, attempt=2)
        commit_checkpoint(tmp_path, 25, 2, range(2), num_to_keep=3, living=lambda c: True)
        assert steps(tmp_path) == [25, 20, 10]

    @pytest.mark.parametrize("name", ["manifest.json", "rank-00001.safetensors"])
    def test_what_cannot_be_looked_at_is_not_deleted_nor_does_it_displace_another(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        for step in (90, 100, 110):
            save(tmp_path, step)
        write(tmp_path, 120)
        storage = Storage(monkeypatch, f"step-00000110/{name}")
        storage.number = errno.ETIMEDOUT
        commit_checkpoint(tmp_path, 120, 1, range(2), num_to_keep=2)
        storage.number = 0
        assert steps(tmp_path) == [120, 110, 100]

    def test_unfinished_folders_of_older_attempts_and_steps_go_and_later_steps_stay(
        self, tmp_path: Path
    ) -> None:
        write(tmp_path, 10, ranks=range(1), attempt=1)
        write(tmp_path, 10, ranks=range(1), attempt=2)
        write(tmp_path, 30, ranks=range(1), attempt=2)
        save(tmp_path, 20, attempt=2)
        left = [str(p.relative_to(tmp_path)) for p in tmp_path.glob("checkpoints/.*/*")]
        assert left == ["checkpoints/.attempt-2/step-00000030-timeline-0"]

    def test_an_unwritable_folder_raises_an_oserror(self, tmp_path: Path) -> None:
        (tmp_path / "checkpoints").write_text("a file stands in the way")
        with pytest.raises(OSError):
            write(tmp_path, 10)


class TestNewest:
    @pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "manifest"])
    def test_a_damaged_one_falls_back_to_the_older(self, tmp_path: Path, damage: str) -> None:
        save(tmp_path, 10)
        save(tmp_path, 20)
        victim = rank_file(tmp_path, 20, 1)
        if damage == "flip":
            flip_byte(victim)
        elif damage == "truncate":
            victim.write_bytes(victim.read_bytes()[:100])
        elif damage == "delete":
            victim.unlink()
        else:
            victim.with_name("manifest.json").write_text('{"format": 1')
        found = newest_checkpoint(tmp_path)
        assert found is not None and found.step == 10

    def test_what_is_wrong_names_the_file(self, tmp_path: Path) -> None:
        save(tmp_path, 10)
        flip_byte(rank_file(tmp_path, 10, 1))
        (checkpoint,) = list_checkpoints(tmp_path)
        (problem,) = verify_checkpoint(checkpoint)
        assert "rank-00001.safetensors" in problem

    def test_one_that_was_rolled_back_is_left_out(self, tmp_path: Path) -> None:
        for step in (10, 20, 30):
            save(tmp_path, step)
        assert [c.step for c in list_checkpoints(tmp_path, {1: 20})] == [20, 10]
        assert [c.step for c in list_checkpoints(tmp_path, {1: 20, 2: 5})] == []
        save(tmp_path, 25, timeline=1)
        assert [c.step for c in list_checkpoints(tmp_path, {1: 20})] == [25, 20, 10]


class TestReadRankFile:
    def test_damage_names_rank_step_and_tier(self, tmp_path: Path) -> None:
        save(tmp_path, 10)
        flip_byte(rank_file(tmp_path, 10, 1))
        folder = rank_file(tmp_path, 10, 1).parent
        with pytest.raises(DamagedSnapshotError, match="rank 1: copy of step 10 in tier disk"):
            read_rank_file(folder, 1, 10)
        assert read_rank_file(folder, 0, 10).payload is not None

    def test_an_absent_rank_or_step_is_missing(self, tmp_path: Path) -> None:
        save(tmp_path, 10)
        folder = rank_file(tmp_path, 10, 1).parent
        with pytest.raises(MissingSnapshotError):
            read_rank_file(folder, 7, 10)
        with pytest.raises(MissingSnapshotError, match="of step 10"):
            read_rank_file(folder, 0, 11)
        with pytest.raises(MissingSnapshotError):
            read_rank_file(tmp_path / "nowhere", 0, 10)

    def test_a_manifest_of_another_format_is_refused(self, tmp_path: Path) -> None:
        save(tmp_path, 10)
        manifest = rank_file(tmp_path, 10, 1).with_name("manifest.json")
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 7}))
        with pytest.raises(DamagedSnapshotError, match="format is 7"):
            read_rank_file(manifest.parent, 0, 10)
