"""The end of a process is told at once by its own host, and nothing else is told as an end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from launch import lifeline
from launch.lifeline import Lifeline, depend_on

HOLDER = """
import sys
from launch.lifeline import Lifeline
print(Lifeline("127.0.0.1").where[1], flush=True)
sys.stdin.read()
"""


def test_a_killed_process_is_told() -> None:
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        told = threading.Event()
        depend_on(("127.0.0.1", int(holder.stdout.readline())), told.set)
        holder.send_signal(signal.SIGSTOP)
        assert not told.wait(0.2), "who stands still is not gone"
        holder.kill()
        assert told.wait(30)


def test_a_connection_that_somebody_cuts_is_tied_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "PAUSE_S", 0.01)
    told = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        depend_on(server.getsockname(), told.set)
        for _ in range(2):
            server.accept()[0].close()
        last = server.accept()[0]
        assert not told.is_set()
    last.close()
    assert told.wait(30)


def test_who_was_forgotten_and_lives_ties_itself_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "PAUSE_S", 0.01)
    line = Lifeline("127.0.0.1")
    told = threading.Event()
    depend_on(line.where, told.set)
    for _ in range(2):
        deadline = time.monotonic() + 30
        while not line._held:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        line.forget()
    assert not told.is_set()
    line.close()
    assert told.wait(30)


def test_letting_go_is_an_end() -> None:
    line = Lifeline("127.0.0.1")
    told = threading.Event()
    depend_on(line.where, told.set)
    line.close()
    assert told.wait(30)
