"""A rank's state out of a checkpoint, whatever degrees the ranks had that wrote it.

DeepSpeed's universal checkpoint converts its own pickles to one file a parameter, which every rank
then loads whole. Here nothing is converted: each rank's file says where in it each parameter's
part lies (``parallel.layout``), and a rank reads the slices that its own part is made of, verified,
a few rows of one matrix at a time. What becomes of each kind of state:

    BF16 parameters, FP32 masters, Adam's moments, step numbers: the same bits, elsewhere; what pads
        flat buffers is zero, as it was.
    Scales, amax histories: those of each linear; over merged shards, which as a rule say the same,
        the largest amax and the least scale.
    Precision, and who waits to return to FP8: those of each linear.
    What error feedback left over: kept where the replicas stay as many. Else it begins anew: what
        one exchange rounded off, some per cent of one step's gradient, would cost every rank a
        look into all replicas' files.
    Random generators: kept by a rank whose coordinate was there before, else seeded from the saved
        ones and the coordinate, so that replicas differ.
    Skip ledger, learning rate's factor, DeepSpeed's counters: the same; micro-steps as many as the
        new accumulation makes.

Promises: nothing is returned of which a part is missing; same degrees give the same bytes; memory
is that of the rank's own state and some tens of MiB.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launch.checkpoint_files import DamagedFileError, is_absent
from launch.checkpoint_manifest import ManifestError
from launch.checkpoints import read_rank_file
from launch.random_state import seeded_state
from launch.saved_state import SavedState
from launch.snapshots import (
    DamagedSnapshotError,
    MismatchedSnapshotError,
    MissingSnapshotError,
    UnreadSnapshotError,
)
from launch.state_block import unpack
from launch.state_header import LAYOUT
from parallel.layout import (
    Group,
    LayoutError,
    Place,
    RankLayout,
    copies,
    fragments,
    owned,
    shards_to_read,
)

MASTERS = ("masters", "exp_avg", "exp_avg_sq")
"""Tensors of a group of which a rank has its own part alone."""
_ROWS_BYTES = 32 << 20
"""Of a matrix in FP32 that are put together at once."""

State = tuple[dict[str, Any], dict[str, Tensor]]
"""Meta, and tensors by name, of one rank."""


def state_on_disk(
    path: Path | str, rank: int, step: int, layout: RankLayout, live: Mapping[str, Tensor]
) -> State:
    """This rank's state of the checkpoint ``path``; ``live`` has its tensors' names and shapes.

    The tensors are on the CPU, of the dtypes they were saved in. Raises a SnapshotError: missing,
    unread, damaged, or mismatched where no ranks of this model could have written it.
    """
    try:
        with SavedState(path) as saved:
            if saved.step != step:
                raise MissingSnapshotError(rank, step, "disk", f"{path} is of step {saved.step}")
            if saved.ranks != layout.ranks or saved.header(rank).layout != layout:
                return reshaped(saved, layout, live)
        return unpack(read_rank_file(path, rank, step).payload)
    except LayoutError as error:
        raise MismatchedSnapshotError(rank, step, "disk", f"{path}: {error}") from error
    except (DamagedFileError, ManifestError, ValueError) as error:
        raise DamagedSnapshotError(rank, step, "disk", f"{path}: {error}") from error
    except OSError as error:
        kind = MissingSnapshotError if is_absent(error) else UnreadSnapshotError
        raise kind(rank, step, "disk", f"{path}: {error}") from error


def reshaped(saved: SavedState, layout: RankLayout, live: Mapping[str, Tensor]) -> State:
    """The state of a rank of ``layout`` out of the parts that others saved.

    Raises LayoutError, DamagedFileError or OSError.
    """
    source = _Source(saved, layout)
    tensors: dict[str, Tensor] = {}
    for group in layout.groups:
        tensors |= _parameters(source, group, live)
    for name, tensor in live.items():
        if name.startswith("precision."):
            tensors[name] = torch.zeros(tensor.shape, dtype=tensor.dtype)
    _fill_scaling(source, tensors)
    tensors |= _generators(source, live)
    return _meta(source), tensors


class _Source:
    """Saved ranks, as one rank of another layout looks at them."""

    def __init__(self, saved: SavedState, layout: RankLayout) -> None:
        self.saved = saved
        self.layout = layout
        self.first = saved.header(0).layout
        pipes, self.replicas, self.shards = self.first.degrees
        if saved.ranks != self.first.ranks:
            raise LayoutError(f"{saved.ranks} files for {self.first.ranks} ranks")
        # Replicas read from different files, where there are several.
        self.replica = layout.coordinate[1] % self.replicas
        stages = [saved.header(self.first.rank_at(pipe, 0, 0)).layout for pipe in range(pipes)]
        self._stages = {
            name: pipe
            for pipe, stage in reversed(list(enumerate(stages)))
            for name in (*stage.places, *(f"linear {linear}" for linear in stage.linears))
        }

    def stage_of(self, name: str) -> int:
        """The first stage that has a parameter, or ``linear …``."""
        if name not in self._stages:
            raise LayoutError(f"the saved state has no {name}")
        return self._stages[name]

    def rank(self, pipe: int, tensor: int, replica: int | None = None) -> int:
        """Of one replica; without ``replica`` of the one that this rank reads."""
        return self.first.rank_at(pipe, self.replica if replica is None else replica, tensor)

    def place(self, name: str, tensor: int) -> tuple[int, Group, Place]:
        """The stage of a parameter, and where it lies on a tensor rank of it."""
        pipe = self.stage_of(name)
        held = self.saved.header(self.rank(pipe, tensor)).layout.places
        if name not in held:
            raise LayoutError(f"tensor rank {tensor} has saved no {name}")
        return (pipe, *held[name])


Read = Callable[[int, int, Group, Place, int, int], Tensor]
"""Stage, tensor rank, group and place there, [begin, end) of the part → those elements, flat."""


def _parameters(source: _Source, group: Group, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of one group of parameters."""
    saved = source.saved

    def whole(what: str, prefix: str = "") -> Read:
        def read(pipe: int, tensor: int, at: Group, place: Place, begin: int, end: int) -> Tensor:
            name = f"{prefix}{at.name}.{what}"
            first = place.start + begin
            return saved.slice(source.rank(pipe, tensor), name, first, first + end - begin)

        return read

    def divided(what: str) -> Read:
        def read(pipe: int, tensor: int, at: Group, place: Place, begin: int, end: int) -> Tensor:
            parts = [
                saved.slice(
                    source.rank(pipe, tensor, piece.replica),
                    f"{at.name}.{what}",
                    piece.at,
                    piece.at + piece.numel,
                )
                for piece in fragments(at, place, begin, end)
            ]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return read

    def empty(name: str) -> Tensor:
        return torch.zeros(live[name].shape, dtype=live[name].dtype)

    found: dict[str, Tensor] = {}
    name = f"{group.name}.parameters"
    found[name] = empty(name)
    for place in group.places:
        _fill(source, place, 0, place.numel, found[name], place.start, whole("parameters"))
    for what in MASTERS:
        name = f"{group.name}.{what}"
        found[name] = empty(name)
        for place in group.places:
            begin, end = owned(group, place)
            at = place.start + begin - group.part * group.numel
            _fill(source, place, begin, end, found[name], at, divided(what))
    pipe, first, _ = source.place(group.places[0].name, 0)
    step = f"{group.name}.step"
    found[step] = saved.tensor(source.rank(pipe, 0), f"{first.name}.step").to(live[step].dtype)
    name = f"exchange.{group.name}.residual"
    if name in live:
        found[name] = empty(name)
        if source.replicas == source.layout.degrees[1]:
            _fill_residual(source, group, found[name], whole("residual", "exchange."))
    return found


def _fill_residual(source: _Source, group: Group, into: Tensor, read: Read) -> None:
    """What error feedback left over, of those parameters for which any was saved."""
    for place in group.places:
        pipe, at, _ = source.place(place.name, 0)
        if source.saved.has(source.rank(pipe, 0), f"exchange.{at.name}.residual"):
            _fill(source, place, 0, place.numel, into, place.start, read)


def _fill(
    source: _Source, place: Place, begin: int, end: int, into: Tensor, at: int, read: Read
) -> None:
    """Elements [begin, end) of this rank's part of a parameter to ``into`` from ``at`` on."""
    if begin == end:
        return
    columns = place.columns
    index, size = source.layout.coordinate[2], source.layout.degrees[2]
    _, _, sample = source.place(place.name, 0)
    shards = shards_to_read(place, sample, index, size, source.shards)
    held = [(shard, source.place(place.name, shard)) for shard in shards]
    for first, last in _row_ranges(place, begin // columns, -(-end // columns)):
        rows = torch.empty(last - first, columns, dtype=into.dtype)
        found = 0
        for shard, (pipe, group, saved) in held:
            for copy in copies(place, saved, first, last):
                top = copy.source_row * saved.columns
                bottom = top + copy.rows * saved.columns
                part = read(pipe, shard, group, saved, top, bottom)
                part = part.view(copy.rows, saved.columns)
                top = copy.row - first
                rows[top : top + copy.rows, copy.column : copy.column + copy.columns] = part[
                    :, copy.source_column : copy.source_column + copy.columns
                ]
                found += copy.rows * copy.columns
        if found != rows.numel():
            raise LayoutError(f"the saved state has {found} of {rows.numel()} of {place.name}")
        low, high = max(begin, first * columns), min(end, last * columns)
        into[at + low - begin : at + high - begin] = rows.view(-1)[
            low - first * columns : high - first * columns
        ]


def _row_ranges(place: Place, first: int, last: int) -> Iterator[tuple[int, int]]:
    step = max(1, _ROWS_BYTES // (4 * place.whole[1]))
    for row in range(first, last, step):
        yield row, min(last, row + step)


_MERGED: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "amax_history": torch.maximum,
    "scale": torch.minimum,
    "calibrated": torch.logical_and,
}
"""How what tensor ranks say of one linear becomes one: under the least scale nothing of either
saturates. As a rule they say the same, since amax is reduced over them."""


def _fill_scaling(source: _Source, tensors: Mapping[str, Tensor]) -> None:
    """Scales and histories of the linears, from any tensor ranks' copies of them."""
    saved, linears = source.saved, source.layout.linears
    for name, into in tensors.items():
        if not name.startswith("precision."):
            continue
        linear, _, what = name.removeprefix("precision.").rpartition("/")
        if linear:  # a tensor of its own for each linear
            into.copy_(_merged(source, source.stage_of(f"linear {linear}"), name, what))
            continue
        columns = into.shape[-1] // len(linears)
        for pipe in sorted({source.stage_of(f"linear {one}") for one in linears}):
            theirs = saved.header(source.rank(pipe, 0)).layout.linears
            found = _merged(source, pipe, name, what)
            if found.shape[:-1] != into.shape[:-1]:
                raise LayoutError(
                    f"{name} is {list(found.shape)} in the saved state, {list(into.shape)} here"
                )
            for mine, one in enumerate(linears):
                if source.stage_of(f"linear {one}") == pipe:
                    at = theirs.index(one)
                    into[..., mine * columns : (mine + 1) * columns] = found[
                        ..., at * columns : (at + 1) * columns
                    ]


def _merged(source: _Source, pipe: int, name: str, what: str) -> Tensor:
    """A tensor of scaling state over all saved tensor ranks of a stage."""
    merge = next(how for word, how in _MERGED.items() if what.endswith(word))
    found = source.saved.tensor(source.rank(pipe, 0), name)
    for shard in range(1, source.shards):
        found = merge(found, source.saved.tensor(source.rank(pipe, shard), name))
    return found


def _generators(source: _Source, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Random generators: this coordinate's own, or new ones that follow from what was saved."""
    saved, layout = source.saved, source.layout
    coordinate = layout.coordinate
    here = all(at < size for at, size in zip(coordinate, source.first.degrees, strict=True))
    rank = source.first.rank_at(*coordinate) if here else 0
    basis = saved.tensor(0, "rng.torch").numpy().tobytes() + repr(coordinate).encode()
    fresh = seeded_state(int.from_bytes(hashlib.blake2b(basis, digest_size=8).digest(), "big"))
    return {
        name: saved.tensor(rank, name) if here and saved.has(rank, name) else fresh[name]
        for name in live
        if name.startswith("rng.")
    }


def _meta(source: _Source) -> dict[str, Any]:
    """The rest of the state, with the precision of this rank's linears."""
    meta = dict(source.saved.header(0).meta)
    engine = dict(meta["engine"])
    counters = dict(engine["counters"])
    steps = counters["micro_steps"] // source.first.accumulation
    counters["micro_steps"] = steps * source.layout.accumulation
    precision: dict[str, str] = {}
    unwarmed: dict[str, int] = {}
    returning: set[str] = set()
    for pipe in {source.stage_of(f"linear {one}") for one in source.layout.linears}:
        theirs = source.saved.header(source.rank(pipe, 0)).meta["engine"]["precision"]
        precision |= theirs["precision"]
        unwarmed |= theirs.get("unwarmed", {})
        returning |= set(theirs.get("returning", ()))
    mine = source.layout.linears
    told: dict[str, Any] = {"precision": {name: precision[name] for name in mine}}
    if cold := {name: steps for name, steps in unwarmed.items() if name in mine}:
        told |= {"unwarmed": cold, "returning": sorted(returning.intersection(mine))}
    return {
        **meta,
        LAYOUT: source.layout.to_json(),
        "engine": {**engine, "counters": counters, "precision": told},
    }
