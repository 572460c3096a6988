"""A rank's state as one block of bytes: packed, checked, copied back to the bit.

A state is packed in the safetensors format: a header (names, dtypes, shapes, and our JSON
under ``__metadata__``), padded to a fixed size, then all tensors without gaps. The same
bytes lie in the ring, in the keeper and on disk. Promises: no pickle; a copy is checked
against its digest before use; nothing is loaded from one that doesn't fit.

Taking a snapshot costs the training step one copy of memory: header, digest and shipping
belong to ``launch.shipping``, in another thread.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Payload = bytes | bytearray | memoryview | NDArray[np.uint8]
META_KEY = "octavo"
_META_SLACK = 64 * 1024  # the skip ledger grows: about 8,000 batches fit
_ALIGN = 4096

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "I64": torch.int64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "U8": torch.uint8,
    "I8": torch.int8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class SnapshotError(RuntimeError):
    """A copy of a rank's state can't be used; names the rank, the step and the tier."""

    def __init__(self, rank: int, step: int, tier: str, detail: str) -> None:
        super().__init__(f"rank {rank}: copy of step {step} in tier {tier}: {detail}")
        self.rank, self.step, self.tier, self.detail = rank, step, tier, detail

    def __reduce__(self) -> tuple[type[SnapshotError], tuple[int, int, str, str]]:
        return (type(self), (self.rank, self.step, self.tier, self.detail))


class DamagedSnapshotError(SnapshotError):
    """The bytes aren't those that were written: a digest, a size or the header is wrong."""


class MissingSnapshotError(SnapshotError):
    """Nobody holds that step."""


class MismatchedSnapshotError(SnapshotError):
    """The copy is of another model, layout or optimizer than this rank has now."""


@dataclass(frozen=True, slots=True)
class SnapshotKey:
    """Which state a copy is of: before ``step``, in that timeline of that attempt."""

    job: str
    attempt: int
    timeline: int
    rank: int
    step: int

    @property
    def branch(self) -> tuple[int, int]:
        """(attempt, timeline): grows by every restart and rollback."""
        return (self.attempt, self.timeline)

    def order(self) -> tuple[int, int, int]:
        """Sort key from oldest to newest."""
        return (self.attempt, self.timeline, self.step)


@dataclass(frozen=True, slots=True)
class StoredSnapshot:
    """A packed state with the digest it was sent with."""

    payload: Payload
    digest: str


class SnapshotStore(Protocol):
    """Where ranks put copies of their state outside their own process."""

    def put(self, key: SnapshotKey, payload: Payload, digest: str) -> None:
        """Blocks until a copy is held and checked; raises when it isn't."""

    def get(self, key: SnapshotKey) -> StoredSnapshot | None:
        """The copy, or None."""


def digest_of(payload: Payload) -> str:
    """BLAKE2b-256 of the bytes, hex."""
    flat = np.frombuffer(payload, dtype=np.uint8)
    return hashlib.blake2b(flat.data, digest_size=32).hexdigest()


def refuse_damaged(snapshot: StoredSnapshot, rank: int, step: int, tier: str) -> None:
    """Raise DamagedSnapshotError unless the payload has its digest."""
    found = digest_of(snapshot.payload)
    if found != snapshot.digest:
        raise DamagedSnapshotError(
            rank, step, tier, f"digest is {found[:12]}…, {snapshot.digest[:12]}… was written"
        )


class StateLayout:
    """Where each tensor of a state lies in its block; the same for every snapshot of a rank."""

    def __init__(self, tensors: Mapping[str, Tensor], meta_bytes: int = 0) -> None:
        # Widest dtypes first: every tensor is aligned without gaps, which the format forbids.
        self.names = tuple(sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)))
        self.entries: dict[str, dict[str, Any]] = {}
        end = 0
        for name in self.names:
            tensor = tensors[name]
            begin, end = end, end + tensor.numel() * tensor.itemsize
            self.entries[name] = {
                "dtype": _DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
        wanted = len(json.dumps(self.entries)) + 2 * meta_bytes + _META_SLACK
        self.data_start = -(-(8 + wanted) // _ALIGN) * _ALIGN
        self.nbytes = self.data_start + end

    def views(self, block: Tensor) -> dict[str, Tensor]:
        """The tensors inside ``block`` (uint8 [nbytes]), by name, sharing its memory."""
        return _views(block[self.data_start :], self.entries)

    def header(self, meta: Mapping[str, Any]) -> bytes:
        """``data_start`` bytes; ValueError when ``meta`` has outgrown them."""
        described = {"__metadata__": {META_KEY: json.dumps(meta)}, **self.entries}
        text = json.dumps(described).encode()
        room = self.data_start - 8
        if len(text) > room:
            raise ValueError(f"the state's description has {len(text)} bytes, {room} fit")
        return room.to_bytes(8, "little") + text.ljust(room)


def _views(data: Tensor, entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    found = {}
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        found[name] = data[begin:end].view(_DTYPES[entry["dtype"]]).view(entry["shape"])
    return found


def unpack(payload: Payload) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(meta, tensors by name) of a packed state; the tensors share the payload's memory.

    Raises ValueError when the bytes aren't such a state. Don't write to the tensors.
    """
    flat = np.frombuffer(payload, dtype=np.uint8)
    if not flat.flags.writeable:
        # torch warns of read-only memory; nothing here writes to it.
        flat = np.array(flat)
    try:
        size = int.from_bytes(flat[:8].tobytes(), "little")
        header = json.loads(flat[8 : 8 + size].tobytes())
        meta = json.loads(header.pop("__metadata__")[META_KEY])
        return meta, _views(torch.from_numpy(flat[8 + size :]), header)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"not a packed state: {error}") from error


def load_into(tensors: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Copy ``source`` into the live ``tensors``, in place; ValueError if they don't fit.

    Nothing is written unless every name, dtype and shape fits.
    """
    problems = [f"{name} is missing" for name in tensors.keys() - source.keys()]
    problems += [f"{name} is unknown" for name in source.keys() - tensors.keys()]
    for name in tensors.keys() & source.keys():
        live, copy = tensors[name], source[name]
        if live.shape != copy.shape or live.dtype != copy.dtype:
            problems.append(
                f"{name} is {copy.dtype} {list(copy.shape)}, "
                f"this rank has {live.dtype} {list(live.shape)}"
            )
    if problems:
        shown = "; ".join(sorted(problems)[:5])
        raise ValueError(f"{len(problems)} tensors don't fit: {shown}")
    names = list(tensors)
    with torch.no_grad():
        torch._foreach_copy_([tensors[n] for n in names], [source[n] for n in names])


@dataclass(slots=True)
class Slot:
    """One preallocated copy of the ring. ``key`` None: free to be overwritten."""

    block: Tensor
    """uint8 [nbytes]; the header part is written by whoever ships it."""
    views: dict[str, Tensor]
    key: SnapshotKey | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    digest: str | None = None
    """Set once the header is written and the block hashed."""
    ready: torch.cuda.Event | None = None
    """On GPU: recorded behind the copy."""
    leases: int = 0
    """Readers; the ring doesn't overwrite a slot that has any."""


class SnapshotRing:
    """The newest ``keep`` states of this rank, in its own memory.

    One slot more than ``keep`` is allocated, so that a copy never waits for the reader of
    the oldest one unless shipping is a whole ring behind. ``take`` and ``restore`` are
    called by the training thread, ``lease`` and ``release`` by any.
    """

    def __init__(self, keep: int, tensors: Mapping[str, Tensor], meta_bytes: int = 0) -> None:
        self.layout = StateLayout(tensors, meta_bytes)
        self._keep = keep
        self._tensors = dict(tensors)
        self._live = [tensors[name] for name in self.layout.names]
        self._on_gpu = any(tensor.is_cuda for tensor in self._live)
        self._free = threading.Condition()
        self._slots = []
        for _ in range(keep + 1):
            # Zeros, so that every page exists before the first step is measured.
            block = torch.zeros(self.layout.nbytes, dtype=torch.uint8, pin_memory=self._on_gpu)
            self._slots.append(Slot(block, self.layout.views(block)))

    def take(self, key: SnapshotKey, meta: dict[str, Any]) -> Slot:
        """Copy the live tensors into a slot; waits only for a slot still being read."""
        with self._free:
            slot = self._victim()
            while slot.leases:
                self._free.wait()
                slot = self._victim()
            for other in self._slots:
                if other.key is not None and other.key.step == key.step:
                    other.key = None
            slot.key, slot.meta, slot.digest = None, meta, None
        with torch.no_grad():
            copies = [slot.views[name] for name in self.layout.names]
            torch._foreach_copy_(copies, self._live, non_blocking=self._on_gpu)
        if self._on_gpu:
            slot.ready = torch.cuda.Event()
            slot.ready.record()
        with self._free:
            slot.key = key
            held = self._held()
            for oldest in held[: -self._keep]:
                oldest.key = None
        return slot

    def restore(self, step: int, rank: int) -> dict[str, Any]:
        """Copy the state of ``step`` back, drop newer ones, return its meta.

        Raises MissingSnapshotError, or DamagedSnapshotError if the copy has changed since.
        """
        with self._free:
            found = [slot for slot in self._held() if slot.key and slot.key.step == step]
            if not found:
                steps = self.steps()
                raise MissingSnapshotError(rank, step, "ring", f"the ring holds steps {steps}")
            slot = found[0]
            for other in self._held():
                if other.key is not None and other.key.step > step:
                    other.key = None
        if slot.ready is not None:
            slot.ready.synchronize()
        if slot.digest is not None:
            stored = StoredSnapshot(slot.block.numpy(), slot.digest)
            refuse_damaged(stored, rank, step, "ring")
        load_into(self._tensors, slot.views)
        return slot.meta

    def steps(self) -> list[int]:
        """Steps held, oldest first."""
        return [slot.key.step for slot in self._held() if slot.key is not None]

    def lease(self, slot: Slot) -> None:
        """Keep ``slot`` from being overwritten until ``release``."""
        with self._free:
            slot.leases += 1

    def release(self, slot: Slot) -> None:
        """End one ``lease``."""
        with self._free:
            slot.leases -= 1
            self._free.notify_all()

    def _held(self) -> list[Slot]:
        held = [slot for slot in self._slots if slot.key is not None]
        return sorted(held, key=lambda slot: slot.key.order() if slot.key else ())

    def _victim(self) -> Slot:
        """A free slot nobody reads, else a free one, else the oldest."""
        free = [slot for slot in self._slots if slot.key is None]
        if free:
            return min(free, key=lambda slot: slot.leases)
        return self._held()[0]
