"""The supervisor at the job's end, and while its controller is away or refuses it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from launch.commands import (
    Stop,
)
from orchestrator.supervision.phases import Phase
from orchestrator.supervision.stop_time import END_TIMEOUT_S, LEAST_STOP_S
from tests.unit.scripted_job import LAYERS, Make, Script, ScriptedRanks


def saturates_from(step: int, layer: str = LAYERS[1]) -> Script:
    return Script(saturated=lambda s, name: s >= step and name == layer)


class TestController:
    def test_a_refusal_ends_the_ranks_and_nothing_more_is_written(self, bench: Make) -> None:
        job = bench()
        job.train(10)
        before = len(job.settled().steps)
        job.controller.fenced = True
        job.ranks.train(3)
        job.step()
        deadline = time.monotonic() + 60
        while job.supervision.phase is not Phase.OVER and time.monotonic() < deadline:
            job.step()
            time.sleep(0.01)
        assert job.supervision.phase is Phase.OVER
        assert job.ranks.closed and len(job.controller.steps) == before

    def test_a_refused_action_is_not_carried_out(self, bench: Make) -> None:
        job = bench(saturates_from(22))
        job.train(22)
        job.settled()
        job.controller.fenced = True
        job.train(1)
        assert job.ranks.commands == [] and job.ranks.closed

    def test_training_goes_on_while_the_controller_restarts_and_nothing_is_lost(
        self, bench: Make
    ) -> None:
        job = bench()
        job.train(5)
        job.settled()
        job.controller.down = 3
        job.train(10)
        assert job.ranks.step == 15
        assert [s["step"] for s in job.settled().steps] == list(range(15))

    def test_an_action_waits_for_the_controller(self, bench: Make) -> None:
        job = bench(saturates_from(22))
        job.train(22)
        job.settled()
        job.controller.down = 2
        job.train(1)
        assert job.controller.kinds() == ["layer_fallback"] and job.controller.down == 0
        assert len(job.ranks.commands) == 1


class TestEnd:
    def test_all_steps_done_succeeds_with_a_report(self, bench: Make, tmp_path: Path) -> None:
        job = bench(training={"steps": 12})
        job.train(12)
        job.ranks.finish()
        job.step()
        assert job.supervision.phase is Phase.OVER
        assert job.controller.states[-1] == ("succeeded", "STEPS_DONE")
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert summary["state"] == "succeeded" and summary["steps"] == 12
        assert (tmp_path / "report.html").stat().st_size > 0

    def test_what_ranks_waited_for_is_no_time_of_their_last_checkpoint(
        self, bench: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job = bench(training={"steps": 12})
        job.train(12)
        job.settled()
        job.ranks.lose(0)
        with monkeypatch.context() as importing:
            importing.setattr(job.ranks, "ready", lambda: False)
            for _ in range(3):
                job.step(END_TIMEOUT_S / 4)
        for _ in range(3):
            job.step(END_TIMEOUT_S / 4)
        assert job.controller.kinds() == ["restart"]

    def test_an_end_that_the_store_refuses_leaves_no_report(
        self, bench: Make, tmp_path: Path
    ) -> None:
        job = bench(training={"steps": 12})
        job.train(12)
        job.settled()
        job.controller.fenced = True
        job.ranks.finish()
        job.step()
        assert job.supervision.phase is Phase.OVER
        assert not (tmp_path / "summary.json").exists()
        assert not (tmp_path / "report.html").exists()

    def test_a_supervisor_that_slept_through_the_next_attempt_leaves_its_report_alone(
        self, bench: Make, tmp_path: Path
    ) -> None:
        job = bench(training={"steps": 40})
        job.train(8)
        job.supervision.ask_stop("cancelled by a user")
        job.step()
        job.settled()
        asleep = job.supervision
        job.controller.attempt += 1
        job.ranks = ScriptedRanks(Script())
        job.ranks.clock = lambda: job.now
        job.take_over(job.controller.resume())
        job.train(40)
        job.ranks.finish()
        job.step()
        left = {name: (tmp_path / name).read_text() for name in ("summary.json", "report.html")}
        assert json.loads(left["summary.json"])["state"] == "succeeded"
        job.now += 600
        asleep.step()
        assert asleep.phase is Phase.OVER
        assert {name: (tmp_path / name).read_text() for name in left} == left

    def test_the_end_waits_for_the_last_reports(self, bench: Make) -> None:
        job = bench(training={"steps": 12})
        job.step()
        kept: list[Any] = []
        job.ranks.deliver = kept.extend
        job.ranks.train(12)
        job.ranks.finish()
        job.step()
        assert job.supervision.phase is Phase.TRAINING
        job.supervision.deliver(kept)
        job.step()
        assert job.supervision.phase is Phase.OVER and len(job.controller.steps) == 12

    def test_a_job_whose_last_state_is_not_on_disk_has_not_succeeded(self, bench: Make) -> None:
        job = bench(training={"steps": 12})
        job.train(12)
        job.ranks.finish("no checkpoint of step 12: OSError: No space left on device")
        job.step()
        assert job.settled().states[-1] == ("failed", "ERROR")
        told = job.controller.event("ended").message
        assert "No space left on device" in told and "octavo resume scripted-000001" in told

    def test_steps_whose_reports_never_came_are_told_at_the_end(self, bench: Make) -> None:
        job = bench(training={"steps": 12})
        job.train(8)
        job.ranks.deliver = lambda reports: None
        job.ranks.train(4)
        job.ranks.finish()
        job.step()
        job.step(11.0)
        assert job.supervision.phase is Phase.OVER
        assert job.settled().event("unrecorded").detail == {"first": 8, "last": 11}
        assert "Steps 8 to 11" in job.controller.event("ended").message

    def test_a_stop_takes_a_checkpoint_first(self, bench: Make) -> None:
        job = bench()
        job.train(8)
        job.supervision.ask_stop("cancelled by a user")
        job.step()
        (command,) = job.ranks.commands
        assert command.order == Stop("cancelled by a user", checkpoint=True)
        assert job.supervision.phase is Phase.STOPPING and not job.ranks.closed
        job.ranks.train()
        job.step()
        assert job.controller.states[-1] == ("cancelled", "ENDED") and job.ranks.closed

    def test_a_stop_before_the_first_step_is_done_at_once(self, bench: Make) -> None:
        job = bench()
        job.step()
        job.supervision.ask_stop("cancelled by a user")
        job.step()
        assert job.controller.states[-1] == ("cancelled", "ENDED") and job.ranks.closed
        assert job.ranks.commands == []

    def test_ranks_that_do_not_stop_are_ended(self, bench: Make) -> None:
        job = bench()
        job.train(8)
        job.supervision.ask_stop("cancelled by a user")
        job.step()
        job.step(LEAST_STOP_S - 1.0)
        assert job.supervision.phase is Phase.STOPPING
        job.step(2.0)
        assert job.controller.states[-1] == ("cancelled", "ENDED") and job.ranks.closed
        assert "without a checkpoint" in job.controller.event("ended").message
