"""Which part of which parameter a rank's state holds, and how parts of other layouts map to it.

A parameter is looked at as a matrix [rows, columns] (a vector has one column; further dimensions
are columns). Tensor ranks hold blocks of it, data-parallel ranks of a sharded optimizer hold
ranges of a group's flat buffer. Promises: arithmetic alone, no torch; what several shards hold
of a matrix is each element of it once; a layout survives JSON unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

ShardKind = Literal["column", "row"]
"""How tensor ranks share a matrix: its outputs (rows of a weight), or its inputs (columns)."""


class LayoutError(ValueError):
    """One layout's state can't be mapped to another's; the message says which part, and why."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Part ``index`` of ``size`` of a matrix."""

    kind: ShardKind
    index: int
    size: int
    sections: tuple[int, ...] = ()
    """Heights, in the whole matrix, of blocks of rows that are divided each by itself (queries,
    keys and values); empty: one block."""


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of a matrix, and where it stands in what a rank holds of it."""

    row: int
    column: int
    rows: int
    columns: int
    local_row: int


@dataclass(frozen=True, slots=True)
class Copy:
    """A rectangle that two ranks' parts of one matrix share, in coordinates of each part."""

    row: int
    column: int
    rows: int
    columns: int
    source_row: int
    source_column: int


@dataclass(frozen=True)
class Place:
    """One parameter in a rank's state."""

    name: str
    """For people, the same on every layout: ``layers.3.mlp.down.weight``."""
    shape: tuple[int, ...]
    """Of this rank's part."""
    start: int
    """Where it begins in its group's flat buffer, in elements."""
    cut: Cut | None = None
    """None: this rank has it whole."""
    sharded: bool = False
    """Whether tensor ranks hold different parts of it; without ``cut`` nobody knows which."""

    @property
    def rows(self) -> int:
        """Of this rank's part."""
        return self.shape[0] if self.shape else 1

    @property
    def columns(self) -> int:
        """Of this rank's part; 1 for a vector."""
        return math.prod(self.shape[1:])

    @property
    def numel(self) -> int:
        """Elements of this rank's part."""
        return self.rows * self.columns

    @property
    def whole(self) -> tuple[int, int]:
        """Rows and columns of the whole matrix."""
        if self.cut is None:
            return self.rows, self.columns
        if self.cut.kind == "column":
            return self.rows * self.cut.size, self.columns
        return self.rows, self.columns * self.cut.size

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """What this rank holds, from its first row to its last."""
        rows, columns = self.whole
        cut = self.cut
        if cut is None:
            return (Block(0, 0, rows, columns, 0),)
        if cut.kind == "row":
            return (Block(0, cut.index * self.columns, rows, self.columns, 0),)
        found: list[Block] = []
        top, local = 0, 0
        for height in cut.sections or (rows,):
            part = height // cut.size
            found.append(Block(top + cut.index * part, 0, part, columns, local))
            top, local = top + height, local + part
        return tuple(found)


@dataclass(frozen=True)
class Group:
    """One flat buffer of parameters, and the part of its masters and moments that a rank has."""

    name: str
    places: tuple[Place, ...]
    numel: int
    """Elements whose masters this rank holds, padding behind the last parameter included."""
    part: int = 0
    """Which part of the flat buffer that is."""
    parts: int = 1
    """Replicas that share the masters, one part each; 1: each replica has all."""


@dataclass(frozen=True)
class RankLayout:
    """What one rank's state holds of the model."""

    degrees: tuple[int, int, int]
    """Pipeline, data, tensor."""
    coordinate: tuple[int, int, int]
    """Of this rank, in that order."""
    accumulation: int
    """Micro-batches a step, which DeepSpeed counts."""
    groups: tuple[Group, ...]
    linears: tuple[str, ...]
    """Whose scaling state it has, in the order of its columns."""

    @property
    def ranks(self) -> int:
        """Of the job."""
        return math.prod(self.degrees)

    def rank_at(self, pipe: int, data: int, tensor: int) -> int:
        """The rank at a coordinate, as ``parallel.topology.rank_at``."""
        return (pipe * self.degrees[1] + data) * self.degrees[2] + tensor

    @cached_property
    def places(self) -> Mapping[str, tuple[Group, Place]]:
        """By parameter; LayoutError where two have one name."""
        named = {place.name: (group, place) for group in self.groups for place in group.places}
        if len(named) != sum(len(group.places) for group in self.groups):
            raise LayoutError("two parameters have one name: give the model's layers names apart")
        return named

    def to_json(self) -> dict[str, Any]:
        """Plain values; ``from_json`` reads them back."""
        return {
            "degrees": list(self.degrees),
            "coordinate": list(self.coordinate),
            "accumulation": self.accumulation,
            "linears": list(self.linears),
            "groups": [
                {
                    "name": group.name,
                    "owned": [group.numel, group.part, group.parts],
                    "places": [_place_to_json(place) for place in group.places],
                }
                for group in self.groups
            ],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RankLayout:
        """Raises ValueError, KeyError or TypeError for what ``to_json`` doesn't make."""
        pipe, data, tensor = values["degrees"]
        at_pipe, at_data, at_tensor = values["coordinate"]
        return cls(
            (pipe, data, tensor),
            (at_pipe, at_data, at_tensor),
            values["accumulation"],
            tuple(
                Group(g["name"], tuple(map(_place_from_json, g["places"])), *g["owned"])
                for g in values["groups"]
            ),
            tuple(values["linears"]),
        )


def copies(target: Place, source: Place, first: int, last: int) -> Iterator[Copy]:
    """Rectangles that ``source``'s part has of ``target``'s rows [first, last).

    Raises LayoutError where the two aren't parts of one matrix.
    """
    if target.whole != source.whole:
        raise LayoutError(
            f"{target.name} is {list(source.whole)} in the saved state, {list(target.whole)} here"
        )
    for mine in target.blocks:
        top = mine.row + max(0, first - mine.local_row)
        bottom = mine.row + min(mine.rows, last - mine.local_row)
        for other in source.blocks:
            row, column = max(top, other.row), max(mine.column, other.column)
            rows = min(bottom, other.row + other.rows) - row
            columns = min(mine.column + mine.columns, other.column + other.columns) - column
            if rows > 0 and columns > 0:
                yield Copy(
                    row=mine.local_row + row - mine.row,
                    column=column - mine.column,
                    rows=rows,
                    columns=columns,
                    source_row=other.local_row + row - other.row,
                    source_column=column - other.column,
                )


def shards_to_read(target: Place, source: Place, index: int, size: int, saved: int) -> range:
    """Saved tensor ranks, of ``saved``, that hold what tensor rank ``index`` of ``size`` needs.

    Raises LayoutError for a parameter of which nobody knows how it was divided, unless it is as
    before.
    """
    unknown = any(place.sharded and place.cut is None for place in (target, source))
    if unknown and (size != saved or target.shape != source.shape):
        raise LayoutError(
            f"{target.name} is divided over tensor ranks, and the model doesn't say how: make it "
            "with the scope's linears, or keep the tensor ranks"
        )
    if source.cut is not None:
        return range(saved)
    one = index if unknown else index % saved
    return range(one, one + 1)


def owned(group: Group, place: Place) -> tuple[int, int]:
    """[begin, end) of the parameter's own elements whose masters the rank holds; may be empty."""
    begin = group.part * group.numel - place.start
    low, high = max(0, begin), min(place.numel, begin + group.numel)
    return low, max(low, high)


@dataclass(frozen=True, slots=True)
class Fragment:
    """Consecutive elements of a parameter whose masters one replica holds."""

    replica: int | None
    """None: all of them."""
    at: int
    """First element, in that replica's masters of the group."""
    begin: int
    """First element, in the parameter."""
    numel: int


def fragments(group: Group, place: Place, begin: int, end: int) -> Iterator[Fragment]:
    """Where the masters of the parameter's elements [begin, end) are, in order.

    ``group`` is that of any replica.
    """
    if group.parts == 1:
        yield Fragment(None, place.start + begin, begin, end - begin)
        return
    while begin < end:
        replica, at = divmod(place.start + begin, group.numel)
        numel = min(end - begin, group.numel - at)
        yield Fragment(replica, at, begin, numel)
        begin += numel


def _place_to_json(place: Place) -> list[Any]:
    cut = place.cut
    told = None if cut is None else [cut.kind, cut.index, cut.size, list(cut.sections)]
    return [place.name, list(place.shape), place.start, told, place.sharded]


def _place_from_json(values: list[Any]) -> Place:
    name, shape, start, cut, sharded = values
    found = None if cut is None else Cut(cut[0], cut[1], cut[2], tuple(cut[3]))
    return Place(name, tuple(shape), start, found, sharded)
