"""Stacks of real processes, by either tool."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch import stacks
from launch.stacks import stacks_of

SLEEPS = """
import sys, time
from launch.stacks import write_stacks_at_signal
def sleeps_in_here():
    print("ready", flush=True)
    time.sleep(60)
if sys.argv[1] == "prepared":
    write_stacks_at_signal()
sleeps_in_here()
"""


@contextmanager
def sleeper(log: Path, how: str = "prepared") -> Iterator[subprocess.Popen[str]]:
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", SLEEPS, how], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()
            process.wait()


def test_py_spy_reads_a_process_that_runs_and_one_that_is_stopped(tmp_path: Path) -> None:
    with sleeper(tmp_path / "log") as process:
        for stopped in (False, True):
            if stopped:
                process.send_signal(signal.SIGSTOP)
                while " T " not in Path(f"/proc/{process.pid}/stat").read_text():
                    time.sleep(0.01)
            found = stacks_of([process.pid], [""])[process.pid]
            assert (found.tool, found.stopped) == ("py-spy", stopped), found.why
            assert "sleeps_in_here" in found.text()


def test_where_py_spy_may_not_attach_the_process_writes_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "_from_outside", lambda pid: ((), "Permission Denied"))
    log = tmp_path / "log"
    with sleeper(log) as process:
        found = stacks_of([process.pid], [str(log)])[process.pid]
        assert found.tool == "faulthandler" and "Permission Denied" in found.why
        assert "sleeps_in_here" in found.text()
        assert process.poll() is None, "it goes on"


def test_a_process_that_is_not_prepared_is_sent_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "_from_outside", lambda pid: ((), "Permission Denied"))
    log = tmp_path / "log"
    with sleeper(log, "unprepared") as process:
        found = stacks_of([process.pid], [str(log)])[process.pid]
        assert found.tool == "none" and "did not prepare" in found.why
        assert process.poll() is None, "the signal would have ended it"


def test_a_process_that_is_gone_is_told(tmp_path: Path) -> None:
    with sleeper(tmp_path / "log") as process:
        pass
    found = stacks_of([process.pid], [""])[process.pid]
    assert found.tool == "none" and found.why
