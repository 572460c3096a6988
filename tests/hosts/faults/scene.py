"""A job on a cluster under observation: where its ranks are, what it did and when.

Promises: the observer asks the controller as a user does and survives its restarts; every wait
has a bound, and ``Hang`` says what was waited for; times are the steps' own, as the ranks
measured them, seconds since the epoch on one clock, for the hosts share a machine.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.api.client_errors import ClientError
from tests.hosts.cluster import Cluster, Node

STEPS = 90
"""Of the job of a row."""
START_S = 300.0
"""Seconds until the job trains."""
LEFT_FOR_THE_FAULT = 40
"""Steps before a job's last at which its row no longer waits for the idle workers it starts."""

_RANK_LOG = re.compile(r"/logs/attempt-(\d+)/rank-(\d+)\.log$")


class HangError(Exception):
    """Something that must come within a time did not."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step as recorded."""

    attempt: int
    step: int
    time: float
    loss: float


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank that trains."""

    rank: int
    attempt: int
    pid: int
    node: Node


def spec_of(cluster: Cluster, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The job of the matrix, PP2×DP2 on two hosts, with a row's changes by section."""
    text = cluster.storage / "text.txt"
    if not text.exists():
        text.write_text("The quick brown fox jumps over the lazy dog; then 0123456789. " * 2000)
    spec: dict[str, Any] = {
        "name": "matrix",
        "num_nodes": 2,
        "slots_per_node": 2,
        "parallelism": {"pipeline": 2, "data": 2, "zero_stage": 1},
        "model": {"hidden_size": 64, "num_layers": 4, "num_heads": 2},
        "data": {"source": str(text)},
        "training": {
            "steps": STEPS,
            "seq_len": 64,
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 2,
            "lr": 1e-3,
        },
        "precision": "fp8",
        "communication_data_type": "fp8",
        "snapshots": {"every": 5, "certify_after": 5},
        "checkpoint": {"every": 10, "num_to_keep": 3},
        "resources": {"spares": 1},
        "wandb": {"mode": "disabled"},
    }
    for section, values in changes.items():
        old = spec.get(section)
        spec[section] = {**old, **values} if isinstance(old, dict) else values
    return spec


class Scene:
    """One job, watched by a thread from its submission to its end."""

    def __init__(self, cluster: Cluster, changes: Mapping[str, Any]) -> None:
        self.cluster = cluster
        self.client = cluster.client
        self.spec = spec_of(cluster, changes)
        self.job = str(self.client.submit(self.spec, "matrix.yaml")["id"])
        self.folder = cluster.storage / self.job
        self.steps: list[Step] = []
        self.events: list[dict[str, Any]] = []
        self.others: list[Scene] = []
        """Jobs of the row beside this one, ended with it."""
        self.accepted: list[str] = []
        """Ids of jobs that it put into the queue."""
        self.state = "queued"
        self.settled = False
        self._after_step = self._after_event = 0
        """Of what is recorded, what was read."""
        self._look_on()

    @property
    def newest(self) -> int:
        """Number of the newest step recorded, -1 before the first."""
        return max((s.step for s in self.steps), default=-1)

    @property
    def attempt(self) -> int:
        """Of the newest step."""
        return self.steps[-1].attempt if self.steps else 0

    def wait_for_step(self, step: int, seconds: float = START_S) -> None:
        """Until that step is recorded. Raises HangError, also when the job ends before."""
        self._until(lambda: self.newest >= step, seconds, f"step {step}")

    def wait_for_event(self, kind: str, seconds: float, *, after: int = 0) -> None:
        """Until there is an event of that kind beyond the first ``after``."""
        self._until(
            lambda: any(e["kind"] == kind for e in self.events[after:]), seconds, f"event {kind}"
        )

    def wait_until_quiet(self) -> bool:
        """Until no worker on any node does its imports: what it starts for restarts is ready;
        not into the last steps of the job. Whether it is so."""
        still, latest = 0, self.spec["training"]["steps"] - LEFT_FOR_THE_FAULT
        while still < 3:  # a worker that is being created has no title for a moment
            titles = [title for node in self.cluster.nodes for title in node.titles().values()]
            importing = any("__init__" in title for title in titles)
            still = 0 if importing else still + 1
            if self.newest >= latest or self.settled:
                return False
            time.sleep(0.2)
        return True

    def wait_for_end(self, seconds: float) -> None:
        """Until the job is at rest."""
        if not self._ended.wait(seconds):
            raise HangError(f"the job is {self.state} at step {self.newest} after {seconds:.0f} s")

    def resume(self, seconds: float = 90.0) -> None:
        """Wait until the job is at rest, its nodes given back; then let it go on."""
        self.wait_for_end(seconds)
        self._thread.join(30)
        self.settled = False
        self.client.patiently(self.client.resume, self.job, "the row goes on")
        self._look_on()

    def ranks(self) -> list[Rank]:
        """Ranks of the newest attempt, by their number."""
        found = []
        for node in self.cluster.nodes:
            for pid in node.host.pids():
                # A rank's output goes to its log.
                with contextlib.suppress(OSError):
                    target = str(Path(f"/proc/{pid}/fd/1").readlink())
                    match = _RANK_LOG.search(target)
                    if match and self.job in target:
                        found.append(Rank(int(match[2]), int(match[1]), pid, node))
        newest = max((rank.attempt for rank in found), default=0)
        chosen = {rank.rank: rank for rank in found if rank.attempt == newest}
        return [chosen[rank] for rank in sorted(chosen)]

    def rank(self, number: int) -> Rank:
        """One that trains. Raises HangError where there is none."""
        for rank in self.ranks():
            if rank.rank == number:
                return rank
        raise HangError(f"no process of rank {number} was found")

    def node_without_head(self) -> Node:
        """A node that has ranks, and not the controller."""
        for rank in reversed(self.ranks()):
            if rank.node.index:
                return rank.node
        raise HangError("no node but the head has ranks")

    def newest_checkpoint(self) -> Path:
        """Folder of the newest one that is committed."""
        return max((self.folder / "checkpoints").glob("step-*"))

    def close(self) -> None:
        """Cancel the job and the row's others if they go on, and stop watching."""
        for job in self.accepted:
            with contextlib.suppress(ClientError):
                self.client.cancel(job, "the row is over")
        for other in self.others:
            other.close()
        if not self.settled:
            with contextlib.suppress(ClientError):
                self.client.cancel(self.job, "the row is over")
            self._ended.wait(90)
        self.settled = True
        self._thread.join(30)

    def _until(self, reached: Any, seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not reached():
            if self._ended.is_set() and not reached():
                raise HangError(f"{what} never came: the job is {self.state}")
            if time.monotonic() > deadline:
                raise HangError(
                    f"{what} did not come in {seconds:.0f} s: {self.state}, step {self.newest}"
                )
            time.sleep(0.02)

    def give_space_back(self) -> None:
        """Delete the checkpoints of what is over: the disk is small, and full is a fault."""
        for scene in (self, *self.others):
            shutil.rmtree(scene.folder / "checkpoints", ignore_errors=True)

    def _look_on(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="observer", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while True:
            try:
                page = self.client.events(self.job, self._after_event)
                self.events += page["events"]
                self._after_event = page["next"]
                rows = self.client.steps(self.job, self._after_step, tensors=False)
                self.steps += [
                    Step(r["attempt"], r["step"], r["time"], r["loss"]) for r in rows["steps"]
                ]
                self._after_step = rows["next"]
                self.state = rows["state"]
                if page["settled"] and not page["events"] and not rows["steps"]:
                    self.settled = True
                    self._ended.set()
                    return
            except ClientError:
                pass
            if self.settled:
                return
            time.sleep(0.05)
