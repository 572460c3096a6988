"""Nodes of a real Ray with several raylets: seats, replacement, and a job that makes room."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from launch.digests import digest_of
from launch.keeper_clients import KeeperStore, Parcels
from launch.preflight import SPEC_FILE, Demand, Limits, Verdict
from launch.preflight_run import PreflightRun
from launch.rank_group import Seat
from launch.snapshots import SnapshotKey, StoreGoneError
from orchestrator.api.client import Client
from orchestrator.cluster.environment import CLUSTER_ENVIRONMENT
from orchestrator.home.folder import Home, HomeConfig
from orchestrator.lifecycle import Cause
from orchestrator.nodes.desk import NodeDesk
from orchestrator.nodes.groups import RayNodeGroups
from orchestrator.nodes.roll import NodeRoll
from orchestrator.protocol import CONTROLLER_ACTOR, NAMESPACE, keeper_actor
from orchestrator.spec.errors import Source
from orchestrator.spec.job import spec_of
from orchestrator.store.database import Store

STEPS = 60


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without slots, to which tests add nodes."""
    before = dict(os.environ)
    os.environ.update({k: v for k, v in CLUSTER_ENVIRONMENT.items() if k != "RAY_AUTH_MODE"})
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    ray.init(
        address=made.address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False
    )
    yield made
    ray.shutdown()
    made.shutdown()
    os.environ.clear()
    os.environ.update(before)


def until(true: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    end = time.monotonic() + timeout_s
    while not (found := true()):
        assert time.monotonic() < end, f"no {what} within {timeout_s:g} s"
        time.sleep(0.05)
    return found


def job(folder: Path, name: str, steps: int = STEPS, **sections: Any) -> dict[str, Any]:
    """One rank of a small model; every job of it sees the same data and has the same weights."""
    text = folder / "text.py"
    if not text.exists():
        words = ["def", "return", "self", "None", "import", "for", "in", "x", "y", "(", ")", ":"]
        text.write_text(" ".join(random.Random(0).choices(words, k=20_000)))
    values: dict[str, Any] = {
        "name": name,
        "slots_per_node": 1,
        "model": {"hidden_size": 64, "num_layers": 2, "num_heads": 2},
        "data": {"source": str(text)},
        "training": {"steps": steps, "seq_len": 32, "train_batch_size": 4},
        "fp8": {"amax_history_len": 8},
        "snapshots": {"every": 5, "keep": 4, "certify_after": 5},
        "checkpoint": {"every": 0},
        "wandb": {"mode": "disabled"},
        "resources": {"standby": False},
    }
    return values | sections


def test_seats_are_pinned_replaced_and_given_back_one_by_one(
    cluster: Cluster, tmp_path: Path
) -> None:
    nodes = [cluster.add_node(num_cpus=1) for _ in range(3)]
    groups, store = RayNodeGroups(), Store(f"sqlite:///{tmp_path}/store.db")
    desk = NodeDesk(store, groups, fixed=False)
    until(lambda: len(groups.capacities()) == 4, "four nodes")
    resources = {"standby": False, "spares": 1}
    spec = spec_of(Source("job", job(tmp_path, "seated", num_nodes=2, resources=resources), {}))
    store.add_job("seated-1", spec, str(tmp_path), "job", 1.0)

    def seats() -> list[tuple[str, int, bool]]:
        return [(s.node_id, s.bundle, s.spare) for s in store.job("seated-1").nodes]

    def free() -> list[str]:
        return sorted(n.node_id for n in groups.capacities() if n.free.get("CPU"))

    def keepers() -> set[str]:
        named = ray.util.list_named_actors(all_namespaces=True)
        return {entry["name"] for entry in named if "keeper" in entry["name"]}

    assert desk.admit(store.job("seated-1"), 1.0) == ""
    first, second, spare = (s[0] for s in seats())
    assert {first, second, spare} == {n.node_id for n in nodes}
    assert [s[1:] for s in seats()] == [(0, False), (1, False), (2, True)]
    until(lambda: free() == [], "placement in Ray's books")
    assert desk.mend(store.job("seated-1"), 2.0) == "", "nothing is wrong"
    before = seats()

    # A keeper that dies while the job trains is started again, and ranks find the new one.
    name = keeper_actor("seated-1", 1)
    copies = KeeperStore(ray.get_actor(name, namespace=NAMESPACE), Parcels(), name=name)
    key, payload = SnapshotKey("seated-1", 1, 0, 0, 5), b"state"
    copies.put(key, payload, digest_of(payload))
    ray.kill(ray.get_actor(name, namespace=NAMESPACE))
    with pytest.raises(StoreGoneError):
        copies.put(key, payload, digest_of(payload))

    def revived() -> list[int]:
        ended = groups.keepers_ended("seated-1", store.job("seated-1").nodes)
        found = groups.revive("seated-1", ended, "CPU", 4)
        return [seat.bundle for seat in found]

    until(lambda: revived() == [1], "the keeper's successor")
    copies.put(key, payload, digest_of(payload))
    assert copies.get(key) is not None and revived() == []

    # A keeper that dies on a node that lives is started again in its place.
    ray.kill(ray.get_actor(keeper_actor("seated-1", 0), namespace=NAMESPACE))
    assert desk.mend(store.job("seated-1"), 3.0) == "" and seats() == before
    until(lambda: keeper_actor("seated-1", 0) in keepers(), "keeper")

    # A node that dies: its ranks are on the spare, and nothing else moved.
    (gone,) = [n for n in nodes if n.node_id == second]
    cluster.remove_node(gone, allow_graceful=False)
    until(lambda: len(groups.capacities()) == 3, "news of the dead node")
    assert desk.mend(store.job("seated-1"), 4.0) == ""
    assert seats() == [(first, 0, False), (spare, 2, False)]
    assert desk.fill(store.job("seated-1"), 4.0) is None, "no node is free for a spare"

    # A quarantined one is left for a new node, while a new spare is found once there is one.
    held = keeper_actor("seated-1", 0)
    at = replace(key, rank=0)
    KeeperStore(ray.get_actor(held, namespace=NAMESPACE), Parcels(), name=held).put(
        at, payload, digest_of(payload)
    )
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    until(lambda: len(groups.capacities()) == 5, "two new nodes")
    roll = NodeRoll(store, groups)
    roll.quarantine(first, "test", "me", None, 5.0)
    assert desk.mend(store.job("seated-1"), 6.0) == ""
    assert seats()[0][0] not in (first, spare) and seats()[1] == (spare, 2, False)
    found = desk.fill(store.job("seated-1"), 60.0)
    assert found is not None and len(found) == 1 and found[0].node_id != first
    shown = {view.node_id: view for view in roll.view(60.0)}
    assert shown[first].quarantine is not None and shown[first].held_by == ()
    # Its keeper stays until the job trains elsewhere, for what it holds.
    assert keeper_actor("seated-1", 0) in keepers() and free() == []
    store.change("seated-1", Cause.FIRST_STEP, "", 61.0)
    desk.leave(store.job("seated-1"))
    until(lambda: free() == [first], "only the quarantined node free")

    # What a job waits for is asked of the autoscaler, once, and taken back.
    from ray.autoscaler._private.constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
    from ray.experimental.internal_kv import _internal_kv_get

    waiting = spec_of(Source("job", job(tmp_path, "waiting"), {}))
    store.add_job("waiting-1", waiting, str(tmp_path), "job", 7.0)
    rows = [store.job("waiting-1")], [store.job("seated-1")]
    desk.wish(*rows, 60.0)
    # Three seats, the waiting one, and the slot that the quarantined node has in vain.
    asked = _internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL)
    assert asked == b"[" + b", ".join([b'{"CPU": 1.0}'] * 5) + b"]"
    desk.wish([], rows[1], 60.0)
    assert _internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL) == b"[]"

    desk.release(store.job("seated-1"))
    until(lambda: not keepers(), "end of the keepers")
    until(lambda: len(free()) == 4, "nodes given back")
    for node in list(cluster.worker_nodes):
        cluster.remove_node(node)


class Answering:
    """A worker, as far as preflight asks for one."""

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


def test_nodes_are_checked_by_themselves_and_in_pairs_and_one_that_is_gone_is_named(
    cluster: Cluster, tmp_path: Path
) -> None:
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    seats, workers = [], {}
    for number, node in enumerate(nodes):
        place = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        actor = ray.remote(Answering).options(num_cpus=0, scheduling_strategy=place).remote()
        seats.append(Seat(node.node_id, node.node_ip_address, 1, f"keeper-{number}"))
        workers[node.node_id] = actor

    (tmp_path / SPEC_FILE).touch()

    def verdict(newcomers: set[str], **demand: Any) -> Verdict:
        asked = replace(Demand(1, 1, 1, str(tmp_path), False, False), **demand)
        run = PreflightRun(
            seats,
            workers,
            newcomers,
            asked,
            Limits(5.0, None),
            now=time.time(),
            timeout_s=60.0,
            clock=time.time,
        )
        found: Verdict = until(lambda: run.verdict(time.time()), "verdict", 90.0)
        return found

    first, second = (seat.node_id for seat in seats)
    passed = verdict({first, second})
    assert not passed.failed and passed.device == "cpu" and passed.nodes == 2
    assert passed.slowest_mbit_s is not None and passed.slowest_mbit_s > 0
    # Only the newcomer is looked at, but its link with the other one too.
    again = verdict({second}, disk_bytes=1 << 60)
    assert list(again.failed) == [second] and again.failed[second].for_this_job
    assert not verdict({second}).failed
    ray.kill(workers[second])
    gone = verdict({first, second})
    assert list(gone.failed) == [second] and "ActorDiedError" in gone.failed[second].reason
    for node in nodes:
        cluster.remove_node(node)


@pytest.fixture
def client(cluster: Cluster, tmp_path: Path) -> Iterator[Client]:
    from orchestrator.cluster.controller_actor import start_controller

    home = Home(tmp_path / "home")
    home.create(HomeConfig(jobs_dir=tmp_path / "jobs"))
    start_controller(home)
    yield Client.of_home(home)
    with contextlib.suppress(ValueError):
        ray.kill(ray.get_actor(CONTROLLER_ACTOR, namespace=NAMESPACE))


def losses(client: Client, job: str) -> list[tuple[int, str]]:
    """(step, loss to the last bit)."""
    rows = client.steps(job, tensors=False)["steps"]
    return [(row["step"], float(row["loss"]).hex()) for row in rows]


def test_a_job_makes_room_for_a_more_important_one_and_goes_on_to_the_bit(
    cluster: Cluster, client: Client, tmp_path: Path
) -> None:
    cluster.add_node(num_cpus=1)
    # Long enough not to have ended by itself before it is asked to make room.
    steps = 8 * STEPS
    asked = job(tmp_path, "low", steps)
    low = client.submit(asked, "low.yaml", key="once", by="ann")["id"]
    assert client.submit(asked, "low.yaml", key="once", by="ann")["id"] == low
    until(lambda: client.job(low)["step"] >= 5, "sixth step")
    urgent = job(tmp_path, "high", steps, resources={"standby": False, "priority": 5})
    high = client.submit(urgent, "high.yaml")["id"]
    until(lambda: client.job(high)["state"] == "running", "running urgent job", 120.0)
    waiting = client.job(low)
    assert waiting["state"] == "queued" and 5 <= waiting["step"] < steps - 1
    for name in (high, low):
        until(lambda name=name: client.job(name)["settled"], f"end of {name}", 120.0)
    shown = client.job(low)
    assert (shown["state"], shown["attempt"]) == ("succeeded", 2)
    told = [event["message"] for event in client.events(low)["events"]]
    assert any(m.startswith("Preflight passed on 1 node in ") for m in told)
    reason = f"Asked by the queue: back into the queue after a checkpoint ({high} has priority 5"
    assert any(message.startswith(reason) for message in told)
    assert any("starts 1 rank at step" in m and "from a checkpoint" in m for m in told)
    # No step was lost or done twice; the urgent job is the same training, undisturbed.
    assert [step for step, _ in losses(client, low)] == list(range(steps))
    assert losses(client, low) == losses(client, high)
    (node,) = [n for n in client.nodes() if n["total"].get("CPU")]
    assert node["held_by"] == [] and node["quarantine"] is None


def test_a_job_goes_on_with_fewer_nodes_and_another_begins_where_it_ended(
    cluster: Cluster, client: Client, tmp_path: Path
) -> None:
    for node in list(cluster.worker_nodes):
        cluster.remove_node(node)
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    until(lambda: sum(bool(n["total"].get("CPU")) for n in client.nodes()) == 2, "two nodes")
    elastic = job(
        tmp_path,
        "elastic",
        steps=3 * STEPS,
        num_nodes=2,
        resources={"standby": False, "min_nodes": 1},
        checkpoint={"every": 5},
    )
    name = client.submit(elastic, "elastic.yaml")["id"]
    folder = Path(client.job(name)["job_dir"])
    until(lambda: list((folder / "checkpoints").glob("step-*")), "checkpoint", 120.0)
    cluster.remove_node(nodes[1], allow_graceful=False)
    until(lambda: client.job(name)["settled"], "end", 180.0)
    told = client.events(name)["events"]
    assert client.job(name)["state"] == "succeeded", [event["message"] for event in told]
    kinds = [event["kind"] for event in told]
    assert kinds.index("nodes_resized") < kinds.index("degrees")
    (degrees,) = [event["message"] for event in told if event["kind"] == "degrees"]
    assert "data 1" in degrees and "on 1 node with" in degrees
    assert {step for step, _ in losses(client, name)} == set(range(3 * STEPS))

    # With another length, on other degrees, where the first one ended.
    longer = elastic["training"] | {"steps": 3 * STEPS + 5}
    second = job(tmp_path, "second", training=longer, checkpoint={"resume_from": str(folder)})
    name = client.submit(second, "second.yaml")["id"]
    until(lambda: client.job(name)["settled"], "end of the second", 120.0)
    told = client.events(name)["events"]
    assert client.job(name)["state"] == "succeeded", [event["message"] for event in told]
    assert "resumed" in [event["kind"] for event in told]
    assert [step for step, _ in losses(client, name)] == list(range(3 * STEPS, 3 * STEPS + 5))
