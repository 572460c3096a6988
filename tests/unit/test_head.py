"""A GCS that dies is started again, for Ray as one process that never ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from orchestrator.cluster.head import LastingGcs, _same_port

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


def started(command: list[str]) -> tuple[list[int], Callable[[], subprocess.Popen[bytes]]]:
    pids: list[int] = []

    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(command)
        pids.append(process.pid)
        return process

    return pids, start


def until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_one_that_is_killed_is_started_again_and_ray_sees_no_end() -> None:
    pids, start = started(SLEEP)
    gcs = LastingGcs(start)
    try:
        for number in (1, 2):
            os.kill(pids[-1], signal.SIGKILL)
            until(lambda number=number: len(pids) > number)  # type: ignore[misc]
            assert gcs.poll() is None and gcs.returncode is None
        until(lambda: gcs.pid == pids[2])
    finally:
        gcs.kill()
    assert gcs.wait(30) == -signal.SIGKILL
    assert gcs.poll() == -signal.SIGKILL and len(pids) == 3, "what Ray ends stays ended"


def test_one_that_does_not_stay_is_given_up_and_told() -> None:
    pids, start = started([sys.executable, "-S", "-c", "raise SystemExit(3)"])
    told = threading.Event()
    gcs = LastingGcs(start, given_up=told.set, give_up_s=0.0, sleep=lambda seconds: None)
    assert told.wait(30)
    assert gcs.poll() == 3 and len(pids) == 2, "once more, and then no more"


def test_one_that_chose_its_port_gets_the_same_one_again(tmp_path: Path) -> None:
    (tmp_path / "gcs_server_port_ab12").write_text("41234")
    command = ["gcs_server", "--gcs_server_port=0", f"--session-dir={tmp_path}", "--node-id=ab12"]
    assert _same_port(command)[1] == "--gcs_server_port=41234"
    assert _same_port(["gcs_server", "--gcs_server_port=6379"])[1] == "--gcs_server_port=6379"
