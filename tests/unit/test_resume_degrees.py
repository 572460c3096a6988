"""`octavo resume JOB --parallelism …`: a paused job goes on with other degrees, or is refused."""

from __future__ import annotations

import json

import pytest
from fastapi.testclient import TestClient

from orchestrator.cli.main import call
from orchestrator.home.folder import Home
from orchestrator.lifecycle import Cause, TransitionRefused
from orchestrator.spec.errors import SpecError
from tests.unit.control_plane import ControlPlane

SPEC = {
    "name": "a",
    "slots_per_node": 4,
    "parallelism": {"pipeline": 2},
    "training": {"train_batch_size": 16},
}


def paused(plane: ControlPlane) -> str:
    job = plane.controller.intake.submit(SPEC, "job.yaml").id
    plane.controller.store.change(job, Cause.CANCEL_ASKED, "by a test", 1.0)
    return job


def test_a_job_goes_on_with_the_degrees_asked_for(plane: ControlPlane) -> None:
    job = paused(plane)
    row = plane.controller.resume(job, "smaller", {"data": 1})
    assert row.state.word == "queued"
    assert (row.spec.parallelism.data, row.spec.slots_per_node) == (1, 2)
    assert row.spec.training.train_batch_size == 16
    (event,) = [e for e in plane.controller.store.past.events(job) if e["kind"] == "degrees"]
    assert "pipeline 2, data 1" in event["message"]


def test_an_impossible_split_is_refused_and_the_job_stays_as_it_was(plane: ControlPlane) -> None:
    job = paused(plane)
    before = plane.controller.store.job(job)
    with pytest.raises(SpecError, match="pipeline"):
        plane.controller.resume(job, "", {"pipeline": 8})
    assert plane.controller.store.job(job) == before


def test_a_job_that_is_under_way_keeps_its_degrees(plane: ControlPlane) -> None:
    job = plane.controller.intake.submit(SPEC, "job.yaml").id
    with pytest.raises(TransitionRefused):
        plane.controller.resume(job, "", {"data": 1})
    assert plane.controller.store.job(job).spec.parallelism.data == 2


def test_the_api_tells_problems_by_key_and_refuses_unknown_words(
    api: TestClient, plane: ControlPlane
) -> None:
    job = paused(plane)
    answer = api.post(f"/v1/jobs/{job}/resume", json={"parallelism": {"tensor": 3}})
    assert answer.status_code == 422
    assert "parallelism" in json.dumps(answer.json())
    answer = api.post(f"/v1/jobs/{job}/resume", json={"parallelism": {"tensors": 2}})
    assert answer.status_code == 422
    answer = api.post(f"/v1/jobs/{job}/resume", json={"parallelism": {"tensor": 2}})
    assert answer.json()["state"] == "queued"


def test_the_command_takes_words_and_numbers(
    home: Home, plane: ControlPlane, capsys: pytest.CaptureFixture[str]
) -> None:
    job = paused(plane)
    for words, told in [
        ("data=one", "data=one"),
        ("date=1", "did you mean 'data'?"),
        ("tensor=3", "parallelism"),
    ]:
        assert call(["resume", job, "--parallelism", words]) == 2
        assert told in capsys.readouterr().err
    assert call(["resume", job, "--parallelism", "pipeline=1,data=2"]) == 0
    assert plane.controller.store.job(job).spec.parallelism.pipeline == 1
