"""The home of one ``octavo run``: where it lies afterwards, and who may put it away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from orchestrator.cluster.private_home import OWNER, PLACE, PrivateHome, sweep


def dead_pid() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def owned_by(home: PrivateHome, **changes: Any) -> Path:
    file = home.home.path / OWNER
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return home.home.path


def test_a_run_whose_job_is_done_leaves_no_home(tmp_path: Path) -> None:
    assert PrivateHome(tmp_path).leave(needed=False) is None
    assert list(tmp_path.iterdir()) == []


def test_the_home_of_a_job_that_could_go_on_lies_in_its_directory(tmp_path: Path) -> None:
    job = tmp_path / "job"
    job.mkdir()
    private = PrivateHome(tmp_path)
    private.belongs_to(job)
    assert private.leave(needed=True) == job / PLACE
    assert (job / PLACE / "config.json").exists()
    assert list(tmp_path.iterdir()) == [job]


def test_what_killed_runs_left_is_put_away_and_kept_with_its_job(tmp_path: Path) -> None:
    job = tmp_path / "job"
    job.mkdir()
    pid = dead_pid()
    owned_by(PrivateHome(tmp_path), pid=pid)
    owned_by(PrivateHome(tmp_path), pid=pid, job_dir=str(job))
    # Its number went to another process since.
    owned_by(PrivateHome(tmp_path), pid=os.getppid(), created=1.0)
    assert sweep(tmp_path) == [job / PLACE]
    assert list(tmp_path.iterdir()) == [job]


def test_nothing_is_put_away_that_may_be_alive(tmp_path: Path) -> None:
    alive = PrivateHome(tmp_path).home.path
    elsewhere = owned_by(PrivateHome(tmp_path), pid=dead_pid(), machine="another")
    kept = PrivateHome(tmp_path, keep=True).home.path
    host = {"temp_dir": "", "slots": 1, "url": ""}
    hosted = owned_by(PrivateHome(tmp_path), pid=dead_pid())
    created = json.loads((alive / OWNER).read_text())["created"]
    (hosted / "host.json").write_text(json.dumps(host | {"pid": os.getpid(), "created": created}))
    assert sweep(tmp_path) == []
    assert set(tmp_path.iterdir()) == {alive, elsewhere, kept, hosted}
