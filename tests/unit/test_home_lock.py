"""One host and one controller a home."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from orchestrator.home.folder import Home
from orchestrator.home.lock import HomeLock, HomeTakenError

HOLDS = """
import subprocess, sys, time
from pathlib import Path
from orchestrator.home.folder import Home
from orchestrator.home.lock import HomeLock
lock = HomeLock(Home(Path(sys.argv[1])), "controller")
lock.take()
started = subprocess.Popen([sys.executable, "-c", "input()"], stdin=0)
print(started.pid, flush=True)
time.sleep(60)
"""


def test_who_comes_second_is_told_who_has_it_and_another_role_is_free(tmp_path: Path) -> None:
    first, second = (HomeLock(Home(tmp_path), "host") for _ in range(2))
    first.take()
    with pytest.raises(HomeTakenError, match=f"another host has .*process {os.getpid()} on "):
        second.take(0.1)
    HomeLock(Home(tmp_path), "controller").take()


def test_a_process_that_is_killed_lets_go_of_it_and_its_programs_never_had_it(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as holder:  # type: ignore[call-overload]
        started = psutil.Process(int(holder.stdout.readline()))
        lock = HomeLock(Home(tmp_path), "controller")
        with pytest.raises(HomeTakenError, match=f"process {holder.pid} on "):
            lock.take()
        holder.send_signal(signal.SIGKILL)
        holder.wait(10)
        lock.take(10)
        assert started.is_running(), "what a holder starts goes on without the lock"
    started.wait(10)
