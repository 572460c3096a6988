"""A rank's time outside of communication: it tells the slow one of ranks whose steps are alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from launch.commands import Assignment, RankReport, Report
from launch.config import RunConfig
from launch.mailbox import Mailbox
from parallel.compute_clock import ComputeClock
from tests.ranks.launch_ranks import run_ranks

DELAY_S = 0.15
SLOW = 1


def body(rank: int, world_size: int, config: RunConfig, job_dir: str) -> list[tuple[float, float]]:
    """(own seconds, seconds) of each step but the first, which builds things."""
    import os

    from launch.data import TokenStream
    from launch.training import TrainingLoop

    if rank == SLOW:
        quick = TokenStream.micro_batches

        def slow(self: Any, *args: Any) -> Any:
            for batch in quick(self, *args):
                time.sleep(DELAY_S)
                yield batch

        TokenStream.micro_batches = slow  # type: ignore[method-assign]
    told: list[RankReport] = []

    def outbox(batch: Sequence[Report]) -> None:
        told.extend(report for report in batch if isinstance(report, RankReport))

    assignment = Assignment(
        job="job",
        attempt=1,
        timeline=0,
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_size=world_size,
        master_addr="127.0.0.1",
        master_port=int(os.environ["MASTER_PORT"]),
        job_dir=job_dir,
        run=config,
        restore=None,
        ledger=(),
        precision={},
        lr_scale=1.0,
        fired_drills=(),
    )
    TrainingLoop(assignment, Mailbox(1), outbox).run()
    return [(report.compute_s, report.step_time_s) for report in told[1:]]


def test_two_replicas_take_as_long_and_the_slow_one_shows_in_its_own_time(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("all work and no play makes a dull rank " * 200)
    config = RunConfig.model_validate(
        {
            "slots_per_node": 2,
            "parallelism": {"data": 2},
            "model": {"hidden_size": 32, "num_layers": 1, "num_heads": 2, "ffn_size": 32},
            "data": {"source": str(text)},
            "training": {
                "steps": 5,
                "seq_len": 16,
                "train_batch_size": 4,
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 1,
            },
            "checkpoint": {"every": 0},
        }
    )
    quick, slow = run_ranks(body, 2, config, str(tmp_path), init_group=False)
    assert len(quick) == len(slow) == 4
    own = [statistics.median(own for own, _ in steps) for steps in (quick, slow)]
    whole = [statistics.median(whole for _, whole in steps) for steps in (quick, slow)]
    assert own[1] > own[0] + DELAY_S / 2, "the slow rank's own time has its delay"
    assert whole[0] > own[0] + DELAY_S / 2, "the other one waits for it, and that is not its own"
    assert all(own <= whole for own, whole in (*quick, *slow))


def test_what_is_paused_is_not_counted_and_only_inside_what_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr("parallel.compute_clock.time.perf_counter", lambda: now[0])
    clock = ComputeClock()
    with clock.running():
        now[0] += 3.0
        with clock.paused():
            now[0] += 10.0
    with clock.paused():
        now[0] += 100.0
    assert clock.take()() == 3.0
    assert clock.take()() == 0.0
