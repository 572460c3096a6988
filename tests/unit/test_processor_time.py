"""What sides take of the processor is told by kind of process, and of the steps asked for alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.benchmarks.peers.processes import MARK, environment, new_mark
from tests.benchmarks.processor_time import ProcessorMeter, Sample, kind_of, taken_between

BURN = """
import sys, time
while time.process_time() < 0.3:
    pass
print("burnt", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (["ray::Worker.run", ""], "rank"),
        (["/venv/bin/python", "-u", "/repo/tests/plain_deepspeed.py", "job.yaml"], "rank"),
        (["ray::Supervisor"], "Supervisor"),
        (["ray::ControllerActor.report"], "ControllerActor"),
        (["/venv/ray/raylet", "--port=1"], "raylet"),
        (["/venv/bin/python3.11", "-u", "/ray/log_monitor.py", "--x"], "log_monitor.py"),
        ([], "unknown"),
    ],
)
def test_a_process_is_told_by_what_it_does(command: list[str], kind: str) -> None:
    assert kind_of(command) == kind


def test_between_samples_time_is_taken_in_proportion() -> None:
    samples = [
        Sample(10.0, {"rank": 4.0}),
        Sample(20.0, {"rank": 14.0, "raylet": 1.0}),
        Sample(30.0, {"rank": 34.0, "raylet": 3.0}),
    ]
    assert taken_between(samples, 15.0, 25.0) == {"rank": 15.0, "raylet": 1.5}
    # Beyond the last, as between the last two.
    assert taken_between(samples, 20.0, 32.0) == pytest.approx({"rank": 24.0, "raylet": 2.4})
    assert taken_between(samples[:1], 10.0, 12.0) == {}


def test_what_marked_processes_take_is_counted_and_what_others_take_is_not(tmp_path: Path) -> None:
    before = os.environ.get(MARK)
    script = tmp_path / "burn.py"
    script.write_text(BURN)

    def burning(mark: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, str(script)],
            env=environment(mark),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    other = burning("of-somebody-else")
    with ProcessorMeter() as meter:
        began = time.time()
        ours = burning(new_mark())
        for process in (ours, other):
            assert process.stdout is not None
            assert process.stdout.readline() == b"burnt\n"
        meter.look()
        ours.communicate()
        # It has ended; what it had taken stays.
        meter.look()
        ended = time.time()
    other.communicate()
    taken = meter.between(began, ended)
    assert set(taken) == {"burn.py"}
    assert 0.25 < taken["burn.py"] < 3.0
    assert os.environ.get(MARK) == before
