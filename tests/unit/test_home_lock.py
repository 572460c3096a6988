"""One host and one controller a home."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.home.folder import Home
from orchestrator.home.lock import HomeLock, HomeTakenError

HOLDS = """
import sys, time
from pathlib import Path
from orchestrator.home.folder import Home
from orchestrator.home.lock import HomeLock
lock = HomeLock(Home(Path(sys.argv[1])), "controller")
lock.take()
print("held", flush=True)
time.sleep(60)
"""


def test_who_comes_second_is_told_who_has_it_until_it_is_free(tmp_path: Path) -> None:
    first, second = (HomeLock(Home(tmp_path), "host") for _ in range(2))
    first.take()
    with pytest.raises(HomeTakenError, match=f"another host has .*process {os.getpid()} on "):
        second.take(0.1)
    HomeLock(Home(tmp_path), "controller").take()
    first.free()
    second.take()


def test_a_process_that_is_killed_lets_go_of_it_and_its_programs_never_had_it(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", HOLDS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        lock = HomeLock(Home(tmp_path), "controller")
        with pytest.raises(HomeTakenError, match=f"process {holder.pid} on "):
            lock.take()
        holder.send_signal(signal.SIGKILL)
    lock.take(10)
    # What a holder starts goes on without the lock.
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        lock.free()
        HomeLock(Home(tmp_path), "controller").take()
        started.communicate(b"\n")
