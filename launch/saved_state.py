"""The files of one checkpoint as named tensors, read in part.

Promises: nothing is returned that doesn't match its digest; a few files are open at a time, and
of each no more is in memory than what was asked for and some chunks around it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from launch.checkpoint_files import DamagedFileError, RankFileReader
from launch.checkpoint_manifest import read_manifest
from launch.state_block import dtype_of
from launch.state_header import LAYOUT, parse_header
from parallel.layout import LayoutError, RankLayout

_OPEN = 8
"""Files open at once."""


@dataclass(frozen=True, slots=True)
class Header:
    """What a rank's file says of itself."""

    start: int
    """Where its tensors begin, in bytes."""
    meta: Mapping[str, Any]
    entries: Mapping[str, Mapping[str, Any]]
    layout: RankLayout


class SavedState:
    """A committed checkpoint, open for reading; a context manager."""

    def __init__(self, folder: Path | str) -> None:
        """Raises OSError or ``checkpoints.ManifestError``."""
        self._checkpoint = read_manifest(folder)
        self._readers: OrderedDict[int, RankFileReader] = OrderedDict()
        self._headers: dict[int, Header] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for reader in self._readers.values():
            reader.close()

    @property
    def ranks(self) -> int:
        """That wrote it."""
        return len(self._checkpoint.files)

    @property
    def step(self) -> int:
        """That it is the state before."""
        return self._checkpoint.step

    def header(self, rank: int) -> Header:
        """Of one rank's file. Raises OSError, DamagedFileError or LayoutError."""
        if rank not in self._headers:
            reader = self._reader(rank)
            size = int.from_bytes(reader.read(0, 8).tobytes(), "little")
            try:
                meta, entries = parse_header(reader.read(8, 8 + size).tobytes())
                layout = RankLayout.from_json(meta[LAYOUT])
                step, owner = meta["step"], layout.rank_at(*layout.coordinate)
            except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
                raise LayoutError(f"rank {rank}'s file doesn't say what it holds") from error
            if (step, owner) != (self.step, rank):
                # All digests are right: somebody has written the manifest anew.
                raise DamagedFileError(
                    f"the file of rank {rank} and step {self.step} holds rank {owner}'s state of "
                    f"step {step}"
                )
            self._headers[rank] = Header(8 + size, meta, entries, layout)
        return self._headers[rank]

    def tensor(self, rank: int, name: str) -> Tensor:
        """A whole tensor of one rank, in its shape. Raises as ``slice``."""
        shape = self._entry(rank, name)["shape"]
        return self.slice(rank, name, 0, torch.Size(shape).numel()).view(shape)

    def slice(self, rank: int, name: str, begin: int, end: int) -> Tensor:
        """Elements [begin, end) of one rank's tensor, flat, a copy.

        Raises OSError or DamagedFileError, and LayoutError for a tensor that isn't there.
        """
        entry = self._entry(rank, name)
        dtype = dtype_of(entry)
        first, last = (self.header(rank).start + at for at in entry["data_offsets"])
        wanted = (first + begin * dtype.itemsize, first + end * dtype.itemsize)
        if not first <= wanted[0] <= wanted[1] <= last:
            raise LayoutError(f"{name} of rank {rank} has no elements {begin} to {end}")
        return torch.from_numpy(self._reader(rank).read(*wanted)).view(dtype)

    def has(self, rank: int, name: str) -> bool:
        """Whether a rank's state has that tensor."""
        return name in self.header(rank).entries

    def _entry(self, rank: int, name: str) -> Mapping[str, Any]:
        entries = self.header(rank).entries
        if name not in entries:
            raise LayoutError(f"the saved state of rank {rank} has no {name}")
        return entries[name]

    def _reader(self, rank: int) -> RankFileReader:
        if rank in self._readers:
            self._readers.move_to_end(rank)
        else:
            if rank not in self._checkpoint.files:
                raise LayoutError(f"there is no file of rank {rank}")
            folder, file = self._checkpoint.path, self._checkpoint.files[rank]
            self._readers[rank] = RankFileReader(folder, file)
            if len(self._readers) > _OPEN:
                self._readers.popitem(last=False)[1].close()
        return self._readers[rank]
