"""The grid of ranks and the cut of layers into stages."""

from __future__ import annotations

import itertools

import pytest
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from hypothesis import given
from hypothesis import strategies as st

from parallel.config import ParallelismConfig
from parallel.topology import (
    Coordinate,
    coordinates,
    data_size,
    rank_at,
    stage_boundaries,
    stage_ranks,
    tensor_ranks,
)

GRIDS = [
    ParallelismConfig(pipeline=pp, data=dp, tensor=tp)
    for pp, dp, tp in itertools.product((1, 2, 3), (1, 2, 4), (1, 2))
]


class TestCoordinates:
    @pytest.mark.parametrize("grid", GRIDS, ids=str)
    def test_agree_with_deepspeeds_topology(self, grid: ParallelismConfig) -> None:
        theirs = PipeModelDataParallelTopology(
            num_pp=grid.pipeline, num_mp=grid.tensor, num_dp=grid.data
        )
        for rank in range(theirs.world_size()):
            coordinate = theirs.get_coord(rank)
            assert coordinates(rank, grid) == Coordinate(
                pipe=coordinate.pipe, data=coordinate.data, tensor=coordinate.model
            )

    @pytest.mark.parametrize("grid", GRIDS, ids=str)
    def test_come_back_to_the_rank(self, grid: ParallelismConfig) -> None:
        ranks = range(grid.pipeline * grid.data * grid.tensor)
        assert [rank_at(coordinates(rank, grid), grid) for rank in ranks] == list(ranks)

    @pytest.mark.parametrize("grid", GRIDS, ids=str)
    def test_tensor_groups_and_stages_are_deepspeeds(self, grid: ParallelismConfig) -> None:
        theirs = PipeModelDataParallelTopology(
            num_pp=grid.pipeline, num_mp=grid.tensor, num_dp=grid.data
        )
        for rank in range(theirs.world_size()):
            here = coordinates(rank, grid)
            shards = tensor_ranks(here, grid)
            assert rank in shards
            if grid.tensor > 1:
                assert list(shards) in theirs.get_axis_comm_lists("model")
            assert stage_ranks(here, grid) == tuple(theirs.get_axis_list("pipe", here.pipe))
            # A node of any multiple of the tensor degree holds whole groups.
            assert len({r // grid.tensor for r in shards}) == 1

    def test_refuse_what_is_outside_the_grid(self) -> None:
        grid = ParallelismConfig(pipeline=2, data=2)
        for rank in (-1, 4):
            with pytest.raises(ValueError, match=f"rank {rank}"):
                coordinates(rank, grid)
        with pytest.raises(ValueError, match="outside"):
            rank_at(Coordinate(pipe=0, data=2, tensor=0), grid)

    def test_need_the_number_of_replicas(self) -> None:
        with pytest.raises(ValueError, match="data-parallel degree"):
            coordinates(0, ParallelismConfig())


class TestDataSize:
    def test_is_what_the_other_degrees_leave(self) -> None:
        assert data_size(12, ParallelismConfig(pipeline=3, tensor=2)) == 2

    @pytest.mark.parametrize(
        ("world_size", "grid"),
        [
            (5, ParallelismConfig(pipeline=2)),
            (1, ParallelismConfig(pipeline=2)),
            (4, ParallelismConfig(pipeline=2, data=3)),
        ],
    )
    def test_refuses_a_world_that_the_degrees_do_not_make(
        self, world_size: int, grid: ParallelismConfig
    ) -> None:
        with pytest.raises(ValueError, match=f"{world_size} ranks"):
            data_size(world_size, grid)


class TestStageBoundaries:
    @given(
        st.lists(st.tuples(st.integers(0, 20), st.booleans()), min_size=1, max_size=7),
        st.integers(1, 4),
    )
    def test_are_the_best_of_all_cuts_that_give_each_stage_a_transformer_layer(
        self, layers: list[tuple[int, bool]], stages: int
    ) -> None:
        costs = [float(cost) for cost, _ in layers]
        required = [needed for _, needed in layers]
        allowed = []
        for inner in itertools.combinations(range(1, len(layers)), stages - 1):
            cuts = [0, *inner, len(layers)]
            parts = list(itertools.pairwise(cuts))
            if all(any(required[start:stop]) for start, stop in parts):
                allowed.append((max(sum(costs[start:stop]) for start, stop in parts), cuts))
        if allowed:
            cuts = stage_boundaries(costs, required, stages)
            best = min(worst for worst, _ in allowed)
            assert (best, cuts) in allowed, "an allowed cut, and none is better"
        else:
            with pytest.raises(ValueError, match="cannot fill"):
                stage_boundaries(costs, required, stages)

    def test_count_the_head_as_work_and_the_embedding_as_none(self) -> None:
        required = [False, True, True, True, True, True, False]
        # Five layers and a head as heavy as one: three against two and the head.
        costs = [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
        assert stage_boundaries(costs, required, 2) == [0, 4, 7]
