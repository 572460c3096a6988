"""What room a real rank finds for its snapshots: at a first start, and at a restart of the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.attempt_folder import open_attempt
from launch.checkpoints import commit_checkpoint
from launch.commands import Assignment, Report, RestorePoint, RingReport
from launch.config import RunConfig
from tests.ranks.launch_ranks import run_ranks


def _config(corpus: Path, steps: int) -> RunConfig:
    values = {
        "num_nodes": 1,
        "slots_per_node": 1,
        "parallelism": {"pipeline": 1, "data": 1, "zero_stage": 1},
        "model": {"hidden_size": 384, "num_layers": 4, "num_heads": 6},
        "data": {"source": str(corpus), "shuffle_seed": 1},
        "training": {
            "steps": steps,
            "seq_len": 16,
            "train_batch_size": 1,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "lr": 1e-3,
        },
        "snapshots": {"every": 4, "keep": 3},
        "checkpoint": {"every": 0},
    }
    return RunConfig.model_validate(values)


def _body(
    rank: int,
    world_size: int,
    config: RunConfig,
    job_dir: str,
    attempt: int,
    restore: RestorePoint | None,
    limit: float,
) -> dict[str, Any]:
    """A rank in a container of ``limit`` bytes, with nothing else in it."""
    import psutil

    import launch.snapshot_room
    import launch.training
    from launch.allocator import keep_freed_memory
    from launch.mailbox import Mailbox

    keep_freed_memory()
    seen: dict[str, Any] = {}

    def free() -> int:
        seen["taken"] = psutil.Process().memory_info().rss
        return int(limit - seen["taken"])

    launch.snapshot_room.free_bytes = free
    assignment = Assignment(
        job="job",
        attempt=attempt,
        timeline=0,
        rank=0,
        world_size=1,
        local_rank=0,
        local_size=1,
        master_addr="127.0.0.1",
        master_port=int(os.environ["MASTER_PORT"]),
        job_dir=job_dir,
        run=config,
        restore=restore,
        ledger=(),
        precision={},
        lr_scale=1.0,
        fired_drills=(),
    )
    reports: list[Report] = []
    loop = launch.training.TrainingLoop(assignment, Mailbox(attempt), reports.extend)
    seen["result"] = loop.run()
    seen["slots"] = len(loop._ring._slots)
    seen["told"] = [report.kept for report in reports if isinstance(report, RingReport)]
    seen["nbytes"] = loop._ring.layout.nbytes
    return seen


class Job:
    """One rank, attempt after attempt."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.corpus = folder / "text.txt"
        self.corpus.write_bytes(np.random.default_rng(0).bytes(4000))

    def run(self, attempt: int, restore: RestorePoint | None, limit: float) -> dict[str, Any]:
        open_attempt(self.folder, attempt)
        args = (_config(self.corpus, 2 * attempt), str(self.folder), attempt, restore, limit)
        (seen,) = run_ranks(_body, 1, *args, init_group=False, timeout_s=200)
        assert seen["result"].step == 2 * attempt
        return seen

    def checkpoint(self, attempt: int) -> RestorePoint:
        made = commit_checkpoint(self.folder, 2 * attempt, attempt, range(1), timeline=0)
        return RestorePoint(made.step, "disk", attempt, 0, str(made.path))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("job"))


def test_a_restart_has_as_much_room_as_the_first_start_and_fewer_snapshots_where_it_has_less(
    job: Job,
) -> None:
    first = job.run(1, None, 1e12)
    state = first["nbytes"]
    again = job.run(2, job.checkpoint(1), 1e12)
    assert first["taken"] == pytest.approx(again["taken"], abs=state / 4)
    assert first["slots"] == again["slots"] == 4
    assert first["told"] == again["told"] == []
    # keep: 3 needs 3 + 1 in the ring, and as many for its keeper with one on its way.
    tight = again["taken"] + 7.5 * state
    fewer = job.run(3, job.checkpoint(2), tight)
    assert fewer["slots"] == 3, "one snapshot less, and the job goes on"
    assert fewer["told"] == [2], "which its supervisor is told of"
