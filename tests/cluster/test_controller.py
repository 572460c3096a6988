"""The controller as a Ray actor, with a scripted supervisor: jobs survive its death."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.checkpoints import list_checkpoints, verify_checkpoint
from launch.digests import digest_of
from launch.snapshots import SnapshotKey
from orchestrator.api.client import Client
from orchestrator.api.client_errors import UnreachableError
from orchestrator.events import EventDraft
from orchestrator.home.folder import Home, HomeConfig
from orchestrator.lifecycle import Cause, JobState
from orchestrator.protocol import (
    CONTROLLER_ACTOR,
    NAMESPACE,
    ResumeState,
    SupervisorBatch,
    keeper_actor,
    supervisor_actor,
)
from tests.unit.test_rescue import state


class ScriptedSupervisor:
    """Takes the job to running, and ends it when ``stop`` or a file ``finish`` says so."""

    def __init__(self) -> None:
        self._going = False
        self._stopped = ""

    def run(self, resume: ResumeState) -> None:
        import ray

        self._going = True
        sequence = 0

        def tell(state: JobState, cause: Cause) -> None:
            nonlocal sequence
            sequence += 1
            event = EventDraft("scripted", time.time(), cause.value, {})
            batch = SupervisorBatch(sequence, events=(event,), transition=(state, cause))
            while True:
                try:
                    actor = ray.get_actor(CONTROLLER_ACTOR, namespace=NAMESPACE)
                    answer = ray.get(actor.report.remote(resume.job, resume.attempt, batch))
                    assert answer.accepted, answer.reason
                    return
                except (ValueError, ray.exceptions.RayActorError):
                    time.sleep(0.1)

        tell(JobState.RUNNING, Cause.FIRST_STEP)
        finish = Path(resume.job_dir) / "finish"
        while not finish.exists() and not self._stopped:
            time.sleep(0.05)
        if self._stopped:
            tell(JobState.CANCELLED, Cause.ENDED)
        else:
            tell(JobState.SUCCEEDED, Cause.STEPS_DONE)
        self._going = False

    def stop(self, reason: str) -> None:
        self._stopped = reason

    def ping(self) -> bool:
        return self._going


@pytest.fixture(scope="module")
def client(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    from orchestrator.cluster.controller_actor import start_controller

    folder = tmp_path_factory.mktemp("controller")
    home = Home(folder / "home")
    home.create(HomeConfig(jobs_dir=folder / "jobs"))
    start_controller(home, ScriptedSupervisor)
    yield Client.of_home(home)


def submit(client: Client, folder: Path, slots: int = 8) -> str:
    text = folder / "text.txt"
    text.write_text("x" * 4096)
    spec = {"name": "toy", "slots_per_node": slots, "data": {"source": str(text)}}
    return str(client.submit(spec, "toy.yaml")["id"])


def wait_for(
    client: Client, job: str, value: object, seconds: float = 60, *, key: str = "state"
) -> dict[str, object]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        shown = client.patiently(client.job, job)
        if shown[key] == value:
            return shown
        time.sleep(0.1)
    pytest.fail(f"{job} is {shown['state']} ({shown['reason']}), its {key} not {value}")


def finish(client: Client, job: str) -> None:
    (Path(client.job(job)["job_dir"]) / "finish").touch()
    wait_for(client, job, "succeeded")


def hold_in_memory(job: str, step: int, ranks: int) -> None:
    """The keeper of the job's node has a copy of every rank."""
    import ray

    keeper = ray.get_actor(keeper_actor(job, 0), namespace=NAMESPACE)
    for rank in range(ranks):
        payload = state(rank, step, (1, ranks, 1))
        key = SnapshotKey(job, 1, 0, rank, step)
        ray.get(keeper.put.remote(key, payload, digest_of(payload)), timeout=30)


def test_of_two_jobs_on_slots_for_one_the_second_waits_and_what_memory_holds_at_its_end_is_written(
    client: Client, tmp_path: Path
) -> None:
    first, second = submit(client, tmp_path), submit(client, tmp_path)
    wait_for(client, first, "running")
    waiting = wait_for(client, second, "queued")
    time.sleep(1)
    assert "needs 1 node with 8 CPU slots; free now: 0" in str(client.job(second)["reason"])
    assert waiting["state"] == client.job(second)["state"]
    finish(client, first)
    wait_for(client, second, "running")
    # Beyond what a gap without records may be, for this supervisor records no step.
    hold_in_memory(second, step=1000, ranks=8)
    client.cancel(second, "by test")
    wait_for(client, second, "cancelled")
    wait_for(client, second, True, key="settled")
    (kept,) = list_checkpoints(client.job(second)["job_dir"])
    assert (kept.step, sorted(kept.files)) == (1000, list(range(8)))
    assert not verify_checkpoint(kept)


def test_a_killed_controller_comes_back_at_its_address_with_its_jobs(
    client: Client, tmp_path: Path
) -> None:
    import ray

    running, waiting = submit(client, tmp_path), submit(client, tmp_path)
    wait_for(client, running, "running")
    actor = ray.get_actor(CONTROLLER_ACTOR, namespace=NAMESPACE)
    pid = ray.get(actor.pid.remote())
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if ray.get(actor.pid.remote()) != pid:
                break
        except ray.exceptions.RayActorError:
            time.sleep(0.2)
    # Same address, same token: the client needs to know nothing of it.
    assert client.patiently(client.job, running)["attempt"] == 1
    time.sleep(1.5)
    assert client.job(running)["state"] == "running"
    assert client.job(running)["attempt"] == 1
    finish(client, running)
    wait_for(client, waiting, "running")
    finish(client, waiting)


def test_a_killed_supervisor_is_replaced_with_the_next_attempt(
    client: Client, tmp_path: Path
) -> None:
    import ray

    job = submit(client, tmp_path)
    wait_for(client, job, "running")
    ray.kill(ray.get_actor(supervisor_actor(job), namespace=NAMESPACE))
    deadline = time.monotonic() + 60
    while client.job(job)["attempt"] != 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    wait_for(client, job, "running")
    assert [a["attempt"] for a in client.job(job)["attempts"]] == [1, 2]
    records = client.records(job)
    assert [i["kind"] for i in records["incidents"]] == ["supervisor_lost"]
    assert "ActorDiedError" in records["incidents"][0]["message"]
    assert [a["kind"] for a in records["actions"]] == ["restart"]
    finish(client, job)


def test_a_controller_that_is_gone_is_unreachable() -> None:
    with pytest.raises(UnreachableError):
        Client("http://127.0.0.1:9", "x").jobs()
