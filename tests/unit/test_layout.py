"""Parts of parameters: every element of a matrix once, whatever the layouts on both sides."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from parallel.layout import (
    Cut,
    Group,
    LayoutError,
    Place,
    RankLayout,
    ShardKind,
    copies,
    fragments,
    owned,
    shards_to_read,
)
from parallel.tensor import slice_weight

UNIT = 12
"""Divisible by every number of tensor ranks below."""


def part(
    whole: NDArray[np.int64], kind: ShardKind, index: int, size: int, sections: tuple[int, ...]
) -> NDArray[np.int64]:
    """A shard as the model cuts it."""
    return slice_weight(torch.from_numpy(whole), kind, index, size, sections).numpy()


def place(shard: NDArray[np.int64], cut: Cut | None) -> Place:
    return Place("w", shard.shape, 0, cut, sharded=cut is not None)


@given(
    kind=st.sampled_from(["column", "row"]),
    heights=st.lists(st.integers(1, 2), min_size=1, max_size=3),
    columns=st.integers(1, 2),
    saved=st.sampled_from([1, 2, 3, 4]),
    wanted=st.sampled_from([1, 2, 3, 4]),
    window=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_rows_of_a_shard_are_put_together_from_any_other_shards(
    kind: ShardKind,
    heights: list[int],
    columns: int,
    saved: int,
    wanted: int,
    window: tuple[float, float],
) -> None:
    sections = tuple(UNIT * h for h in heights) if kind == "column" else ()
    rows = UNIT * sum(heights)
    whole = np.arange(rows * columns * UNIT).reshape(rows, columns * UNIT)

    def shard(index: int, size: int) -> tuple[NDArray[np.int64], Place]:
        if size == 1:
            return whole, place(whole, None)
        cut = Cut(kind, index, size, sections)
        values = part(whole, kind, index, size, sections)
        return values, place(values, cut)

    for index in range(wanted):
        expected, mine = shard(index, wanted)
        first, last = sorted(round(x * mine.rows) for x in window)
        found = np.full_like(expected, -1)
        written = np.zeros_like(expected)
        for other in range(saved):
            values, theirs = shard(other, saved)
            for c in copies(mine, theirs, first, last):
                into = np.s_[c.row : c.row + c.rows, c.column : c.column + c.columns]
                found[into] = values[
                    c.source_row : c.source_row + c.rows,
                    c.source_column : c.source_column + c.columns,
                ]
                written[into] += 1
        assert (written[first:last] == 1).all()
        assert not written[:first].any() and not written[last:].any()
        assert (found[first:last] == expected[first:last]).all()


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    parts=st.integers(1, 5),
    padding=st.integers(0, 3),
)
def test_partitions_of_a_flat_buffer_hold_each_master_once(
    sizes: list[int], parts: int, padding: int
) -> None:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    places = tuple(
        Place(f"p{i}", (n,), s) for i, (n, s) in enumerate(zip(sizes, starts, strict=True))
    )
    numel = -(-sum(sizes) // parts) + padding
    groups = [Group("matrices", places, numel, part, parts) for part in range(parts)]
    flat = np.arange(numel * parts)
    masters = flat.reshape(parts, numel)
    for p in places:
        held = [owned(group, p) for group in groups]
        assert sum(end - begin for begin, end in held) == p.numel
        for group in groups:
            pieces = list(fragments(group, p, 0, p.numel))
            found = [
                masters[f.replica or 0, f.at : f.at + f.numel] for f in pieces if f.replica != -1
            ]
            assert (np.concatenate(found) == flat[p.start : p.start + p.numel]).all()
            assert [f.begin for f in pieces] == list(
                np.cumsum([0, *(f.numel for f in pieces[:-1])])
            )


def test_matrices_of_other_sizes_are_refused_with_both() -> None:
    with pytest.raises(LayoutError, match=r"w is \[4, 3\] in the saved state, \[8, 3\] here"):
        list(copies(Place("w", (8, 3), 0), Place("w", (4, 3), 0), 0, 8))


def test_a_part_of_which_nobody_knows_how_it_was_cut_goes_to_the_same_part_alone() -> None:
    mine = Place("w", (4, 3), 0, None, sharded=True)
    assert list(shards_to_read(mine, mine, 1, 2, 2)) == [1]
    for target in (mine, Place("w", (8, 3), 0)):
        with pytest.raises(LayoutError, match="the model doesn't say how"):
            shards_to_read(target, mine, 0, 1, 2)


def test_what_every_tensor_rank_has_whole_is_read_once() -> None:
    norm = Place("norm.weight", (3,), 0)
    assert [list(shards_to_read(norm, norm, i, 4, 2)) for i in range(4)] == [[0], [1], [0], [1]]
    cut = Place("w", (4, 3), 0, Cut("row", 0, 2), sharded=True)
    assert list(shards_to_read(Place("w", (4, 6), 0), cut, 0, 1, 2)) == [0, 1]


def test_a_layout_survives_json() -> None:
    places = (
        Place("a.weight", (4, 3), 0, Cut("column", 1, 2, (4, 4)), sharded=True),
        Place("norm.weight", (3,), 12),
    )
    layout = RankLayout(
        (2, 3, 2), (1, 2, 1), 4, (Group("matrices", places, 8, 2, 3),), ("layers.0.mlp.down",)
    )
    assert RankLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    assert layout.ranks == 12 and layout.rank_at(1, 2, 1) == 11
