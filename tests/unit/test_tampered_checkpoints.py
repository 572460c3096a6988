"""Checkpoints that somebody has changed: nothing of them is loaded, nothing waits for ever."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch import checkpoints
from launch.attempt_folder import own_folder
from launch.checkpoint_files import DamagedFileError
from launch.checkpoint_manifest import MANIFEST, ManifestError, manifest_digest, read_manifest
from launch.checkpoints import list_checkpoints
from launch.digests import digest_of
from launch.reshaping import state_on_disk
from launch.saved_state import SavedState
from launch.snapshots import SnapshotError, SnapshotKey
from orchestrator.saved.resume_from import check_resume_from, foreign_points
from orchestrator.spec.errors import SpecError
from tests.unit.test_resume_from import begins_at, checkpoint

STEP = 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "job", STEP)


def sealed_anew(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Its manifest changed by somebody who knows how the digest is made."""
    told = json.loads((folder / MANIFEST).read_text())
    del told["digest"]
    change(told)
    told["digest"] = manifest_digest(told)
    (folder / MANIFEST).write_text(json.dumps(told))


def test_a_state_sealed_as_another_step_is_not_loaded_as_that(folder: Path) -> None:
    sealed_anew(folder, lambda told: told.update(step=10))
    with SavedState(folder) as saved, pytest.raises(DamagedFileError, match="state of step 20"):
        saved.header(0)


def test_nor_are_files_of_other_ranks(folder: Path) -> None:
    def swap(told: dict[str, Any]) -> None:
        files = told["files"]
        files["0"], files["1"] = files["1"], files["0"]

    sealed_anew(folder, swap)
    with SavedState(folder) as saved, pytest.raises(DamagedFileError, match="rank 1's state"):
        saved.header(0)


def test_nor_one_rank_s_twice(folder: Path) -> None:
    sealed_anew(folder, lambda told: told["files"].update({"1": told["files"]["0"]}))
    with SavedState(folder) as saved:
        assert saved.header(0).layout.coordinate == (0, 0, 0)
        with pytest.raises(DamagedFileError, match="rank 1 and step 20 holds rank 0's"):
            saved.header(1)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 200_000,
        b"",
        b"\xff\x00",
        b"null",
        b'{"format": 2}',
        pickle.dumps({"format": 2}),
    ],
)
def test_a_manifest_of_garbage_is_no_checkpoint_and_the_older_one_serves(
    tmp_path: Path, text: bytes
) -> None:
    older, newer = (checkpoint(tmp_path / "job", step) for step in (10, 20))
    (newer / MANIFEST).write_bytes(text)
    told: list[str] = []
    found = list_checkpoints(tmp_path / "job", left_out=lambda folder, why: told.append(why))
    assert [c.path for c in found] == [older] and len(told) == 1
    job = begins_at(tmp_path / "job")
    check_resume_from(job, "job.yaml")
    named: list[Path] = []
    points = foreign_points(job, lambda folder, why: named.append(folder))
    assert [p.step for p in points] == [10] and named == [newer]


@pytest.mark.parametrize("key", ["step", "attempt", "timeline"])
@pytest.mark.parametrize("value", ["20", -1, None, 1.5, True])
def test_numbers_of_a_manifest_are_numbers(folder: Path, key: str, value: object) -> None:
    sealed_anew(folder, lambda told: told.update({key: value}))
    with pytest.raises(ManifestError, match="step, attempt and timeline"):
        read_manifest(folder)


def test_what_it_is_of_is_told(folder: Path) -> None:
    sealed_anew(folder, lambda told: told.update(run=None))
    with pytest.raises(ManifestError, match="what it is of"):
        read_manifest(folder)


@pytest.mark.parametrize("name", [MANIFEST, "rank-00000.safetensors"])
def test_a_pipe_in_the_place_of_a_file_keeps_nobody_waiting(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(SpecError) as caught:
        check_resume_from(begins_at(folder), "job.yaml")
    assert "regular file" in str(caught.value) or "cut off" in str(caught.value)


def test_one_in_the_place_of_a_file_s_digests_is_passed_over(folder: Path) -> None:
    (folder / "rank-00000.json").unlink()
    os.mkfifo(folder / "rank-00000.json")
    check_resume_from(begins_at(folder), "job.yaml")


@pytest.mark.parametrize("place", ["/dev/zero", "/dev/null", "/proc/self/environ"])
def test_nor_does_a_device(place: str) -> None:
    with pytest.raises(SpecError, match="no checkpoint"):
        check_resume_from(begins_at(Path(place)), "job.yaml")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x01",
        (2**62).to_bytes(8, "little") + b"{}",
        pickle.dumps(["a"] * 100),
        (2).to_bytes(8, "little") + b"[[",
    ],
)
def test_a_file_that_is_no_state_and_is_sealed_anew_is_refused_at_once(
    folder: Path, data: bytes
) -> None:
    attempt = own_folder(folder.parent, 1)
    key = SnapshotKey("first", 1, 0, 1, STEP)
    path = checkpoints.write_rank_file(folder.parent.parent, key, data, digest_of(data))
    for file in attempt.rglob("rank-00001.*"):
        (folder / file.name).write_bytes(file.read_bytes())
    note = json.loads((folder / "rank-00001.json").read_text())
    note.pop("digests")
    sealed_anew(folder, lambda told: told["files"].update({"1": note}))
    assert path.name == "rank-00001.safetensors"
    with pytest.raises(SpecError, match="can't be read"):
        check_resume_from(begins_at(folder), "job.yaml")
    with SavedState(folder) as saved:
        mine = replace(saved.header(0).layout, coordinate=(1, 0, 0))
    with pytest.raises(SnapshotError):
        state_on_disk(folder, 1, STEP, mine, {})
