"""Controls over HTTP, the Python client and the CLI: stored once, carried on, answered."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from fastapi.testclient import TestClient

from orchestrator.actions import Action
from orchestrator.api.client import Client
from orchestrator.api.client_errors import RefusedError
from orchestrator.cli.control import batches_of
from orchestrator.cli.main import call
from orchestrator.cli.show import CommandError
from orchestrator.home.folder import Home
from orchestrator.lifecycle import Cause, JobState
from orchestrator.protocol import SupervisorBatch
from orchestrator.recovery.controls import ControlAnswer
from tests.unit.control_plane import ControlPlane
from tests.unit.test_api import is_problem
from tests.unit.test_store import step


def running(plane: ControlPlane, newest: int = 30) -> str:
    """A job that runs, with steps recorded."""
    job = plane.submit()
    plane.steps(2)
    transition = (JobState.RUNNING, Cause.FIRST_STEP)
    steps = tuple(step(n) for n in range(newest + 1))
    assert plane.controller.report(job, 1, SupervisorBatch(1, steps=steps, transition=transition))
    return job


def answer(plane: ControlPlane, job: str, sequence: int, *answers: ControlAnswer) -> None:
    batch = SupervisorBatch(sequence, answers=answers)
    assert plane.controller.report(job, plane.store.job(job).attempt, batch).accepted


def test_a_control_is_stored_carried_until_it_is_answered_and_told(
    api: TestClient, plane: ControlPlane
) -> None:
    job = running(plane)
    body = {"to_step": 20, "skip": [21, 20, 21], "key": "mine", "by": "al\x1bice\n", "reason": "r"}
    made = api.post(f"/v1/jobs/{job}/rollback", json=body)
    assert made.status_code == 202
    shown = made.json()
    assert (shown["state"], shown["by"], shown["skip_batches"]) == ("accepted", "al ice", [20, 21])
    plane.steps(2)
    assert [(j, [c.key for c in asked]) for j, asked in plane.supervisors.asked] == [
        (job, ["mine"]),
        (job, ["mine"]),
    ], "again, until there is an answer"
    # A controller that restarts, and the supervisor after the one that died, get to know it.
    plane.controller = plane.new_controller()
    plane.supervisors.asked.clear()
    plane.supervisors.done.add(job)
    plane.steps(2)
    assert plane.supervisors.asked == []
    plane.steps(1)
    assert plane.store.job(job).attempt == 2 and len(plane.supervisors.asked) == 1
    answer(plane, job, 1, ControlAnswer("mine", "applied", "Training goes on from step 20.", 20))
    plane.supervisors.asked.clear()
    plane.steps(2)
    assert plane.supervisors.asked == []
    found = api.get(f"/v1/jobs/{job}/controls/mine").json()
    assert (found["state"], found["step"]) == ("applied", 20)
    # Late words change nothing.
    answer(plane, job, 2, ControlAnswer("mine", "refused", "no", 3))
    assert api.get(f"/v1/jobs/{job}/controls").json()["controls"] == [found]
    again = api.post(f"/v1/jobs/{job}/rollback", json={**body, "by": "bob"})
    assert again.status_code == 200 and again.json() == found


def test_a_key_that_asked_for_something_else_is_refused(
    api: TestClient, plane: ControlPlane
) -> None:
    job = running(plane)
    assert api.post(f"/v1/jobs/{job}/pause", json={"key": "k"}).status_code == 202
    other = api.post(f"/v1/jobs/{job}/rollback", json={"key": "k", "to_step": 1})
    assert other.status_code == 409 and "used to ask for something else" in other.json()["error"]
    assert len(api.get(f"/v1/jobs/{job}/controls").json()["controls"]) == 1


def test_asking_at_once_with_one_key_stores_it_once(plane: ControlPlane, api: TestClient) -> None:
    job = running(plane)
    codes: list[int] = []

    def ask() -> None:
        body = {"to": "bf16", "key": "same"}
        codes.append(api.post(f"/v1/jobs/{job}/exchange", json=body).status_code)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [202] * 8
    assert len(plane.store.controls.of(job)) == 1


@pytest.mark.parametrize(
    ("path", "body", "status", "told"),
    [
        ("rollback", {}, 422, "to_step"),
        ("rollback", {"to_step": -1}, 422, "to_step"),
        ("rollback", {"to_step": 10**30}, 422, "to_step"),
        ("rollback", {"to_step": 1, "skip": [-4]}, 422, "skip"),
        ("rollback", {"to_step": 1, "skip": list(range(10_001))}, 422, "skip"),
        ("rollback", {"to_step": 1, "skp": [1]}, 422, "skp"),
        ("rollback", {"to_step": 99}, 409, "still to come: the newest one done is 30"),
        ("precision", {"layers": [], "to": "bf16"}, 422, "layers"),
        ("precision", {"layers": ["*"], "to": "fp4"}, 422, "to"),
        ("precision", {"layers": ["layers.0.mlp.up"], "to": "bf16"}, 409, "did you mean"),
        ("exchange", {"to": "int4"}, 422, "to"),
        ("pause", {"key": "a b"}, 422, "key"),
        ("pause", {"key": "x" * 65}, 422, "key"),
    ],
)
def test_what_can_not_be_is_refused_and_not_stored(
    api: TestClient, plane: ControlPlane, path: str, body: dict[str, Any], status: int, told: str
) -> None:
    job = running(plane)
    refused = api.post(f"/v1/jobs/{job}/{path}", json=body)
    assert refused.status_code == status and told in refused.json()["error"]
    assert is_problem(refused)
    assert plane.store.controls.of(job) == []


def test_unknown_jobs_and_keys_are_not_found(api: TestClient, plane: ControlPlane) -> None:
    assert api.post("/v1/jobs/none/pause").status_code == 404
    job = running(plane)
    missing = api.get(f"/v1/jobs/{job}/controls/none")
    assert missing.status_code == 404 and "under the key 'none'" in missing.json()["error"]


def test_what_is_under_way_when_the_job_comes_to_rest_is_answered_with_it(
    api: TestClient, plane: ControlPlane
) -> None:
    job = running(plane)
    api.post(f"/v1/jobs/{job}/pause", json={"key": "a", "by": "alice"})
    api.post(f"/v1/jobs/{job}/exchange", json={"key": "b", "to": "bf16"})
    transition = (JobState.PAUSED, Cause.PAUSE_ASKED)
    batch = SupervisorBatch(2, steps=(step(31),), transition=transition)
    plane.controller.report(job, 1, batch)
    found = {c["key"]: c for c in api.get(f"/v1/jobs/{job}/controls").json()["controls"]}
    assert (found["a"]["state"], found["a"]["step"]) == ("applied", 32)
    assert found["b"]["state"] == "refused" and "is paused" in found["b"]["message"]
    assert plane.told(job, "control_applied") and plane.told(job, "control_refused")
    again = api.post(f"/v1/jobs/{job}/pause", json={"key": "c"})
    assert again.status_code == 409
    assert again.json()["error"].startswith(f"{job} is paused already; `octavo resume {job}`")


def test_a_queued_job_is_paused_at_once_and_resumes(api: TestClient, plane: ControlPlane) -> None:
    job = plane.submit()
    paused = api.post(f"/v1/jobs/{job}/pause", json={"by": "alice"})
    assert paused.status_code == 200 and paused.json()["state"] == "applied"
    assert plane.state(job) == "paused"
    plane.steps(2)
    assert plane.state(job) == "paused" and plane.supervisors.started == []
    api.post(f"/v1/jobs/{job}/resume")
    plane.steps(2)
    assert plane.state(job) == "starting"


def test_a_job_that_waits_for_lost_nodes_is_paused_without_ranks(
    api: TestClient, plane: ControlPlane
) -> None:
    job = running(plane)
    plane.groups.held.clear()
    plane.groups.total = {"node0": 0}
    plane.supervisors.done.add(job)
    plane.steps(4)
    assert plane.state(job) == "recovering" and plane.supervisors.alive == {}
    asked = api.post(f"/v1/jobs/{job}/pause", json={"by": "alice", "key": "k"})
    assert asked.json()["state"] == "accepted"
    plane.steps(1)
    assert plane.state(job) == "paused"
    assert api.get(f"/v1/jobs/{job}/controls/k").json()["state"] == "applied"


def test_an_old_stored_action_still_reads(plane: ControlPlane) -> None:
    row = Action("rollback", 1, 0, 5, 0.0, "why", to_step=3).to_json()
    del row["asked"]
    assert Action.from_json(row).asked is None


def test_the_client_waits_for_the_answer(home: Home, plane: ControlPlane) -> None:
    job = running(plane)
    client = Client.of_home(home)
    asked = client.precision(job, ["layers.0.*"], "bf16", by="alice", reason="looks odd")
    assert (asked["state"], asked["layers"]) == ("accepted", ["layers.0.*"])
    found = ControlAnswer(asked["key"], "applied", "In force from step 32 on.", 32)
    later = threading.Timer(0.2, answer, (plane, job, 2, found))
    later.start()
    assert client.answer(job, asked["key"])["step"] == 32
    later.join()
    assert client.controls(job)[0]["reason"] == "looks odd"
    with pytest.raises(RefusedError, match="still to come"):
        client.rollback(job, 1000)


def test_the_commands_wait_say_the_step_and_fail_with_why_not(
    home: Home, plane: ControlPlane, capsys: pytest.CaptureFixture[str]
) -> None:
    job = running(plane)
    words = ["rollback", job, "--to-step", "20", "--skip", "21,23-24", "--key", "mine"]
    assert call([*words, "--no-wait"]) == 0
    assert f"{job} rollback accepted, key mine" in capsys.readouterr().out
    (stored,) = plane.store.controls.of(job)
    assert stored.control.skip_batches == (21, 23, 24)
    answer(plane, job, 2, ControlAnswer("mine", "applied", "Training goes on from step 20.", 20))
    assert call(words) == 0, "the same one"
    assert "rollback applied: Training goes on from step 20." in capsys.readouterr().out
    assert call([*words, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 20

    def refuse() -> None:
        seen = plane.controller.changes.count()
        while not plane.store.controls.knows(job, "x"):
            seen = plane.controller.changes.wait(seen, 0.05)
        answer(plane, job, 3, ControlAnswer("x", "refused", "there is no such step", 30))

    later = threading.Thread(target=refuse)
    later.start()
    refused = ["exchange", job, "--to", "auto", "--key", "x", "-o", "json"]
    assert call(refused) == 1
    later.join()
    told = capsys.readouterr()
    assert told.out == ""
    assert json.loads(told.err)["error"] == f"{job}: there is no such step"

    assert call(["precision", job, "--layer", "layers.9.*", "--to", "bf16"]) == 1
    assert "matches none of the" in capsys.readouterr().err
    assert call(["precision", job, "--layer", "*", "--to", "fp4"]) == 2
    assert call(["pause", "nobody"]) == 102
    assert call(["rollback", job, "--to-step", "1", "--skip", "7-3"]) == 2
    assert call(["pause", job, "--no-wait", "-o", "json"]) == 0
    assert plane.store.controls.of(job)[-1].control.by


def test_batches_are_read_in_numbers_and_spans() -> None:
    assert batches_of(["3,7-9", "12"]) == [3, 7, 8, 9, 12]
    for wrong in ("", "a", "3-", "-3", "9-7", "0-99999", "1,,2", "٣-"):
        with pytest.raises(CommandError) as told:
            batches_of([wrong])
        assert told.value.code == 2


def test_what_a_paused_job_is_asked_is_kept_and_told_to_whoever_resumes_it(
    home: Home, api: TestClient, plane: ControlPlane, capsys: pytest.CaptureFixture[str]
) -> None:
    job = running(plane)
    gave_up = Action("pause", 1, 0, 30, 0.0, "Paused for a person.", in_place=False)
    over = (JobState.PAUSED, Cause.BUDGET_SPENT)
    plane.controller.report(job, 1, SupervisorBatch(2, actions=(gave_up,), transition=over))
    call(["rollback", job, "--to-step", "20", "--skip", "25", "--key", "k"])
    told = capsys.readouterr().out
    assert "accepted, key k: done first once the job is resumed" in told
    assert f"`octavo resume {job}`" in told
    plane.supervisors.done.add(job)
    plane.steps(2)
    api.post(f"/v1/jobs/{job}/resume")
    (event,) = plane.told(job, "ladder_renewed")
    assert "begins anew" in event and "the pause at step 30" in event
    plane.supervisors.done.clear()
    plane.steps(4)
    assert [(j, [c.key for c in asked]) for j, asked in plane.supervisors.asked[-1:]] == [
        (job, ["k"])
    ]
