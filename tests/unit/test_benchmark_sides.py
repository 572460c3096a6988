"""A side's run: what is done now and then is in its time a step, and a disturbed one is none."""

from __future__ import annotations

import contextlib
from itertools import accumulate
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.benchmarks import sides
from tests.benchmarks.bench_overhead import on_layout
from tests.benchmarks.peers.processes import SideError
from tests.benchmarks.sides import run_of


def test_work_at_each_tenth_step_is_in_the_time_of_a_step() -> None:
    even = run_of(0.0, list(accumulate([1.0] * 240)), [2.0] * 240, 240)
    stalls = [2.5 if step % 10 == 9 else 1.0 for step in range(240)]
    stalled = run_of(0.0, list(accumulate(stalls)), [2.0] * 240, 240)
    assert even.step_s == pytest.approx(1.0)
    assert stalled.step_s == pytest.approx(1.15, rel=0.01)


def test_work_at_each_hundredth_step_is_in_it_too() -> None:
    stalls = [13.0 if step % 100 == 99 else 1.0 for step in range(240)]
    stalled = run_of(0.0, list(accumulate(stalls)), [2.0] * 240, 240)
    assert stalled.step_s == pytest.approx(1.1, rel=0.01)


def test_a_run_that_did_steps_again_is_none() -> None:
    with pytest.raises(SideError, match="247 steps were told of 240"):
        run_of(0.0, list(range(247)), [2.0] * 247, 240)


def test_an_up_that_hangs_is_a_hang_and_what_it_started_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "octavo"
    script.write_text(f"#!/bin/sh\nsleep 300 &\necho $! > {tmp_path}/pid\nwait\n")
    script.chmod(0o755)
    monkeypatch.setattr(sides, "BIN", tmp_path)
    monkeypatch.setattr(sides, "COMMAND_S", 1.0)
    with (
        pytest.raises(SideError, match="octavo up was not over") as error,
        sides.cluster(tmp_path / "home", 1),
    ):
        raise AssertionError("it was never up")
    assert error.value.hung
    # Whoever is its parent now may not have noticed yet.
    with contextlib.suppress(psutil.NoSuchProcess):
        left = psutil.Process(int((tmp_path / "pid").read_text()))
        assert left.status() == psutil.STATUS_ZOMBIE


class OneSlot:
    """A controller on which one job runs at a time, and none ever ends by itself."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}

    def submit(self, spec: Any, file: str) -> dict[str, Any]:
        job = f"job-{len(self.states)}"
        self.states[job] = "queued" if "running" in self.states.values() else "running"
        return {"id": job}

    def job(self, job: str) -> dict[str, Any]:
        return {"settled": self.states[job] == "cancelled", "state": self.states[job]}

    def cancel(self, job: str, reason: str) -> None:
        self.states[job] = "cancelled"


def test_a_job_that_hangs_leaves_its_nodes_to_the_next_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sides, "LIMIT_S", -1.0)
    client = OneSlot()
    for _ in range(2):
        with pytest.raises(SideError) as error:
            sides.under_octavo(client, on_layout("1x1", 10))  # type: ignore[arg-type]
        assert error.value.hung
    assert client.states == {"job-0": "cancelled", "job-1": "cancelled"}
