"""What people ask of a job, from the client through controller and supervisor to real ranks."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from monitoring.job_view import split_timelines
from monitoring.records import StepRecord
from orchestrator.api.client import Client
from orchestrator.api.client_errors import RefusedError
from orchestrator.cli.following import whole_view
from orchestrator.home.folder import Home, HomeConfig
from orchestrator.protocol import CONTROLLER_ACTOR, NAMESPACE, supervisor_actor
from orchestrator.replay.job_trace import trace_of_client
from orchestrator.replay.replay import replay

LAYER = "layers.1.mlp.down"
SKIPPED = 180
END = 100


@pytest.fixture(scope="module")
def client(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    from orchestrator.cluster.controller_actor import start_controller

    folder = tmp_path_factory.mktemp("controller")
    home = Home(folder / "home")
    home.create(HomeConfig(jobs_dir=folder / "jobs"))
    start_controller(home)
    yield Client.of_home(home)


def job_spec(folder: Path) -> dict[str, Any]:
    text = folder / "text.py"
    words = ["def", "return", "self", "None", "import", "for", "in", "x", "y", "(", ")", ":"]
    text.write_text(" ".join(random.Random(0).choices(words, k=40_000)))
    return {
        "name": "asked",
        "slots_per_node": 2,
        "model": {"hidden_size": 64, "num_layers": 2, "num_heads": 2},
        "data": {"source": str(text)},
        "training": {"steps": SKIPPED + END, "seq_len": 32, "train_batch_size": 8, "lr": 1e-3},
        "fp8": {"amax_history_len": 8},
        "snapshots": {"every": 10, "keep": 20, "certify_after": 5},
        "checkpoint": {"every": 0},
        # Layers that fell back by themselves would be back in FP8 long before the end.
        "recovery": {"calm_steps": 12},
        "resources": {"standby": False},
        "wandb": {"mode": "disabled"},
    }


def wait_for(client: Client, job: str, what: Any, seconds: float = 120.0) -> dict[str, Any]:
    deadline = time.monotonic() + seconds
    while not what(shown := client.job(job)):
        assert time.monotonic() < deadline, (shown["state"], shown["reason"], shown["step"])
        time.sleep(0.05)
    return shown


def numbers(records: list[StepRecord]) -> dict[int, tuple[str, str, int]]:
    """By step, to the last bit."""
    return {r.step: (r.loss.hex(), r.grad_norm.hex(), r.batch) for r in records}


def test_one_run_through_every_control_trains_on_what_it_must_to_the_bit(
    client: Client, tmp_path: Path
) -> None:
    job = str(client.submit(job_spec(tmp_path), "asked.yaml")["id"])

    def done(asked: dict[str, Any]) -> int:
        found = client.answer(job, asked["key"])
        assert found["state"] == "applied", found["message"]
        return int(found["step"])

    # Asked while ranks start: it waits for the first step.
    wait_for(client, job, lambda shown: shown["state"] != "queued")
    with pytest.raises(RefusedError, match=r"did you mean 'layers\.1\.mlp\.down'"):
        client.precision(job, ["layers.1.mpl.down"], "bf16")
    in_bf16 = done(client.precision(job, [LAYER], "bf16", by="alice", reason="a suspicion"))
    exchanged = done(client.exchange(job, "bf16", by="alice"))
    first = -(-max(in_bf16, exchanged) // 10) * 10
    wait_for(client, job, lambda shown: shown["step"] > first + 110)
    missing = client.answer(job, client.rollback(job, first + 1)["key"])
    assert missing["state"] == "refused" and f"{first}, {first + 10}" in missing["message"]
    assert done(client.rollback(job, first, [SKIPPED], by="bob", reason="a bad page")) == first
    paused_at = done(client.pause(job, by="carol", key="only-once"))
    wait_for(client, job, lambda shown: shown["settled"])
    assert client.job(job)["state"] == "paused" and client.job(job)["nodes"] == []
    assert client.pause(job, key="only-once")["state"] == "applied", "the same one"
    asked = client.rollback(job, 1, key="when-resumed")
    assert asked["state"] == "accepted" and "once the job is resumed" in asked["message"]
    client.resume(job, "by test")
    # Accepted is enough, whoever dies: the next controller tells the next supervisor.
    wait_for(client, job, lambda shown: shown["state"] == "running" and shown["step"] > SKIPPED)
    returned = client.exchange(job, "fp8", by="dave")["key"]
    controller = ray.get_actor(CONTROLLER_ACTOR, namespace=NAMESPACE)
    os.kill(ray.get(controller.pid.remote()), signal.SIGKILL)
    ray.kill(ray.get_actor(supervisor_actor(job), namespace=NAMESPACE))
    returned_at = client.answer(job, returned)["step"]
    measured_at = done(client.exchange(job, "auto", by="dave"))
    wait_for(client, job, lambda shown: shown["settled"])
    assert client.job(job)["state"] == "succeeded"

    view = whole_view(client, job)
    kept, undone = split_timelines(list(view.steps))
    assert [r.step for r in kept] == list(range(SKIPPED + END))
    # The way back and the pause after it: the same losses, from the first pass's other side.
    before = numbers([record for record in undone if record.attempt == 1])
    again = numbers(kept)
    assert min(before) == first and first < paused_at < max(before), (first, paused_at, before)
    assert {step: again[step] for step in before} == before
    assert {r.attempt for r in kept} == {1, 2, 3}
    assert next(r.step for r in kept if r.attempt == 2) == paused_at
    batches = [r.batch for r in kept]
    assert batches == [b for b in range(SKIPPED + END + 1) if b != SKIPPED]
    # The supervisor may have died before it decided, or after its ranks began to.
    returning = next(a for a in view.actions if a["kind"] == "exchange_fp8")
    decided = (returning["attempt"], returning["step"])
    for record in [*kept, *undone]:
        assert (LAYER in record.high_precision_layers) == (record.step >= in_bf16)
        bits = record.comm["wire_bits"]
        if record.attempt == 3 and record.step >= measured_at:
            assert bits == (8 if view.actions[-1]["exchange"] == "fp8" else 16)
        elif record.step < exchanged or (record.attempt == 3 and record.step >= returned_at):
            assert bits == 8
        elif (record.attempt, record.step) <= decided:
            assert bits == 16
        elif record.attempt == 3:
            assert bits == (8 if decided[0] == 2 else 16), "an attempt begins with what is decided"
    second = [r.comm["wire_bits"] for r in kept if r.attempt == 2]
    assert second == sorted(second, reverse=True), "from one step on, and for all ranks"

    asked = [a for a in view.actions if a["asked"] is not None]
    assert [(a["kind"], a["asked"]["by"]) for a in asked] == [
        ("precision", "alice"),
        ("exchange_bf16", "alice"),
        ("rollback", "bob"),
        ("pause", "carol"),
        ("exchange_fp8", "dave"),
        ("exchange_auto", "dave"),
    ]
    others = [a["kind"] for a in view.actions if a["asked"] is None]
    assert others == ["restart", "exchange_chosen"], "the lost supervisor's, what was measured"
    told = [e["detail"]["kind"] for e in view.events if e["kind"] == "control_applied"]
    assert told == ["precision", "exchange", "rollback", "pause", "exchange", "exchange"]
    refused, resumed = [e["message"] for e in view.events if e["kind"] == "control_refused"]
    assert "no snapshot or checkpoint of step 1;" in resumed, "asked while it was paused"
    assert f"no snapshot or checkpoint of step {first + 1}" in refused
    assert "as bob asked" in Path(view.extra["job_dir"], "report.html").read_text()
    replayed = replay(trace_of_client(client, job))
    assert replayed.exact, [judged for judged in replayed.judged if judged.differences]
