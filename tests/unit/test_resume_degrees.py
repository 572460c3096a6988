"""`octavo resume JOB --parallelism …`: a paused job goes on with other degrees, or is refused."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from orchestrator.actions import Action
from orchestrator.cli.main import call
from orchestrator.home.folder import Home
from orchestrator.lifecycle import Cause, TransitionRefused
from orchestrator.protocol import SupervisorBatch
from orchestrator.spec.errors import SpecError
from orchestrator.store.errors import StoreUnavailableError
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


@pytest.mark.parametrize("trouble", ["away", "full"])
def test_without_its_storage_it_is_refused_and_the_job_stays_as_it_was(
    plane: ControlPlane, api: TestClient, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    job = paused(plane)
    before = plane.store.job(job)
    folder = Path(before.job_dir)
    copy = (folder / "spec.yaml").read_text()
    away = folder.with_name("away")
    if trouble == "away":
        folder.rename(away)
    else:
        monkeypatch.setattr(Path, "write_text", full_disk)
    answer = api.post(f"/v1/jobs/{job}/resume", json={"parallelism": {"data": 1}})
    assert answer.status_code == 422
    (problem,) = answer.json()["problems"]
    assert problem["message"].startswith("spec.yaml can't be written there: No s")
    assert plane.store.job(job) == before
    monkeypatch.undo()
    if trouble == "away":
        away.rename(folder)
    assert (folder / "spec.yaml").read_text() == copy
    assert plane.controller.resume(job, "again", {"data": 1}).state.word == "queued"
    assert "data: 1" in (folder / "spec.yaml").read_text()
    assert sorted(f.name for f in folder.iterdir()) == ["logs", "spec.yaml"]


def full_disk(path: Path, text: str, **_: object) -> None:
    """``Path.write_text`` there."""
    path.open("w").close()
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_the_store_does_not_take_leaves_the_copy_of_the_spec_as_it_was(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = paused(plane)
    folder = Path(plane.store.job(job).job_dir)
    copy = (folder / "spec.yaml").read_text()

    def locked(*_: object) -> None:
        raise StoreUnavailableError("database is locked")

    with monkeypatch.context() as patched, pytest.raises(StoreUnavailableError):
        patched.setattr("orchestrator.store.database.set_state", locked)
        plane.controller.resume(job, "smaller", {"data": 1})
    assert (folder / "spec.yaml").read_text() == copy
    assert sorted(f.name for f in folder.iterdir()) == ["logs", "spec.yaml"]
    assert plane.state(job) == "cancelled"


@pytest.mark.parametrize("asked", ["resume", "cancel"])
def test_what_is_stored_is_never_answered_with_an_error(
    plane: ControlPlane, api: TestClient, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """A store that fails after its one write has nothing more to do."""
    job = paused(plane)
    action = Action("fail", 1, 0, 5, plane.now, "No rung is left.", in_place=False)
    plane.store.attempts.decide(job, SupervisorBatch(0, actions=(action,)), plane.now)
    if asked == "cancel":
        plane.controller.resume(job, "once more")

    def locked(*_: object) -> None:
        raise StoreUnavailableError("database is locked")

    written = plane.store.tended.written

    def then_locked(*jobs: str) -> None:
        written(*jobs)
        for name in ("job", "note"):
            monkeypatch.setattr(plane.store, name, locked)

    monkeypatch.setattr(plane.store.tended, "written", then_locked)
    answer = api.post(f"/v1/jobs/{job}/{asked}")
    monkeypatch.undo()
    assert (answer.status_code, answer.json()["state"]) == (200, plane.state(job))
    assert len(plane.told(job, "ladder_renewed")) == 1


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
