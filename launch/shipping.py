"""Snapshots on their way out of the rank: described, hashed, to disk, to keepers.

One thread a rank does it beside the training, and another one writes to disk. Promises: a
snapshot is leased from the ring until it has gone everywhere, so that what is hashed, sent and
written is one state; a copy that can't be made is reported and never ends the training.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from launch.background import PoliteQueue
from launch.checkpoint_writer import CheckpointWriter
from launch.commands import CopyFailed, Report, SnapshotReport
from launch.digests import digest_of
from launch.snapshot_ring import Slot, SnapshotRing
from launch.snapshots import PartnerCopies, SnapshotKey, SnapshotStore, StoreGoneError

Tier = Literal["ring", "memory", "partner", "disk"]

_STORE_PAUSE_S = 60.0
"""How long the keeper is left alone, without a word, after it failed and that was told: a hung one
must not hold up the ring."""
_GONE_PAUSE_S = 2.0
"""The same for one that has died: another one is on its way."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Shipment:
    slot: Slot
    key: SnapshotKey
    to_disk: bool
    replicated: bool
    dropped: bool = False


class Shipper:
    """The thread, its queue, and what became of the copies on disk."""

    def __init__(
        self,
        ring: SnapshotRing,
        store: SnapshotStore | None,
        job_dir: Path,
        send: Callable[[Report], None],
        partners: PartnerCopies | None = None,
    ) -> None:
        self._ring = ring
        self._store = store
        self._partners = partners
        self._store_resumes = 0.0
        self._writer = CheckpointWriter(job_dir)
        self._send = send
        self._disk_errors: dict[int, str] = {}
        self._handing_over = threading.Lock()
        self._queue = PoliteQueue[_Shipment]("shipper", self._ship)

    @property
    def behind(self) -> bool:
        """Whether a copy is still on its way to a partner node."""
        return self._partners is not None and self._partners.behind

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is still on its way to disk, or about to be."""
        # In this order: what leaves the queue is with the writer before.
        queued = any(shipment.to_disk for shipment in self._queue.pending())
        return queued or self._writer.busy

    @property
    def longest_write_s(self) -> float:
        """Seconds that the slowest of its checkpoints so far took."""
        return self._writer.longest_s

    def ship(self, slot: Slot, *, to_disk: bool, replicated: bool = False) -> None:
        """Send a snapshot just taken on its way; returns at once.

        ``replicated``: to partner nodes too, as every rank does with its copy of this step.
        """
        assert slot.key is not None
        self._ring.lease(slot)
        replicated = replicated and self._partners is not None
        self._queue.put(_Shipment(slot, slot.key, to_disk, replicated))

    def drop_after(self, step: int) -> None:
        """Give up what is queued of later steps: they were rolled back."""
        with self._handing_over:
            for shipment in self._queue.pending():
                if shipment.key.step > step:
                    shipment.dropped = True
            given_up = self._writer.drop_after(step)
        for told in given_up:
            told(RuntimeError("it was rolled back before it was written"))

    def wait(self, timeout_s: float) -> bool:
        """Wait until everything has gone out; False if it hasn't by then."""
        deadline = time.monotonic() + timeout_s
        gone = self._queue.wait(timeout_s)
        return self._writer.wait(max(0.0, deadline - time.monotonic())) and gone

    def disk_error(self, step: int) -> str | None:
        """Why the copy of ``step`` isn't on disk, if it failed."""
        return self._disk_errors.get(step)

    def close(self) -> None:
        """End the thread after the shipment it is at; the rest is given up."""
        self._queue.close()
        self._writer.close()

    def _ship(self, shipment: _Shipment) -> None:
        try:
            self._carry(shipment)
        finally:
            self._ring.release(shipment.slot)

    def _carry(self, shipment: _Shipment) -> None:
        tiers: list[tuple[Tier, Callable[[_Shipment], None]]] = [("ring", self._seal)]
        if self._store is not None and time.monotonic() >= self._store_resumes:
            tiers.append(("memory", self._to_store))
        for tier, carry in tiers:
            if shipment.dropped:
                return
            try:
                carry(shipment)
            except Exception as error:  # noqa: BLE001 - a copy less is reported, never fatal
                self._failed(shipment, tier, error)
                if tier == "ring":
                    return
            else:
                self._report(shipment, tier)
            if tier == "ring" and shipment.to_disk:
                # What is rolled back is either not with the writer, or there to be taken back.
                with self._handing_over:
                    if not shipment.dropped:
                        self._to_disk(shipment)
        if shipment.replicated and not shipment.dropped:
            self._to_partners(shipment)

    def _seal(self, shipment: _Shipment) -> None:
        """Write the header into the block and hash the whole."""
        slot = shipment.slot
        if slot.ready is not None:
            slot.ready.synchronize()
        header = self._ring.layout.header(slot.meta)
        slot.block[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        slot.digest = digest_of(slot.block.numpy())

    def _to_store(self, shipment: _Shipment) -> None:
        assert self._store is not None and shipment.slot.digest is not None
        try:
            self._store.put(
                shipment.key,
                shipment.slot.block.numpy(),
                shipment.slot.digest,
                replicated=shipment.replicated,
            )
        except Exception as error:
            gone = isinstance(error, StoreGoneError)
            self._store_resumes = time.monotonic() + (_GONE_PAUSE_S if gone else _STORE_PAUSE_S)
            raise

    def _to_partners(self, shipment: _Shipment) -> None:
        """Send a copy on its way to other nodes; what becomes of it is told later."""
        key, slot = shipment.key, shipment.slot
        digest, nbytes = slot.digest, slot.block.numel()
        assert self._partners is not None and digest is not None

        def told(error: str, partner: int) -> None:
            place = (key.attempt, key.timeline, key.rank, key.step)
            self._send(
                CopyFailed(*place, "partner", error)
                if error
                else SnapshotReport(*place, "partner", nbytes, digest, partner=partner)
            )

        self._partners.offer(key, slot.block.numpy(), digest, told)

    def _to_disk(self, shipment: _Shipment) -> None:
        """Have it written; the slot stays leased until it is."""
        slot = shipment.slot
        assert slot.digest is not None
        # The slot is overwritten, and gets another digest, only once nobody has a lease.
        digest = slot.digest

        def told(found: Path | Exception) -> None:
            try:
                if isinstance(found, Exception):
                    self._failed(shipment, "disk", found)
                else:
                    self._disk_errors.pop(shipment.key.step, None)
                    self._report(shipment, "disk", str(found))
            finally:
                self._ring.release(slot)

        self._ring.lease(slot)
        self._writer.write(shipment.key, slot.block.numpy(), digest, told)

    def _report(self, shipment: _Shipment, tier: Tier, path: str = "") -> None:
        key, slot = shipment.key, shipment.slot
        nbytes, digest = slot.block.numel(), slot.digest
        assert digest is not None
        self._send(
            SnapshotReport(
                key.attempt, key.timeline, key.rank, key.step, tier, nbytes, digest, path
            )
        )

    def _failed(self, shipment: _Shipment, tier: Tier, error: Exception) -> None:
        key = shipment.key
        if shipment.dropped:
            return
        text = f"{type(error).__name__}: {error}"
        logger.warning("step %d was not copied to tier %s: %s", key.step, tier, text)
        if shipment.to_disk and tier in ("ring", "disk"):
            self._disk_errors[key.step] = text
        self._send(CopyFailed(key.attempt, key.timeline, key.rank, key.step, tier, text))
