"""A supervisor actor with real ranks and keepers on a local Ray, and a controller that only
stores: what the tests of recovery with real processes, and its benchmark, stand on."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import ray

from launch.keeper import Keeper
from launch.preflight import SPEC_FILE
from monitoring.records import StepRecord
from orchestrator.node_slot import NodeSlot
from orchestrator.protocol import (
    CONTROLLER_ACTOR,
    NAMESPACE,
    ResumeState,
    keeper_actor,
    supervisor_actor,
)
from orchestrator.spec.completion import complete
from orchestrator.spec.job import JobSpec, spec_yaml
from orchestrator.supervision.supervisor import Supervisor
from tests.unit.scripted_job import ScriptedController

JOB = "scripted-000001"


class StoringController(ScriptedController):
    """``ScriptedController`` whose attempts get the nodes that there are."""

    def __init__(self, spec: JobSpec, job_dir: Path, slots: int) -> None:
        super().__init__(spec, job_dir)
        job_dir.mkdir(parents=True, exist_ok=True)
        (job_dir / SPEC_FILE).write_text(spec_yaml(spec))
        self._slots = slots

    def resume(self) -> ResumeState:
        (node,) = [n for n in ray.nodes() if n["Alive"]]
        slot = NodeSlot(node["NodeID"], node["NodeManagerAddress"], 0, self._slots)
        drills = {d for step in self.steps for d in step["drills"]}
        return replace(super().resume(), nodes=(slot,), fired_drills=tuple(sorted(drills)))

    def told(self) -> dict[str, Any]:
        """Everything stored so far."""
        return {
            "steps": [StepRecord.from_json(step) for step in self.steps],
            "actions": self.actions,
            "events": self.events,
            "states": self.states,
            "attempt": self.attempt,
        }


def small_spec(tmp_path: Path, **sections: Any) -> JobSpec:
    """Two replicas of a two-layer model on a text that is made here."""
    text = tmp_path / "text.py"
    words = ["def", "return", "self", "None", "import", "for", "in", "x", "y", "(", ")", ":"]
    chosen = random.Random(0).choices(words, k=40_000)
    text.write_text(" ".join(chosen))
    values: dict[str, Any] = {
        "name": "scripted",
        "slots_per_node": 2,
        "model": {"hidden_size": 64, "num_layers": 2, "num_heads": 2},
        "data": {"source": str(text)},
        "training": {
            "steps": 60,
            "seq_len": 32,
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 4,
            "lr": 1e-3,
        },
        "fp8": {"amax_history_len": 8},
        "snapshots": {"every": 5, "keep": 6, "certify_after": 5},
        "checkpoint": {"every": 0},
        "wandb": {"mode": "disabled"},
    }
    return complete(JobSpec.model_validate(values | sections))


class SupervisedJob:
    """One job on the present Ray; leaving the block ends all that it started."""

    def __init__(self, spec: JobSpec, job_dir: Path) -> None:
        self.slots = spec.slots_per_node or 1
        self.keeper = (
            ray.remote(Keeper)
            .options(
                name=keeper_actor(JOB, 0),
                namespace=NAMESPACE,
                num_cpus=self.slots,
                max_concurrency=8,
            )
            .remote(spec.snapshots.keep)
        )
        self.controller: Any = (
            ray.remote(StoringController)
            .options(name=CONTROLLER_ACTOR, namespace=NAMESPACE, num_cpus=0, max_concurrency=8)
            .remote(spec, job_dir, self.slots)
        )
        self.supervisor: Any = None

    def __enter__(self) -> SupervisedJob:
        self.supervise(ray.get(self.controller.resume.remote()))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for actor in (self.supervisor, self.controller, self.keeper):
            ray.kill(actor)

    def supervise(self, resume: ResumeState) -> None:
        """A supervisor that starts from ``resume``, as the controller starts it."""
        self.supervisor = (
            ray.remote(Supervisor)
            .options(name=supervisor_actor(JOB), namespace=NAMESPACE, num_cpus=0, max_concurrency=8)
            .remote()
        )
        self.run = self.supervisor.run.remote(resume)

    def told(self) -> dict[str, Any]:
        return ray.get(self.controller.told.remote())

    def wait(self, timeout_s: float = 180.0) -> dict[str, Any]:
        """Until the supervisor has returned; what was told."""
        ray.get(self.run, timeout=timeout_s)
        return self.told()

    def wait_for_step(self, step: int, timeout_s: float = 120.0) -> None:
        """Until ``step`` was told, or the supervisor has returned."""
        self.wait_until(lambda told: any(r.step >= step for r in told["steps"]), timeout_s)

    def wait_until(self, seen: Callable[[dict[str, Any]], Any], timeout_s: float = 120.0) -> None:
        """Until what was told has in it what ``seen`` looks for, or the supervisor has returned."""
        end = time.monotonic() + timeout_s
        while not seen(self.told()):
            assert time.monotonic() < end, "what is waited for was not told"
            done, _ = ray.wait([self.run], timeout=0.2)
            if done:
                ray.get(self.run)
                return
