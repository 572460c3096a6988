"""The actor that holds its node's snapshots, so that they outlive the ranks.

Promises: what it gives back is what was put, checked on the way in and on the way out; a
damaged payload is refused by a typed error, never stored, never returned. It holds the
newest ``keep`` snapshots of each rank; copies of a timeline that was rolled back go first.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from launch.snapshots import Payload, SnapshotKey, StoredSnapshot, refuse_damaged


class Keeper:
    """Snapshots by (job, rank, attempt, timeline, step) in this process' memory.

    Run as a Ray actor (``ray.remote(Keeper)``), one a node, which takes the node's whole
    bundle of the placement group; a plain object in tests.
    """

    def __init__(self, keep: int = 4) -> None:
        if keep < 2:
            # With one, ranks that are a snapshot apart would have no step in common.
            raise ValueError(f"keep is {keep}; at least 2 snapshots a rank are needed")
        self._keep = keep
        self._lock = threading.Lock()
        self._held: dict[tuple[str, int], dict[SnapshotKey, StoredSnapshot]] = {}

    def ping(self) -> bool:
        """True: the actor is up."""
        return True

    def put(self, key: SnapshotKey, payload: Payload, digest: str) -> None:
        """Keep a copy of ``payload``; DamagedSnapshotError if it doesn't have ``digest``."""
        # A copy of its own: the object store may free the sender's when the sender dies.
        snapshot = StoredSnapshot(np.array(np.frombuffer(payload, dtype=np.uint8)), digest)
        refuse_damaged(snapshot, key.rank, key.step, "memory")
        with self._lock:
            held = self._held.setdefault((key.job, key.rank), {})
            for other in list(held):
                if other.branch < key.branch and other.step >= key.step:
                    del held[other]
            held[key] = snapshot
            for oldest in sorted(held, key=SnapshotKey.order)[: -self._keep]:
                del held[oldest]

    def get(self, key: SnapshotKey) -> StoredSnapshot | None:
        """The snapshot, or None if it isn't held. Raises DamagedSnapshotError."""
        with self._lock:
            snapshot = self._held.get((key.job, key.rank), {}).get(key)
        if snapshot is not None:
            refuse_damaged(snapshot, key.rank, key.step, "memory")
        return snapshot

    def keys(self, job: str) -> list[SnapshotKey]:
        """All snapshots held of ``job``, oldest first."""
        with self._lock:
            found = [key for (of, _), held in self._held.items() if of == job for key in held]
        return sorted(found, key=SnapshotKey.order)

    def drop(self, job: str) -> None:
        """Forget ``job``."""
        with self._lock:
            for owner in [owner for owner in self._held if owner[0] == job]:
                del self._held[owner]


class KeeperStore:
    """A node's Keeper as the ranks see it: the calls of SnapshotStore, over Ray."""

    def __init__(self, keeper: Any, timeout_s: float = 30.0) -> None:
        self._keeper = keeper
        self._timeout_s = timeout_s

    def put(self, key: SnapshotKey, payload: Payload, digest: str) -> None:
        """Blocks until the keeper has checked its copy; raises what it raised, or Ray's errors."""
        import ray

        # Arrays go through shared memory without being pickled.
        flat = np.frombuffer(payload, dtype=np.uint8)
        ray.get(self._keeper.put.remote(key, flat, digest), timeout=self._timeout_s)

    def get(self, key: SnapshotKey) -> StoredSnapshot | None:
        """See Keeper.get; raises Ray's errors when the keeper is gone."""
        import ray

        found: StoredSnapshot | None = ray.get(
            self._keeper.get.remote(key), timeout=self._timeout_s
        )
        return found
