"""What is done to a job in mid-run, and what must hold besides: the verbs of the matrix.

An act does the fault to a ``Scene`` and may take its time; what it broke is mended by the runner
afterwards, but for what an operator does, which is part of it. A check gives what is wrong, a
sentence each. What never comes is a ``HangError``.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launch.keeper_clients import GONE_REST_S
from tests.hosts.faults.memory import flip_copies
from tests.hosts.faults.scene import HangError, Scene

QUEUED = 100
HEAD_AWAY_S = 5.0
"""Seconds until somebody starts a head that is lost."""

Act = Callable[[Scene], None]
Check = Callable[[Scene], Sequence[str]]


def leave_be(scene: Scene) -> None:
    """The fault is in the job."""


def nothing(scene: Scene) -> Sequence[str]:
    """No further condition."""
    return ()


def signalled(rank: int, number: signal.Signals) -> Act:
    def act(scene: Scene) -> None:
        os.kill(scene.rank(rank).pid, number)

    return act


def out_of_memory(scene: Scene) -> None:
    """No further byte for rank 1: the next allocation fails."""
    pid = scene.rank(1).pid
    resource.prlimit(pid, resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))


def kill_node(scene: Scene) -> None:
    scene.node_without_head().kill()


def freeze_node(scene: Scene) -> None:
    scene.node_without_head().freeze()


def cut(seconds: float | None) -> Act:
    def act(scene: Scene) -> None:
        node = scene.node_without_head()
        node.cut()
        if seconds is not None:
            _sleep(scene, seconds)
            node.heal()

    return act


def shaped(seconds: float, **how: Any) -> Act:
    def act(scene: Scene) -> None:
        for node in scene.cluster.nodes:
            node.shape(**how)
        _sleep(scene, seconds)
        for node in scene.cluster.nodes:
            node.shape()

    return act


def fill_disk(scene: Scene) -> None:
    """No byte free while two checkpoints are due; the job trains on and says so."""
    failed = len(scene.events)
    scene.cluster.fill_disk()
    try:
        scene.wait_for_step(scene.newest + 22)
        told = {e["kind"] for e in scene.events[failed:]}
        if not told & {"copy_failed", "checkpoint_failed"}:
            raise HangError("nothing was said of a checkpoint that the disk has no room for")
    finally:
        scene.cluster.free_disk()


def damaged(damage: Callable[[Path], None]) -> Act:
    """Damage the newest checkpoint, and leave nothing else to start from but older ones."""

    def act(scene: Scene) -> None:
        victim = scene.rank(1).pid
        damage(scene.newest_checkpoint())
        for node in scene.cluster.nodes:
            for keeper in node.processes("ray::Keeper"):
                os.kill(keeper, signal.SIGKILL)
        os.kill(victim, signal.SIGKILL)

    return act


def truncate(checkpoint: Path) -> None:
    file = max(checkpoint.glob("*.safetensors"), key=lambda f: f.name)
    os.truncate(file, file.stat().st_size // 2)


def flip_byte(checkpoint: Path) -> None:
    file = max(checkpoint.glob("*.safetensors"), key=lambda f: f.name)
    with file.open("r+b") as stream:
        stream.seek(-5000, os.SEEK_END)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 4]))


def take_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


def flip_replica(scene: Scene) -> None:
    """One bit in every copy that the other nodes' keepers hold, then the node is lost."""
    lost = scene.node_without_head()
    ranks = [rank.pid for rank in scene.ranks()]
    # No newer copy may come while the bits are looked for, nor while the loss goes unnoticed.
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    flipped = 0
    for node in scene.cluster.nodes:
        if node is not lost:
            flipped += sum(flip_copies(pid) for pid in node.processes("ray::Keeper"))
    lost.kill()
    for pid in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    if not flipped:
        raise HangError("no copy was found in any keeper")


def fill_queue(scene: Scene) -> None:
    """Another job that runs beside this one, and 100 that need all nodes and wait."""
    scene.others.append(Scene(scene.cluster, scene.spec | {"name": "second"}))
    slots, hosts = scene.cluster.layout.slots[0], len(scene.cluster.nodes)
    data = slots * hosts // 2
    waiting = scene.spec | {
        "name": "waiting",
        "num_nodes": hosts,
        "slots_per_node": slots,
        "parallelism": scene.spec["parallelism"] | {"data": data},
        "training": scene.spec["training"] | {"train_batch_size": 4 * data},
    }
    for _ in range(QUEUED):
        scene.accepted.append(str(scene.client.submit(waiting, "waiting.yaml")["id"]))


def kill_controller(scene: Scene) -> None:
    """With two jobs running and 100 in the queue, all of which are there afterwards."""
    (second,) = scene.others
    second.wait_for_step(5)
    (pid,) = scene.cluster.nodes[0].processes("ray::ControllerActor")
    os.kill(pid, signal.SIGKILL)
    scene.wait_for_step(scene.newest + 20)
    known = {job["id"]: job for job in scene.client.patiently(_jobs, scene.client)["jobs"]}
    if lost := {scene.job, second.job, *scene.accepted} - known.keys():
        raise HangError(f"{len(lost)} accepted jobs are gone")
    if restarted := [j for j in (scene.job, second.job) if known[j]["attempt"] != 1]:
        raise HangError(f"training was touched: {restarted}")
    for job in scene.accepted:
        scene.client.patiently(scene.client.cancel, job, "the row is over")
    second.wait_for_end(240)
    if second.state != "succeeded":
        raise HangError(f"the other job {second.state}")


def _jobs(client: Any) -> dict[str, Any]:
    return {"jobs": client.jobs()}


def kill_all(scene: Scene) -> None:
    """Every node with the head; then an operator starts them and the controller again."""
    scene.cluster.kill_all()
    scene.cluster.start_all()


def kill_supervisor(scene: Scene) -> None:
    os.kill(_supervisor(scene), signal.SIGKILL)


def two_at_once(scene: Scene) -> None:
    """A rank and the supervisor that would have answered."""
    rank, supervisor = scene.rank(3).pid, _supervisor(scene)
    os.kill(supervisor, signal.SIGKILL)
    os.kill(rank, signal.SIGKILL)


def rank_and_node(scene: Scene) -> None:
    """A rank of the node that stays, and the other node."""
    lost = scene.node_without_head()
    other = next(rank.pid for rank in scene.ranks() if rank.node is not lost)
    os.kill(other, signal.SIGKILL)
    lost.kill()


def kill_in_recovery(scene: Scene) -> None:
    """A rank, and one of the next attempt as soon as it has begun."""
    before = scene.ranks()[0].attempt
    os.kill(scene.rank(1).pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while True:
        ranks = [rank for rank in scene.ranks() if rank.attempt > before]
        if ranks:
            os.kill(ranks[-1].pid, signal.SIGKILL)
            return
        if time.monotonic() > deadline:
            raise HangError("the next attempt never began")
        time.sleep(0.01)


def kill_in_checkpoint(scene: Scene) -> None:
    """A rank, while the files of a checkpoint are written."""
    victim = scene.rank(2).pid
    deadline = time.monotonic() + 60
    while not any((scene.folder / "checkpoints").glob(".attempt-*/step-*")):
        if time.monotonic() > deadline:
            raise HangError("no checkpoint was begun")
        time.sleep(0.0005)
    os.kill(victim, signal.SIGKILL)


def lock_store(scene: Scene) -> None:
    """Somebody else writes to the store for 10 s."""
    store = scene.cluster.home.path / "store.db"
    connection = sqlite3.connect(store, timeout=30, isolation_level=None)
    with contextlib.closing(connection):
        connection.execute("BEGIN IMMEDIATE")
        time.sleep(10)
        connection.execute("ROLLBACK")


def one_attempt(scene: Scene) -> Sequence[str]:
    """Nothing restarted."""
    attempts = max(step.attempt for step in scene.steps)
    return [f"{attempts} attempts for a fault that training need not feel"] if attempts > 1 else []


def back_to_before(scene: Scene) -> Sequence[str]:
    """A damaged checkpoint was passed over and told."""
    starts = [e["detail"] for e in scene.events if e["kind"] == "attempt_started"]
    told = json.dumps([e for e in scene.events if "left out" in e["message"]])
    problems = [] if len(starts) > 1 else ["no second attempt"]
    return problems + ([] if "left out" in told else ["nothing says that a copy is left out"])


def _supervisor(scene: Scene) -> int:
    for node in scene.cluster.nodes:
        for pid in node.processes("ray::Supervisor"):
            return pid
    raise HangError("no supervisor was found")


def _sleep(scene: Scene, seconds: float) -> None:
    """For that long, or until the job is at rest."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not scene.settled:
        time.sleep(0.05)


def kill_gcs(scene: Scene) -> None:
    """Ray's own control plane; whoever started it starts it again."""
    head = scene.cluster.nodes[0]
    (gcs,) = (pid for pid, title in head.titles().items() if title.endswith("/gcs_server"))
    os.kill(gcs, signal.SIGKILL)
    scene.wait_for_step(scene.newest + 20)
    again = [pid for pid, title in head.titles().items() if title.endswith("/gcs_server")]
    if not again or gcs in again:
        raise HangError("nobody started the GCS again")


def kill_head(scene: Scene) -> None:
    """Ray's head with all its processes; then an operator starts it on the same tables."""
    cluster = scene.cluster
    cluster.nodes[0].kill()
    _sleep(scene, HEAD_AWAY_S)
    cluster.restart_head()


def budget_spent(scene: Scene) -> None:
    """A rank dies and no restart is left; then a person lets the job go on."""
    os.kill(scene.rank(1).pid, signal.SIGKILL)
    scene.resume()


def cancel_in_recovery(scene: Scene) -> None:
    """A person cancels the job while it recovers from a dead rank, and lets it go on later."""
    before = len(scene.events)
    os.kill(scene.rank(1).pid, signal.SIGKILL)
    scene.wait_for_event("incident", 30, after=before)
    scene.client.patiently(scene.client.cancel, scene.job, "the row wants it")
    scene.resume()


def pause_when_short(scene: Scene) -> None:
    """A person pauses the job that waits for a node in place of a dead one, which then is back."""
    lost = scene.node_without_head()
    before = len(scene.events)
    lost.kill()
    scene.wait_for_event("waiting", 60, after=before)
    scene.client.patiently(scene.client.pause, scene.job)
    scene.wait_for_end(90)
    lost.restart()
    scene.resume()


def keepers_then_rank(scene: Scene) -> None:
    """All that holds copies dies alone; some snapshots later so does a rank."""
    before = len(scene.events)
    keepers = [(n, pid) for n in scene.cluster.nodes for pid in n.processes("ray::Keeper")]
    for _, pid in keepers:
        os.kill(pid, signal.SIGKILL)
    for number in range(len(keepers)):
        scene.wait_for_event("keeper_started", 60, after=before + number)
    # Until the ranks have found them; then two snapshots, and one under way.
    time.sleep(GONE_REST_S)
    scene.wait_for_step(scene.newest + 15)
    os.kill(scene.rank(1).pid, signal.SIGKILL)


def within_an_interval(scene: Scene) -> Sequence[str]:
    """No more was done again than since the newest snapshot that had been sent."""
    redone = len(scene.steps) - len({step.step for step in scene.steps})
    most = 2 * int(scene.spec["snapshots"]["every"])
    return [f"{redone} steps were done again, {most} at most"] if redone > most else []


def fewer_replicas(scene: Scene) -> Sequence[str]:
    """It went on with half its ranks."""
    told = [event["message"] for event in scene.events if event["kind"] == "attempt_started"]
    return [] if any("2 ranks" in message for message in told) else ["no attempt had 2 ranks"]
