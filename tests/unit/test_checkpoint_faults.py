"""Checkpoints when another attempt takes over at any point, and when the disk gives out."""

from __future__ import annotations

import errno
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch import checkpoint_files, checkpoints
from launch.attempt_folder import AttemptOverError, bury, open_attempt, put_file
from launch.checkpoint_files import CHUNK, DamagedFileError, RankFileReader
from launch.checkpoints import (
    commit_checkpoint,
    discard_step,
    hold,
    let_go,
    list_checkpoints,
    newest_checkpoint,
    read_rank_file,
    verify_checkpoint,
    write_rank_file,
)
from launch.digests import digest_of
from launch.snapshots import SnapshotKey

RANKS = range(2)


def payload(rank: int, step: int, attempt: int = 1) -> bytes:
    return np.random.default_rng([rank, step, attempt]).bytes(5000)


def write(job_dir: Path, step: int, attempt: int = 1, rank: int | None = None) -> None:
    for number in RANKS if rank is None else [rank]:
        data = payload(number, step, attempt)
        write_rank_file(
            job_dir, SnapshotKey("job", attempt, 0, number, step), data, digest_of(data)
        )


def save(job_dir: Path, step: int, attempt: int = 1, keep: int = 3) -> None:
    open_attempt(job_dir, attempt)
    write(job_dir, step, attempt)
    commit_checkpoint(job_dir, step, attempt, RANKS, num_to_keep=keep)
    bury(job_dir, attempt)


def held(job_dir: Path) -> list[tuple[int, int]]:
    """(step, attempt) of what is there, all of it verified."""
    found = list_checkpoints(job_dir)
    assert all(not verify_checkpoint(checkpoint) for checkpoint in found)
    return [(checkpoint.step, checkpoint.attempt) for checkpoint in found]


def bytes_used(job_dir: Path) -> int:
    return sum(path.stat().st_size for path in job_dir.rglob("*") if path.is_file())


class TestFencing:
    def test_an_earlier_attempt_can_neither_write_nor_commit_nor_come_back(
        self, tmp_path: Path
    ) -> None:
        open_attempt(tmp_path, 1)
        write(tmp_path, 10)
        open_attempt(tmp_path, 2)
        with pytest.raises(AttemptOverError, match="attempt 1 is over: attempt 2"):
            write(tmp_path, 20)
        with pytest.raises(checkpoints.IncompleteCheckpointError):
            commit_checkpoint(tmp_path, 10, 1, RANKS)
        with pytest.raises(AttemptOverError) as caught:
            open_attempt(tmp_path, 1)
        assert pickle.loads(pickle.dumps(caught.value)).attempt == 1
        assert held(tmp_path) == []

    def test_opened_again_an_attempt_keeps_what_it_has_written(self, tmp_path: Path) -> None:
        open_attempt(tmp_path, 1)
        write(tmp_path, 10, rank=0)
        open_attempt(tmp_path, 1)
        write(tmp_path, 10, rank=1)
        assert commit_checkpoint(tmp_path, 10, 1, RANKS).step == 10

    @pytest.mark.parametrize("call", range(40))
    def test_a_takeover_at_any_call_of_a_commit_leaves_all_of_it_or_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
    ) -> None:
        """The late attempt sleeps before its ``call``-th system call that changes something, and
        wakes up after the next one has saved a step that the late one would replace."""
        save(tmp_path, 10, keep=1)
        write(tmp_path, 20)
        made = 0
        taken_over = False

        def interrupted(name: str) -> Callable[..., object]:
            own = getattr(os, name)

            def syscall(*args: object, **kwargs: object) -> object:
                nonlocal made, taken_over
                made += 1
                if made == call + 1 and not taken_over:
                    taken_over = True
                    save(tmp_path, 10, attempt=2, keep=5)
                    save(tmp_path, 20, attempt=2, keep=5)
                return own(*args, **kwargs)

            return syscall

        for name in ("rename", "unlink", "rmdir", "fsync", "mkdir"):
            monkeypatch.setattr(os, name, interrupted(name))
        try:
            commit_checkpoint(tmp_path, 20, 1, RANKS, num_to_keep=1)
        except (AttemptOverError, OSError, checkpoints.IncompleteCheckpointError):
            assert taken_over
        monkeypatch.undo()
        found = held(tmp_path)
        if taken_over:
            assert (20, 2) in found and (10, 2) in found
        else:
            assert found == [(20, 1)]

    def test_two_attempts_that_open_at_once_never_both_succeed_the_wrong_way(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own = Path.mkdir

        def late(path: Path, *args: object, **kwargs: object) -> None:
            monkeypatch.setattr(Path, "mkdir", own)
            open_attempt(tmp_path, 2)
            own(path, *args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(Path, "mkdir", late)
        with pytest.raises(AttemptOverError):
            open_attempt(tmp_path, 1)
        write(tmp_path, 10, attempt=2)
        assert commit_checkpoint(tmp_path, 10, 2, RANKS).attempt == 2
        with pytest.raises(AttemptOverError):
            write(tmp_path, 10, attempt=1)

    @pytest.mark.parametrize("call", ["mkdir", "write_text", "replace"])
    def test_a_takeover_while_a_file_is_put_leaves_the_later_attempts_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        own = getattr(Path, call)

        def late(path: Path, *args: Any, **kwargs: Any) -> Any:
            monkeypatch.setattr(Path, call, own)
            put_file(tmp_path, 2, "summary.json", "later")
            return own(path, *args, **kwargs)

        monkeypatch.setattr(Path, call, late)
        with pytest.raises(AttemptOverError, match="attempt 1 is over: attempt 2"):
            put_file(tmp_path, 1, "summary.json", "earlier")
        assert (tmp_path / "summary.json").read_text() == "later"


class TestFullDisk:
    @pytest.fixture
    def full(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
        """``full(name, n)``: from the ``n``-th call on, ``os.<name>`` finds the disk full."""

        def make(name: str, first: int) -> None:
            own, made = getattr(os, name), 0

            def syscall(*args: object, **kwargs: object) -> object:
                nonlocal made
                made += 1
                if made >= first:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return own(*args, **kwargs)

            monkeypatch.setattr(os, name, syscall)

        return make

    @pytest.mark.parametrize(("name", "first"), [("write", 1), ("fsync", 1), ("fsync", 2)])
    def test_a_write_that_fails_leaves_nothing_and_the_next_one_works(
        self,
        tmp_path: Path,
        full: Callable[[str, int], None],
        monkeypatch: pytest.MonkeyPatch,
        name: str,
        first: int,
    ) -> None:
        save(tmp_path, 10)
        before = bytes_used(tmp_path)
        full(name, first)
        with pytest.raises(OSError, match="No space"):
            write(tmp_path, 20, rank=0)
        monkeypatch.undo()
        assert bytes_used(tmp_path) == before
        save(tmp_path, 30)
        assert held(tmp_path) == [(30, 1), (10, 1)]

    @pytest.mark.parametrize("first", range(1, 3))
    def test_a_commit_that_fails_can_be_given_up_with_all_its_space(
        self,
        tmp_path: Path,
        full: Callable[[str, int], None],
        monkeypatch: pytest.MonkeyPatch,
        first: int,
    ) -> None:
        save(tmp_path, 10)
        before = bytes_used(tmp_path)
        write(tmp_path, 20)
        full("fsync", first)
        with pytest.raises(OSError, match="No space"):
            commit_checkpoint(tmp_path, 20, 1, RANKS)
        monkeypatch.undo()
        discard_step(tmp_path, 20, 1, 0)
        bury(tmp_path, 1)
        assert bytes_used(tmp_path) == before
        save(tmp_path, 30)
        assert held(tmp_path)[0] == (30, 1)

    @pytest.mark.parametrize("first", range(3, 5))
    def test_one_that_has_its_name_is_made_whatever_fails_then_and_the_older_ones_stay(
        self, tmp_path: Path, full: Callable[[str, int], None], first: int
    ) -> None:
        save(tmp_path, 10)
        write(tmp_path, 20)
        full("fsync", first)
        assert commit_checkpoint(tmp_path, 20, 1, RANKS, num_to_keep=1).step == 20
        assert held(tmp_path) == [(20, 1), (10, 1)]

    def test_a_look_at_the_older_ones_that_fails_does_not_unmake_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save(tmp_path, 10)
        write(tmp_path, 20)
        superseded = checkpoints._delete_superseded
        own = checkpoints.entries

        def away(folder: Path, prefix: str) -> list[Path]:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(folder))

        def looks(*args: Any) -> None:
            monkeypatch.setattr(checkpoints, "entries", away)
            superseded(*args)

        monkeypatch.setattr(checkpoints, "_delete_superseded", looks)
        assert commit_checkpoint(tmp_path, 20, 1, RANKS, num_to_keep=1).step == 20
        monkeypatch.setattr(checkpoints, "entries", own)
        assert held(tmp_path) == [(20, 1), (10, 1)]

    def test_one_that_cannot_take_the_place_of_its_older_self_leaves_that(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save(tmp_path, 20)
        open_attempt(tmp_path, 2)
        write(tmp_path, 20, attempt=2)
        own = Path.rename

        def fails_once(path: Path, target: Path) -> Path:
            if path.name == "step-00000020-timeline-0":
                monkeypatch.setattr(Path, "rename", own)
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return own(path, target)

        monkeypatch.setattr(Path, "rename", fails_once)
        with pytest.raises(OSError, match="Input/output"):
            commit_checkpoint(tmp_path, 20, 2, RANKS)
        bury(tmp_path, 2)
        assert held(tmp_path) == [(20, 1)]

    def test_a_state_that_changed_on_its_way_is_not_written(self, tmp_path: Path) -> None:
        open_attempt(tmp_path, 1)
        with pytest.raises(DamagedFileError, match="changed before it was written"):
            write_rank_file(
                tmp_path, SnapshotKey("job", 1, 0, 0, 10), b"other", digest_of(b"state")
            )
        assert bytes_used(tmp_path) == 0

    def test_a_disk_that_gives_back_other_bytes_is_found_while_writing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own = os.fsync

        def rotting(descriptor: int) -> None:
            own(descriptor)
            if str(Path(f"/proc/self/fd/{descriptor}").readlink()).endswith("rs.partial"):
                os.pwrite(descriptor, b"\0", 7)

        monkeypatch.setattr(os, "fsync", rotting)
        open_attempt(tmp_path, 1)
        with pytest.raises(DamagedFileError, match="the disk lost bytes"):
            write(tmp_path, 10)
        assert bytes_used(tmp_path) == 0


class TestRetention:
    def test_one_that_somebody_reads_stays_until_it_is_let_go(self, tmp_path: Path) -> None:
        save(tmp_path, 10)
        source = list_checkpoints(tmp_path)[0].path
        hold(source, "other-job")
        for step in (20, 30):
            save(tmp_path, step, keep=1)
        assert held(tmp_path) == [(30, 1), (10, 1)]
        let_go(source, "other-job")
        save(tmp_path, 40, keep=1)
        assert held(tmp_path) == [(40, 1)]

    def test_a_hold_that_was_forgotten_ends(self, tmp_path: Path) -> None:
        save(tmp_path, 10)
        source = list_checkpoints(tmp_path)[0].path
        hold(source, "dead-job")
        os.utime(source / "held-by-dead-job", (0, 0))
        save(tmp_path, 20, keep=1)
        assert held(tmp_path) == [(20, 1)]

    def test_a_truncated_one_takes_no_good_ones_place(self, tmp_path: Path) -> None:
        for step in (10, 20, 30):
            save(tmp_path, step)
        newest = list_checkpoints(tmp_path)[0].path / "rank-00000.safetensors"
        newest.write_bytes(newest.read_bytes()[:10])
        save(tmp_path, 40, keep=2)
        assert held(tmp_path) == [(40, 1), (20, 1)]


class TestDamage:
    @pytest.mark.parametrize("at", range(0, 1400, 61))
    def test_a_flipped_byte_of_a_manifest_is_never_read_as_another_checkpoint(
        self, tmp_path: Path, at: int
    ) -> None:
        save(tmp_path, 10)
        save(tmp_path, 20)
        manifest = list_checkpoints(tmp_path)[0].path / "manifest.json"
        told = bytearray(manifest.read_bytes())
        told[at % len(told)] ^= 0x15
        manifest.write_bytes(told)
        found = newest_checkpoint(tmp_path)
        assert found is not None
        if found.step == 20:  # a digit's other spelling, or white space
            assert json.loads(told) == json.loads(bytes(told))
            assert not verify_checkpoint(found)

    def test_slices_of_a_large_file_are_verified_by_themselves(self, tmp_path: Path) -> None:
        data = np.random.default_rng(0).bytes(3 * CHUNK + 17)
        file = checkpoint_files.write_rank_file(tmp_path, "r.safetensors", data, digest_of(data))
        path = tmp_path / "r.safetensors"
        with path.open("r+b") as stream:
            stream.seek(2 * CHUNK + 5)
            stream.write(b"\0\0\0")
        reader = RankFileReader(tmp_path, file)
        for begin, end in [(0, 10), (CHUNK - 3, CHUNK + 3), (3 * CHUNK, 3 * CHUNK + 17), (5, 5)]:
            assert reader.read(begin, end).tobytes() == data[begin:end]
        with pytest.raises(DamagedFileError, match=f"bytes from {2 * CHUNK} "):
            reader.read(2 * CHUNK - 1, 2 * CHUNK + 1)
        reader.close()

    def test_a_length_that_changed_is_refused_before_reading(self, tmp_path: Path) -> None:
        data = np.random.default_rng(0).bytes(CHUNK + 17)
        file = checkpoint_files.write_rank_file(tmp_path, "r.safetensors", data, digest_of(data))
        path = tmp_path / "r.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(DamagedFileError):
            RankFileReader(tmp_path, file)

    @pytest.mark.parametrize("change", [lambda told: told.replace(b'["', b'["00'), lambda _: b""])
    def test_without_the_digests_of_its_chunks_a_file_is_read_whole_and_verified(
        self, tmp_path: Path, change: Callable[[bytes], bytes]
    ) -> None:
        data = np.random.default_rng(0).bytes(CHUNK + 17)
        file = checkpoint_files.write_rank_file(tmp_path, "r.safetensors", data, digest_of(data))
        note, path = tmp_path / "r.json", tmp_path / "r.safetensors"
        note.write_bytes(change(note.read_bytes()))
        reader = RankFileReader(tmp_path, file)
        assert reader.read(CHUNK - 3, CHUNK + 3).tobytes() == data[CHUNK - 3 : CHUNK + 3]
        reader.close()
        path.write_bytes(b"\0" + data[1:])
        with pytest.raises(DamagedFileError):
            RankFileReader(tmp_path, file)

    def test_a_manifest_that_is_garbage_is_damage_of_that_rank_and_step(
        self, tmp_path: Path
    ) -> None:
        save(tmp_path, 10)
        folder = list_checkpoints(tmp_path)[0].path
        (folder / "manifest.json").write_bytes(b"\xff\x00[]")
        with pytest.raises(checkpoints.DamagedSnapshotError, match="rank 0: copy of step 10"):
            read_rank_file(folder, 0, 10)
