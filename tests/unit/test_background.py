"""Work beside training: one thread, in order, whatever becomes of one piece of it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from launch.background import PoliteQueue


def test_all_is_done_in_order_and_pending_until_it_is() -> None:
    let, done = threading.Semaphore(0), []

    def do(work: int) -> None:
        let.acquire(timeout=10)
        done.append(work)

    queue = PoliteQueue[int]("test", do)
    for work in range(3):
        queue.put(work)
    assert queue.pending() == [0, 1, 2] and not queue.wait(0.01)
    let.release(3)
    assert queue.wait(10) and queue.pending() == [] and done == [0, 1, 2]
    queue.close()


def test_what_waits_can_be_taken_back_but_not_what_is_under_way() -> None:
    begun, let, done = threading.Event(), threading.Event(), []

    def do(work: int) -> None:
        begun.set()
        let.wait(10)
        done.append(work)

    queue = PoliteQueue[int]("test", do)
    for work in (5, 6, 1):
        queue.put(work)
    assert begun.wait(10)
    assert queue.take_back(lambda work: work > 4) == [6]
    let.set()
    assert queue.wait(10) and done == [5, 1]
    queue.close()


def test_an_error_costs_its_own_work_alone(caplog: pytest.LogCaptureFixture) -> None:
    done = []

    def do(work: int) -> None:
        done.append(1 // work)

    queue = PoliteQueue[int]("test", do)
    queue.put(0)
    queue.put(1)
    assert queue.wait(10) and done == [1]
    assert "ZeroDivisionError" in caplog.text
    queue.close()


_NICE_OF_BOTH = """
import os, sys, threading
from launch.background import run_politely
os.nice(int(sys.argv[1]))
run_politely(lambda: print(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
print(os.getpriority(os.PRIO_PROCESS, os.getpid()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads have a nice value on Linux alone")
@pytest.mark.parametrize("increment", [0, 10, 19])
def test_polite_work_is_below_its_own_process_which_ray_has_lowered_already(increment: int) -> None:
    command = [sys.executable, "-c", _NICE_OF_BOTH, str(increment)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    polite, main = map(int, told)
    assert main == min(os.getpriority(os.PRIO_PROCESS, 0) + increment, 19)
    assert polite == min(main + 5, 19)
