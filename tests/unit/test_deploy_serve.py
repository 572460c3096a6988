"""The process that holds a controller, and the job that it trains: tries, pauses, ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from deploy.job_runner import AWAY_S, PAUSED, JobRunner
from deploy.serve import STOP, ServeError, Service, serve
from orchestrator.api.client_errors import ServerError
from orchestrator.home.folder import Home
from orchestrator.lifecycle import Cause, JobState
from orchestrator.protocol import SupervisorBatch
from orchestrator.spec.errors import SpecError
from tests.unit.control_plane import ControlPlane


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("x" * 4096)
    file = tmp_path / "job.yaml"
    file.write_text(
        "name: toy\nslots_per_node: 4\nparallelism: {pipeline: 2}\n"
        f"data: {{source: {tmp_path / 'text.txt'}}}\n"
    )
    return file


def test_a_second_try_with_the_same_key_is_the_same_job(
    plane: ControlPlane, home: Home, job: Path
) -> None:
    for _ in range(2):
        assert JobRunner(home, job, "k").look(0.0) is None
    assert len(plane.store.jobs()) == 1
    JobRunner(home, job, "other").look(0.0)
    assert len(plane.store.jobs()) == 2


def test_the_exit_code_is_that_of_the_jobs_end(plane: ControlPlane, home: Home, job: Path) -> None:
    runner = JobRunner(home, job, "k")
    assert runner.look(0.0) is None
    plane.controller.cancel(plane.store.jobs()[0].id, "enough")
    assert runner.look(1.0) == 103


def test_a_controller_that_stays_away_is_given_up_and_one_that_comes_is_not(
    tmp_path: Path, job: Path
) -> None:
    runner = JobRunner(Home(tmp_path / "nobody"), job, "k")
    assert runner.look(5.0) is None
    assert runner.look(5.0 + AWAY_S) is None
    assert runner.look(5.1 + AWAY_S) == 3


def test_a_wrong_job_file_is_refused_before_anybody_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("nam: toy\n")
    with pytest.raises(SpecError, match="did you mean 'name'"):
        JobRunner(Home(tmp_path / "nobody"), file, "k")


def test_what_the_host_paused_is_waited_for_and_what_a_person_paused_is_not(
    plane: ControlPlane, home: Home, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = JobRunner(home, job, "k")
    runner.look(0.0)
    name = plane.store.jobs()[0].id

    class Paused:
        def submit(self, *_: object, **__: object) -> dict[str, object]:
            return {"id": name}

        def job(self, _: str) -> dict[str, object]:
            return {"id": name, "state": "paused", "settled": True, "reason": ""}

        def close(self) -> None:
            pass

    monkeypatch.setattr("deploy.job_runner.Client.of_home", lambda _: Paused())
    (home.path / PAUSED).write_text(json.dumps([name]))
    assert runner.look(1.0) is None
    (home.path / PAUSED).unlink()
    assert runner.look(2.0) == 101


def test_asked_to_end_it_pauses_what_runs_and_keeps_whose_jobs_they_were(
    plane: ControlPlane, home: Home, job: Path
) -> None:
    running, waiting = plane.submit("one"), plane.submit("two")
    plane.steps(3)
    assert plane.state(running) in ("starting", "running")
    assert plane.state(waiting) == "queued"
    (home.path / STOP).touch()
    service = Service(home, "127.0.0.1:1", 1, grace_s=0.3)
    assert service.hold() == 0
    (asked,) = plane.store.controls.of(running)
    assert asked.control.kind == "pause"
    assert not (home.path / STOP).exists()
    assert json.loads((home.path / PAUSED).read_text()) == [running]
    # The next start resumes just those, once. This one's pause comes only then, its resume after
    # it: left out, it would stay paused for ever.
    service._resume_paused()
    assert json.loads((home.path / PAUSED).read_text()) == [running]
    paused = SupervisorBatch(1, transition=(JobState.PAUSED, Cause.PAUSE_ASKED))
    plane.controller.report(running, 1, paused)
    assert plane.state(running) == "paused"
    service._resume_paused()
    assert plane.state(running) == "queued" and not (home.path / PAUSED).exists()


def test_a_head_that_does_not_start_is_told_and_nothing_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ray").write_text("#!/bin/sh\nexit 7\n")
    (tmp_path / "ray").chmod(0o755)
    monkeypatch.delenv("RAY_REDIS_ADDRESS", raising=False)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    service = Service(Home(tmp_path / "home"), "127.0.0.1:1", 1, grace_s=1.0)
    with pytest.raises(ServeError, match="ended with 7"):
        service.start_head(["--port=1"])


def test_it_listens_beyond_the_loopback_only_as_a_controller_may(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tmp_path / "home"), "--address", "127.0.0.1:1", "--listen", "0.0.0.0"]
    assert serve(words) == 2
    assert "without TLS" in capsys.readouterr().err
    assert not (tmp_path / "home").exists()


def test_a_controller_that_cannot_answer_for_a_moment_does_not_end_who_follows_a_job(
    tmp_path: Path, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Locked:
        def submit(self, *_: object, **__: object) -> dict[str, object]:
            raise ServerError("the store is locked; try again")

        def close(self) -> None:
            pass

    monkeypatch.setattr("deploy.job_runner.Client.of_home", lambda _: Locked())
    runner = JobRunner(Home(tmp_path / "home"), job, "k")
    assert runner.look(5.0) is None
    assert runner.look(5.1 + AWAY_S) == 3
