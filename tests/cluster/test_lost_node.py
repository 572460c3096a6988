"""A node that dies, on a Ray of several nodes: its ranks go on elsewhere, from a partner's copy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from launch.keeper import Keeper
from launch.rank_group import Seat
from launch.relay import NotOurAttemptError
from launch.report_tree import NotReceivedError, ReportTree
from launch.step_part import Sent
from launch.worker_group import WorkerGroup
from monitoring.job_view import split_timelines
from orchestrator.node_slot import NodeSlot
from orchestrator.protocol import (
    CONTROLLER_ACTOR,
    NAMESPACE,
    ResumeState,
    keeper_actor,
    supervisor_actor,
)
from orchestrator.spec.job import JobSpec
from orchestrator.supervision.supervisor import Supervisor
from tests.cluster.supervised import JOB, StoringController, SupervisedJob, small_spec
from tests.cluster.test_worker_group import IdleWorker, assigned, runs, until
from tests.incidents.local_ranks import run_job
from tests.unit.test_step_part import plain

NODES = 2


class MendingController(StoringController):
    """Gives a lost node's seat to a node that stands by, with a keeper that holds nothing."""

    def __init__(self, spec: JobSpec, job_dir: Path, slots: int) -> None:
        super().__init__(spec, job_dir, slots)
        self._seats: list[str] = []

    def resume(self) -> ResumeState:
        nodes = {n["NodeID"]: n for n in self._living()}
        free = [node for node in nodes if node not in self._seats]
        for place in range(NODES):
            if place == len(self._seats):
                self._seats.append(free.pop(0))
            elif self._seats[place] not in nodes:
                self._seats[place] = free.pop(0)
        for place, node in enumerate(self._seats):
            self._start_keeper(place, node)
        slots = tuple(
            NodeSlot(node, nodes[node]["NodeManagerAddress"], place, 1)
            for place, node in enumerate(self._seats)
        )
        return replace(super(StoringController, self).resume(), nodes=slots)

    def _living(self) -> list[dict[str, Any]]:
        """Nodes with slots, once Ray knows of a seat whose keeper has died."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            living = [n for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU")]
            answering = [self._answers(place) for place in range(len(self._seats))]
            dead = [s for s in self._seats if s not in {n["NodeID"] for n in living}]
            if len(dead) == answering.count(False):
                return living
            time.sleep(0.1)
        raise TimeoutError("Ray does not notice that a node is dead")

    def _answers(self, place: int) -> bool:
        try:
            keeper = ray.get_actor(keeper_actor(JOB, place), namespace=NAMESPACE)
            return bool(ray.get(keeper.ping.remote(), timeout=2))
        except (ValueError, ray.exceptions.RayError):
            return False

    def _start_keeper(self, place: int, node: str) -> None:
        if self._answers(place):
            return
        place_on = NodeAffinitySchedulingStrategy(node, soft=False)
        options = {"name": keeper_actor(JOB, place), "namespace": NAMESPACE, "num_cpus": 1}
        keeper = ray.remote(Keeper).options(
            **options, scheduling_strategy=place_on, max_concurrency=8, lifetime="detached"
        )
        ray.get(keeper.remote(self.spec.snapshots.keep).ping.remote(), timeout=30)

    def seats(self) -> list[str]:
        return list(self._seats)


class SpreadJob(SupervisedJob):
    """Two ranks on two nodes."""

    def __init__(self, spec: JobSpec, job_dir: Path) -> None:
        # With the supervisor on the node that has no slots and is not killed.
        self._here = NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        controller = ray.remote(MendingController).options(
            name=CONTROLLER_ACTOR,
            namespace=NAMESPACE,
            num_cpus=0,
            max_concurrency=8,
            scheduling_strategy=self._here,
        )
        self.controller = controller.remote(spec, job_dir, 1)
        self.supervisor = None

    def supervise(self, resume: ResumeState) -> None:
        supervisor = ray.remote(Supervisor).options(
            name=supervisor_actor(JOB),
            namespace=NAMESPACE,
            num_cpus=0,
            max_concurrency=8,
            scheduling_strategy=self._here,
        )
        self.supervisor = supervisor.remote()
        self.run = self.supervisor.run.remote(resume)

    def __exit__(self, *raised: Any) -> None:
        for actor in (self.supervisor, self.controller):
            ray.kill(actor)
        for place in range(NODES):
            with contextlib.suppress(ValueError):  # one whose node is gone
                ray.kill(ray.get_actor(keeper_actor(JOB, place), namespace=NAMESPACE))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    quick = {
        "health_check_initial_delay_ms": 1000,
        "health_check_period_ms": 200,
        "health_check_failure_threshold": 5,
    }
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": quick})
    for _ in range(NODES + 1):
        made.add_node(num_cpus=1)
    ray.init(address=made.address, namespace=NAMESPACE, log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def test_a_node_that_does_not_answer_holds_up_no_end_and_is_asked_again(cluster: Cluster) -> None:
    nodes = [n for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU")][:NODES]
    names = [f"octavo-keeper-silent-{node['NodeID']}" for node in nodes]
    keepers = [
        ray.remote(Keeper)
        .options(
            name=name,
            namespace=NAMESPACE,
            num_cpus=0,
            max_concurrency=8,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        .remote()
        for name, node in zip(names, nodes, strict=True)
    ]
    ray.get([keeper.ping.remote() for keeper in keepers], timeout=60)
    seats = [
        Seat(node["NodeID"], node["NodeManagerAddress"], 1, name)
        for name, node in zip(names, nodes, strict=True)
    ]
    group = WorkerGroup("silent", None, worker_class=IdleWorker)
    group.start(seats)
    until(group.ready)
    group.run([assigned(rank, "") for rank in range(NODES)])
    pids = [worker.info.pid for worker in group._ranks]
    (frozen,) = [n for n in cluster.worker_nodes if n.node_id == nodes[1]["NodeID"]]
    raylet = psutil.Process(frozen.all_processes["raylet"][0].process.pid)
    stopped = [raylet, *raylet.children(recursive=True)]
    for process in stopped:
        process.suspend()
    try:
        assert group.stacks()[1].tool == "none" and group.stacks()[0].tool == "py-spy"
        group.kill()
        assert not runs(pids[0]), "the node that answers has ended its rank"
        assert runs(pids[1])
    finally:
        for process in stopped:
            process.resume()
    until(lambda: ray.get(keepers[1].ping.remote(), timeout=30))
    group.close()
    assert not runs(pids[1])
    for keeper in keepers:
        ray.kill(keeper)


class Listener:
    """A supervisor that only listens."""

    def __init__(self) -> None:
        self._received: list[Sent] = []

    def report(self, sent: list[Sent]) -> None:
        self._received += sent

    def received(self) -> list[Sent]:
        return self._received


def test_relays_of_several_levels_bring_the_supervisor_one_part_of_a_step_each(
    cluster: Cluster,
) -> None:
    listener = ray.remote(Listener).options(num_cpus=0).remote()
    nodes = [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU")]
    assert len(nodes) == NODES + 1
    tree = ReportTree(listener, fan_in=2)
    for attempt in (1, 2):
        relays = tree.begin(attempt, [(node, 2) for node in nodes])
        sent = [
            relays[node].take.remote(attempt, [plain(2 * place + own, attempt=attempt)])
            for place, node in enumerate(nodes)
            for own in range(2)
        ]
        ray.get(sent, timeout=60)
    with pytest.raises(NotOurAttemptError):
        ray.get(relays[nodes[0]].take.remote(1, [plain(0)]), timeout=60)
    received = ray.get(listener.received.remote())
    parts = sorted((one.attempt, one.ranks.tolist()) for one in received)
    assert parts == [(a, ranks) for a in (1, 2) for ranks in ([0, 1, 2, 3], [4, 5])]
    ray.kill(listener)
    # What no supervisor received is not taken, and says so to who sent it.
    with pytest.raises(NotReceivedError):
        ray.get(relays[nodes[2]].take.remote(2, [plain(4, 1), plain(5, 1)]), timeout=60)
    tree.close()


def test_a_lost_nodes_rank_goes_on_elsewhere_from_its_partners_copy_to_the_bit(
    cluster: Cluster, tmp_path: Path
) -> None:
    training = small_spec(tmp_path).training.model_dump() | {"steps": 200}
    spec = small_spec(
        tmp_path,
        training=training,
        num_nodes=NODES,
        slots_per_node=1,
        resources={"standby": False},
        merge_reports_from=NODES,
    )
    assert spec.snapshots.replicas == 1
    with SpreadJob(spec, tmp_path) as job:
        job.wait_for_step(13)
        before = ray.get(job.controller.seats.remote())
        (lost,) = [n for n in cluster.worker_nodes if n.node_id == before[1]]
        cluster.remove_node(lost, allow_graceful=False)
        told = job.wait(90)
        after = ray.get(job.controller.seats.remote())
    assert told["states"][-1] == ("succeeded", "STEPS_DONE"), told["events"]
    assert after[0] == before[0] and after[1] not in before
    starts = [e.detail for e in told["events"] if e.kind == "attempt_started"]
    assert starts[0]["tier"] == "seed"
    assert {s["tier"] for s in starts[1:]} == {"memory"} and starts[-1]["step"] >= 10
    assert "copy_passed_over" not in {e.kind for e in told["events"]}
    held = [e.detail for e in told["events"] if e.kind == "copies_held"]
    assert held and all(h["replicas"] == 1 and h["keeper_bytes"] > 0 for h in held)
    here = spec.model_copy(update={"num_nodes": 1, "slots_per_node": NODES})
    undisturbed = run_job(here, folder=tmp_path / "undisturbed").losses()
    kept, _ = split_timelines(told["steps"])
    assert {record.step: record.loss.hex() for record in kept} == undisturbed
