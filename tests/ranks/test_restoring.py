"""Ranks that look for the state to start from: damaged and missing copies cost a tier or a step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from launch.commands import Assignment, CopyRefused, Report, RestoredOlder, RestorePoint
from launch.config import RunConfig
from launch.digests import digest_of
from launch.keeper import Keeper
from launch.restoring import Restorer
from launch.snapshots import SnapshotError, SnapshotKey, StoredSnapshot
from launch.state_block import StateLayout
from launch.state_header import LAYOUT
from parallel.layout import RankLayout
from tests.ranks.launch_ranks import run_ranks

POINTS = tuple(RestorePoint(step, "memory", 1, 0) for step in (20, 10))
Damage = tuple[int, str, int]
"""Rank, tier and step of a copy with a flipped bit."""


def whole(rank: int) -> RankLayout:
    """Of one of two replicas."""
    return RankLayout((1, 2, 1), (0, rank, 0), 1, (), ())


def state_of(rank: int, step: int) -> bytes:
    tensors = {"weights": torch.full((4,), float(100 * rank + step))}
    layout = StateLayout(tensors)
    block = torch.zeros(layout.nbytes, dtype=torch.uint8)
    layout.views(block)["weights"].copy_(tensors["weights"])
    header = layout.header({"step": step, LAYOUT: whole(rank).to_json()})
    block[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    return block.numpy().tobytes()


class Silent:
    """A keeper whose node doesn't answer."""

    def get(self, key: SnapshotKey) -> StoredSnapshot | None:
        raise ConnectionError("its node doesn't answer")


def look(
    rank: int, damaged: list[Damage], empty: list[Damage], silent: list[tuple[int, str]]
) -> tuple[Any, list[Report]]:
    """What one rank finds, and what it tells."""
    sources = []
    for tier in ("memory", "partner"):
        keeper = Keeper()
        for point in POINTS:
            if (rank, tier, point.step) in empty:
                continue
            key = SnapshotKey("job", 1, 0, rank, point.step)
            data = state_of(rank, point.step)
            keeper.put(key, data, digest_of(data))
            if (rank, tier, point.step) in damaged:
                held = keeper.get(key)
                assert held is not None
                held.payload[-1] ^= 1  # type: ignore[index]
        sources.append((tier, Silent() if (rank, tier) in silent else keeper))
    assignment = Assignment(
        job="job",
        attempt=2,
        timeline=0,
        rank=rank,
        world_size=2,
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
    world = dist.group.WORLD
    assert world is not None
    try:
        found = Restorer(assignment, sources, world, told.append, whole(rank), {}).find()
    except SnapshotError as error:
        return str(error), told
    assert found is not None
    return (found.point.step, found.meta["step"], found.tensors["weights"][0].item()), told


def body(rank: int, world_size: int, cases: list[Any]) -> Any:
    return [look(rank, *case) for case in cases]


def refusals(told: list[Report]) -> list[tuple[str, int, bool]]:
    """Tier and step of each copy passed over, and whether it was the last one of that step."""
    return [(r.tier, r.step, r.point is not None) for r in told if isinstance(r, CopyRefused)]


def test_ranks_pass_over_what_is_damaged_and_start_at_one_step() -> None:
    own, partners = (1, "memory", 20), (1, "partner", 20)
    everything = [(1, tier, step) for tier in ("memory", "partner") for step in (10, 20)]
    first, second = run_ranks(
        body,
        2,
        [
            ([], [], []),
            ([own], [], []),
            ([own], [partners], []),
            (everything, [], []),
            ([own], [], [(1, "partner")]),
        ],
    )

    whole, next_tier, next_step, nothing, silence = zip(first, second, strict=True)
    assert [found for found, _ in whole] == [(20, 20, 20.0), (20, 20, 120.0)]
    assert [told for _, told in whole] == [[], []]

    assert [found for found, _ in next_tier] == [(20, 20, 20.0), (20, 20, 120.0)]
    assert refusals(next_tier[0][1]) == []
    assert refusals(next_tier[1][1]) == [("memory", 20, False)]

    assert [found for found, _ in next_step] == [(10, 10, 10.0), (10, 10, 110.0)]
    assert refusals(next_step[1][1]) == [("memory", 20, False), ("partner", 20, True)]
    (older,) = next_step[0][1]
    assert isinstance(older, RestoredOlder) and older.point == POINTS[1]

    assert nothing[0][0] == nothing[1][0], "all ranks raise the same"
    assert nothing[0][0].startswith("rank 1: copy of step 10 in tier partner: digest is")

    assert [found for found, _ in silence] == [(10, 10, 10.0), (10, 10, 110.0)]
    assert refusals(silence[1][1])[:2] == [("memory", 20, False), ("partner", 20, False)]
