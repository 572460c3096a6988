"""WorkerGroup on a real Ray: actors, pins, standby, ends. The workers here do no training."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from launch.commands import Command, RankResult, Stop
from launch.digests import digest_of
from launch.keeper import Inventory, Keeper, keeper_class
from launch.keeper_clients import KeeperHandles
from launch.node_calls import NAMESPACE, Call, call_all
from launch.rank_group import NodeSilentError, Seat
from launch.snapshots import DamagedSnapshotError, SnapshotKey
from launch.worker_group import WorkerGroup
from tests.cluster.processes import runs

JOB = "grouped-000001"
KEEPER = f"octavo-keeper-{JOB}-0"
SLOTS = 2


class IdleWorker:
    """Says who it is; its loop waits for a Stop, or fails as its assignment says."""

    def __init__(self, owner: Any) -> None:
        self.commands: list[Command] = []
        self.ran = False

    def ready(self) -> SimpleNamespace:
        context = ray.get_runtime_context()
        where = {"node_id": context.get_node_id(), "node_ip": "127.0.0.1", "hostname": "here"}
        return SimpleNamespace(**where, pid=os.getpid())

    def adopt(self, owner: Any) -> bool:
        return not self.ran

    def run(
        self,
        assignment: Any,
        supervisor: Any,
        keepers: KeeperHandles,
        lifeline: tuple[str, int],
        relay: Any,
    ) -> RankResult:
        self.ran = True
        socket.create_connection(lifeline).close()
        if assignment.fault == "damaged":
            raise DamagedSnapshotError(assignment.rank, 20, "memory", "digest differs")
        if assignment.fault == "bug":
            raise ZeroDivisionError("division by zero\nwith a second line")
        if assignment.fault == "no_keeper" and keepers.own is None:
            raise RuntimeError("no keeper")
        while not any(isinstance(command.order, Stop) for command in self.commands):
            time.sleep(0.01)
        return RankResult(assignment.rank, 7, "stopped")

    def post(self, command: Command) -> None:
        self.commands.append(command)

    def host_meeting(self, address: str) -> int:
        return 29_500


def until(true: Callable[[], Any], timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def group(local_ray: None) -> Iterator[WorkerGroup]:
    made = WorkerGroup(JOB, None, worker_class=IdleWorker)
    yield made
    made.close()


@pytest.fixture(scope="module")
def keeper(local_ray: None) -> Iterator[Any]:
    actor = ray.remote(Keeper).options(name=KEEPER, namespace=NAMESPACE, num_cpus=2).remote()
    ray.get(actor.ping.remote())
    yield actor
    ray.kill(actor)


def seats() -> list[Seat]:
    (node,) = [n for n in ray.nodes() if n["Alive"]]
    return [Seat(node["NodeID"], node["NodeManagerAddress"], SLOTS, KEEPER)]


def assigned(rank: int, fault: str) -> Any:
    run = SimpleNamespace(snapshots=SimpleNamespace(replicas=0), merge_reports_from=SLOTS + 1)
    place = {"rank": rank, "world_size": SLOTS, "restore": None, "fallbacks": ()}
    return SimpleNamespace(**place, fault=fault, run=run, log_path="")


def launched(group: WorkerGroup, fault: str = "", faulty: int = 1) -> list[int]:
    """Process ids of the ranks, once their loops have begun."""
    group.start(seats())
    until(group.ready)
    group.run([assigned(rank, fault if rank == faulty else "") for rank in range(SLOTS)])
    return [worker.info.pid for worker in group._ranks]


def test_ranks_run_until_they_are_told_to_stop(group: WorkerGroup, keeper: Any) -> None:
    launched(group)
    assert group.ended() == ()
    group.post(Command(1, 1, Stop("enough")))
    until(lambda: len(group.ended()) == SLOTS)
    assert [end.how for end in group.ended()] == ["done", "done"]
    assert [end.result.step for end in group.ended() if end.result] == [7, 7]


def test_a_killed_process_is_told_as_lost_and_the_others_run_on(group: WorkerGroup) -> None:
    pids = launched(group)
    os.kill(pids[1], 9)
    until(group.ended)
    (end,) = group.ended()
    assert (end.rank, end.how) == (1, "lost") and str(pids[1]) in end.error
    assert runs(pids[0])


def test_what_a_rank_raises_comes_with_its_type(group: WorkerGroup) -> None:
    launched(group, "damaged")
    until(group.ended)
    (end,) = group.ended()
    assert (end.rank, end.how) == (1, "raised")
    assert isinstance(end.cause, DamagedSnapshotError) and end.cause.step == 20


def test_an_error_is_told_in_one_line(group: WorkerGroup) -> None:
    launched(group, "bug", faulty=0)
    until(group.ended)
    assert group.ended()[0].error == "ZeroDivisionError: division by zero"


def test_processes_are_gone_when_kill_returns(group: WorkerGroup) -> None:
    pids = launched(group)
    assert all(runs(pid) for pid in pids)
    group.kill()
    assert not any(runs(pid) for pid in pids)


def test_a_stopped_process_is_ended_too(group: WorkerGroup) -> None:
    pids = launched(group)
    os.kill(pids[0], 19)
    group.kill()
    assert not any(runs(pid) for pid in pids)


def test_ranks_that_are_frozen_when_their_supervisor_dies_are_ended_by_the_next(
    group: WorkerGroup, keeper: Any
) -> None:
    pids = launched(group)
    for pid in pids:
        os.kill(pid, 19)
    following = WorkerGroup(JOB, None, worker_class=IdleWorker)
    try:
        following.start(seats())
        until(following.ready)
        assert not any(runs(pid) for pid in pids)
        assert len(following.ended()) == 0
    finally:
        following.close()


def own_pid() -> int:
    return os.getpid()


def test_a_keeper_that_died_leaves_its_node_within_reach(group: WorkerGroup) -> None:
    dead = ray.remote(Keeper).options(num_cpus=0).remote()
    pid = ray.get(dead.call.remote(os.getpid))
    (seat,) = seats()
    os.kill(pid, 9)
    until(lambda: not runs(pid))
    # This process is on the node too, and makes calls to it itself: so as if it were elsewhere.
    elsewhere = Call(seat.node_id, dead, own_pid)
    answers = call_all([elsewhere], 60.0, here="another node")
    assert not answers.silent and answers.values[seat.node_id] not in (pid, os.getpid())


def until_there(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def test_a_keeper_says_what_it_holds_while_all_its_threads_are_at_work(
    local_ray: None, tmp_path: Path
) -> None:
    keeper, end = keeper_class().options(num_cpus=0, max_concurrency=2).remote(), tmp_path / "end"
    work = [keeper.call.remote(until_there, end) for _ in range(4)]
    try:
        asked = [keeper.ping.remote(), keeper.inventory.remote(JOB)]
        assert ray.get(asked, timeout=60.0) == [True, Inventory({}, 0)]
        assert not ray.wait(work, timeout=0)[0]
        end.touch()
        ray.get(work)
    finally:
        ray.kill(keeper)


def test_stacks_are_taken_of_what_sleeps_and_of_what_is_stopped(
    group: WorkerGroup, keeper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = launched(group)

    def loops() -> bool:
        """Whether both ranks' stacks show the loop that they are in."""
        taken = group.stacks().values()
        frames = [[f for _, frames in stack.threads for f in frames] for stack in taken]
        return all(
            any(f.name.endswith("run") and "test_worker_group" in f.file for f in of_rank)
            for of_rank in frames
        )

    until(loops)
    os.kill(pids[1], 19)
    until(lambda: psutil.Process(pids[1]).status() == psutil.STATUS_STOPPED)
    assert loops()
    stacks = group.stacks()
    assert [(stacks[r].tool, stacks[r].stopped) for r in (0, 1)] == [
        ("py-spy", False),
        ("py-spy", True),
    ]
    monkeypatch.setattr("launch.stacks._from_outside", lambda pid: ((), "may not attach"))
    by_signal = group.stacks()
    assert by_signal[0].tool == "none" and "did not prepare" in by_signal[0].why
    assert by_signal[1].stopped and "can't answer a signal" in by_signal[1].why


def test_standby_workers_take_the_ranks_of_the_next_attempt(group: WorkerGroup) -> None:
    first = launched(group)
    group.fill_standby()
    until(lambda: all(ray.wait([w.ready], timeout=0)[0] for w in group._standby))
    idle = {ray.get(worker.ready).pid for worker in group._standby}
    assert len(idle) == SLOTS and not idle & set(first)
    group.kill()
    assert set(launched(group)) == idle


def test_idle_workers_of_a_supervisor_that_died_are_the_next_ones(group: WorkerGroup) -> None:
    trained = launched(group)
    group.fill_standby()
    until(lambda: all(ray.wait([w.ready], timeout=0)[0] for w in group._standby))
    idle = {ray.get(worker.ready).pid for worker in group._standby}
    following = WorkerGroup(JOB, None, worker_class=IdleWorker)
    try:
        assert set(launched(following)) == idle, "and those that have a rank are not"
        assert len(idle) == SLOTS and not idle & set(trained)
    finally:
        following.close()


def test_a_standby_worker_that_died_is_not_taken(group: WorkerGroup) -> None:
    launched(group)
    group.fill_standby()
    idle = [ray.get(worker.ready).pid for worker in group._standby]
    os.kill(idle[0], 9)
    until(lambda: not runs(idle[0]))
    group.kill()
    taken = set(launched(group))
    assert idle[1] in taken and idle[0] not in taken


def test_closing_leaves_no_process_behind(group: WorkerGroup) -> None:
    pids = launched(group)
    group.fill_standby()
    pids += [ray.get(worker.ready).pid for worker in group._standby]
    group.close()
    assert not any(runs(pid) for pid in pids)


def test_copies_are_those_that_the_keepers_hold(group: WorkerGroup, keeper: Any) -> None:
    group.start(seats())
    assert group.copies() == []
    key = SnapshotKey(JOB, 1, 0, 1, 20)
    ray.get(keeper.put.remote(key, b"state", digest_of(b"state")))
    assert group.copies() == [key]


def test_a_keeper_that_is_gone_holds_nothing(group: WorkerGroup, keeper: Any) -> None:
    (seat,) = seats()
    group.start([Seat(seat.node_id, seat.node_ip, SLOTS, "octavo-keeper-of-nobody-0")])
    assert group.copies() == []


def test_ranks_meet_where_rank_0_says_and_one_that_is_gone_is_told(group: WorkerGroup) -> None:
    group.start(seats())
    until(group.ready)
    assert group.master() == (seats()[0].node_ip, 29_500)
    os.kill(group._ranks[0].info.pid, signal.SIGKILL)
    with pytest.raises(NodeSilentError, match="rank 0 does not answer: ActorDiedError"):
        group.master()
