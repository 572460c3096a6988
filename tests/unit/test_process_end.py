"""Ranks enlisted on a node are ended whoever started them, also by a keeper's successor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch import process_end
from launch.process_end import Enlisted, runs

RANK = "import sys; print('up', flush=True); sys.stdin.read()"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(process_end.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(process_end, "is_ray_worker", runs)
    return tmp_path / f"octavo-ranks-{os.getuid()}"


def test_the_process_that_takes_a_keepers_place_ends_the_ranks_that_it_had(folder: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", RANK], **pipes) as rank:  # type: ignore[call-overload]
        assert rank.stdout.readline() == b"up\n"
        Enlisted("keeper-0").replace([rank.pid])
        assert Enlisted("keeper-1").end() == [] and runs(rank.pid)
        assert Enlisted("keeper-0").end() == [] and not runs(rank.pid)
    assert list(folder.iterdir()) == []


def test_a_list_that_cannot_be_read_is_none(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / "keeper-0.json").write_text("[1")
    assert Enlisted("keeper-0").end() == []


@pytest.mark.parametrize("made", ["open to others", "a link"])
def test_a_folder_that_others_can_write_to_is_neither_read_nor_written(
    folder: Path, tmp_path: Path, made: str
) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    if made == "a link":
        folder.symlink_to(tmp_path / "theirs")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        ranks = Enlisted("keeper-0")
        ranks.replace([process.pid])
        assert list(folder.iterdir()) == []
        assert ranks.end() == [] and not runs(process.pid), "it knows them itself all the same"
