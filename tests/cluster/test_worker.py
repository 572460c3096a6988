"""Workers as real Ray actors: a run to its end, a rank killed by a drill, an owner that dies."""

from __future__ import annotations

import os
import pickle
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from launch.attempt_folder import open_attempt
from launch.commands import Assignment, Command, DrillReport, RankReport, Rollback, SnapshotReport
from launch.config import RunConfig
from launch.keeper_clients import KeeperHandles
from launch.worker import RankFailedError, Worker, WorkerInfo

WORLD = 2

pytestmark = pytest.mark.usefixtures("local_ray")


class Owner:
    """A supervisor that only listens."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    def ping(self) -> bool:
        return True

    def report(self, reports: list[Any]) -> None:
        self.received += reports

    def told(self) -> list[Any]:
        return self.received


def config(source: str, steps: int, **more: Any) -> RunConfig:
    values = {
        "slots_per_node": WORLD,
        "parallelism": {"pipeline": 1, "data": WORLD, "zero_stage": 1},
        "model": {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "ffn_size": 64},
        "data": {"source": source},
        "training": {
            "steps": steps,
            "seq_len": 16,
            "train_batch_size": 4,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1,
        },
        "snapshots": {"every": 5, "keep": 3},
        **more,
    }
    return RunConfig.model_validate(values)


class Group:
    """A listening owner, two workers and a keeper."""

    def __init__(self) -> None:
        import ray

        from launch.keeper import Keeper

        self.owner = ray.remote(Owner).options(num_cpus=0, max_concurrency=8).remote()
        self.keeper = ray.remote(Keeper).options(num_cpus=0).remote()
        worker = ray.remote(Worker).options(num_cpus=0, max_concurrency=8)
        self.workers = [worker.remote(self.owner) for _ in range(WORLD)]
        self.infos: list[WorkerInfo] = ray.get([w.ready.remote() for w in self.workers])

    def run(self, job_dir: Path, settings: RunConfig, **more: Any) -> list[Any]:
        import ray

        port = ray.get(self.workers[0].host_meeting.remote(self.infos[0].node_ip))
        return [
            worker.run.remote(
                Assignment(
                    job="job",
                    attempt=1,
                    timeline=0,
                    rank=rank,
                    world_size=WORLD,
                    local_rank=rank,
                    local_size=WORLD,
                    master_addr=self.infos[0].node_ip,
                    master_port=port,
                    job_dir=str(job_dir),
                    run=settings,
                    restore=None,
                    ledger=(),
                    precision={},
                    lr_scale=1.0,
                    fired_drills=(),
                    **more,
                ),
                self.owner,
                KeeperHandles(self.keeper),
            )
            for rank, worker in enumerate(self.workers)
        ]

    def told(self, kind: type) -> list[Any]:
        import ray

        return [r for r in ray.get(self.owner.told.remote()) if isinstance(r, kind)]

    def end(self) -> None:
        import ray

        for actor in (*self.workers, self.owner, self.keeper):
            ray.kill(actor)


@pytest.fixture
def group() -> Any:
    made = Group()
    yield made
    made.end()


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 200)
    return str(path)


def within(seconds: float, true: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.05)
    return False


def gone(infos: Sequence[WorkerInfo]) -> bool:
    return not any(Path(f"/proc/{info.pid}").exists() for info in infos)


def test_a_group_trains_rolls_back_on_command_and_leaves_its_logs(
    group: Group, text: str, tmp_path: Path
) -> None:
    import ray

    open_attempt(tmp_path, 1)  # as its supervisor does
    runs = group.run(tmp_path, config(text, 200), envs={"OCTAVO_TEST_MARK": "here"})
    assert within(60, lambda: any(r.step >= 12 for r in group.told(RankReport)))
    order = Command(1, 1, Rollback(to_step=10, timeline=1))
    ray.get([worker.post.remote(order) for worker in reversed(group.workers)])
    results = ray.get(runs, timeout=120)
    assert [(r.rank, r.step, r.reason) for r in results] == [
        (0, 200, "finished"),
        (1, 200, "finished"),
    ]
    reports = group.told(RankReport)
    assert {(r.rank, r.step) for r in reports if r.timeline == 1} == {
        (rank, step) for rank in range(WORLD) for step in range(10, 200)
    }
    losses = {(r.rank, r.timeline, r.step): r.loss for r in reports}
    assert losses[0, 0, 10] == losses[0, 1, 10] == losses[1, 1, 10]
    tiers = {(r.tier, r.step) for r in group.told(SnapshotReport) if r.rank == 1}
    assert {("ring", 195), ("memory", 195), ("disk", 200)} <= tiers
    for rank in range(WORLD):
        log = (tmp_path / "logs" / "attempt-1" / f"rank-{rank}.log").read_text()
        assert "ready for step 0" in log
        assert "command 1 before step" in log
    with pytest.raises(ray.exceptions.RayTaskError, match="has run an attempt already"):
        ray.get(group.run(tmp_path, config(text, 5)))


def test_an_error_of_the_loop_is_the_error_of_run_and_the_process_lives(
    group: Group, tmp_path: Path
) -> None:
    import ray

    for run in group.run(tmp_path, config(str(tmp_path / "nothing.txt"), 5)):
        with pytest.raises(RankFailedError, match=r"rank \d, step 0: DataAwayError: .*nothing.txt"):
            ray.get(run, timeout=60)
    assert ray.get([worker.ping.remote() for worker in group.workers]) == [True, True]
    log = (tmp_path / "logs" / "attempt-1" / "rank-0.log").read_text()
    assert "Traceback" in log and "nothing.txt" in log


def test_a_kill_is_told_before_it_happens(group: Group, text: str, tmp_path: Path) -> None:
    import ray

    drill = {"kind": "kill_rank", "step": 7, "rank": 1}
    runs = group.run(tmp_path, config(text, 100_000, drills=[drill]))
    with pytest.raises(ray.exceptions.ActorDiedError):
        ray.get(runs[1], timeout=60)
    assert [(r.rank, r.step, r.drill) for r in group.told(DrillReport)] == [(1, 7, 0)]
    assert max(r.step for r in group.told(RankReport)) == 6


def test_workers_end_when_their_owner_dies(group: Group, text: str, tmp_path: Path) -> None:
    import ray

    group.run(tmp_path, config(text, 100_000))
    assert within(60, lambda: any(r.step >= 3 for r in group.told(RankReport)))
    ray.kill(group.owner)
    assert within(15, lambda: gone(group.infos))


def test_who_looks_for_the_ranks_meeting_finds_it_listening(group: Group) -> None:
    import ray

    address = group.infos[0].node_ip
    port, again = ray.get([group.workers[0].host_meeting.remote(address) for _ in range(2)])
    # Refused, a rank's client would try again half a second later.
    socket.create_connection((address, port), timeout=5).close()
    assert port == again


def test_the_error_of_a_rank_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(RankFailedError(2, 7, "ValueError: no")))
    assert (error.rank, error.step, str(error)) == (2, 7, "rank 2, step 7: ValueError: no")


def test_pids_are_those_of_other_processes(group: Group) -> None:
    assert len({info.pid for info in group.infos} | {os.getpid()}) == WORLD + 1
    assert len({info.node_id for info in group.infos}) == 1
