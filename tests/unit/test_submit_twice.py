"""A submission that comes again under its key is the same job; another job under it is refused."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient

from orchestrator.controller.intake import SubmitConflictError
from tests.unit.control_plane import ControlPlane


def test_a_submission_that_comes_again_is_the_same_job(plane: ControlPlane) -> None:
    first = plane.submit("toy", key="mine")
    assert plane.submit("toy", key="mine") == first
    assert len(plane.store.jobs()) == len(list(plane.jobs_dir.iterdir())) == 1
    assert plane.submit("toy", key="other") != first


def test_a_key_that_was_used_for_another_job_is_refused(
    plane: ControlPlane, api: TestClient
) -> None:
    job = plane.submit("toy", key="mine")
    with pytest.raises(SubmitConflictError, match=job):
        plane.submit("another", key="mine")
    text = plane.jobs_dir.parent / "text.txt"
    spec = {"name": "third", "slots_per_node": 4, "data": {"source": str(text)}}
    answer = api.post("/v1/jobs", json={"spec": spec, "key": "mine"})
    assert answer.status_code == 409
    assert "was used to submit another job" in answer.json()["error"]


def test_the_same_word_of_two_users_is_two_keys(plane: ControlPlane) -> None:
    first = plane.submit("toy", key="nightly", by="ann")
    second = plane.submit("toy", key="nightly", by="bob")
    assert first != second
    assert plane.submit("toy", key="nightly", by="ann") == first
    assert plane.submit("toy", key="nightly", by="bob") == second


def test_two_at_the_same_time_are_one_job_with_one_directory(
    plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = plane.submit("toy", key="mine")
    # The second has looked before the first was stored.
    monkeypatch.setattr(plane.store, "job_of_key", lambda *_: None)
    assert plane.submit("toy", key="mine") == first
    assert [folder.name for folder in plane.jobs_dir.iterdir()] == [first]
