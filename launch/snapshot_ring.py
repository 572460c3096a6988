"""The newest states of a rank in its own memory, for rollbacks in place.

Promises: taking a snapshot costs the training step one copy of memory into preallocated
blocks; header, digest and shipping belong to ``launch.shipping``, in another thread. A
block is never overwritten while somebody reads it. What comes back is equal to the bit.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from launch.snapshots import (
    MissingSnapshotError,
    SnapshotKey,
    StoredSnapshot,
    refuse_damaged,
)
from launch.state_block import StateLayout, load_into


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
        """A free slot nobody reads, else the oldest held one of which that is true.

        A disk that takes longer than the ring goes round costs one snapshot in memory, and no
        wait, as long as ``keep`` - 1 are left, which is what ranks are sent back to
        (``orchestrator.saved.snapshot_book``); else whichever is read the least.
        """
        free = [slot for slot in self._slots if slot.key is None]
        held = self._held()
        unread = [slot for slot in (*free, *held) if not slot.leases]
        if unread and (unread[0].key is None or len(held) >= self._keep):
            return unread[0]
        return min(free, key=lambda slot: slot.leases) if free else held[0]
