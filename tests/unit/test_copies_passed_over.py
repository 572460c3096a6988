"""Which copies a rank that starts gives up for good, and which it may take the next time."""

from __future__ import annotations

import errno
import os
from typing import Any, cast

import pytest

from launch import reshaping, restoring
from launch.commands import Assignment, CopyRefused, Report, RestorePoint
from launch.config import RunConfig
from launch.reshaping import state_on_disk
from launch.restoring import Restorer
from parallel.layout import RankLayout

POINTS = tuple(RestorePoint(step, "disk", 1, 0, f"step-{step}") for step in (20, 10))


@pytest.mark.parametrize(
    ("number", "for_good"),
    [(errno.ENOENT, True), (errno.EIO, False), (errno.ESTALE, False), (errno.EACCES, False)],
)
def test_a_checkpoint_that_is_gone_is_given_up_and_one_that_is_not_to_be_read_now_is_not(
    monkeypatch: pytest.MonkeyPatch, number: int, for_good: bool
) -> None:
    def read(path: str, rank: int, step: int, *of: Any) -> Any:
        return state_on_disk(path, rank, step, *of) if step == 20 else ({}, {})

    def answer(path: str) -> Any:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(restoring, "state_on_disk", read)
    monkeypatch.setattr(reshaping, "SavedState", answer)
    monkeypatch.setattr(restoring, "gather", lambda world, mine: [mine])
    assignment = Assignment(
        job="job",
        attempt=2,
        timeline=0,
        rank=0,
        world_size=1,
        local_rank=0,
        local_size=1,
        master_addr="",
        master_port=0,
        job_dir="",
        run=RunConfig(),
        restore=POINTS[0],
        fallbacks=POINTS[1:],
        ledger=(),
        precision={},
        lr_scale=1.0,
        fired_drills=(),
    )
    told: list[Report] = []
    layout = RankLayout((1, 1, 1), (0, 0, 0), 1, (), ())
    found = Restorer(assignment, (), cast("Any", None), told.append, layout, {}).find()
    assert found is not None and found.point == POINTS[1]
    (refused,) = [report for report in told if isinstance(report, CopyRefused)]
    assert (refused.point == POINTS[0]) is for_good and refused.step == 20
