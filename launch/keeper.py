"""The actor that holds a node's snapshots, and its partners', so that they outlive the ranks.

Promises: what it gives back is what was put, checked on the way in and on the way out; a
damaged payload is refused by a typed error, never stored, never returned. It holds at most
``most_held`` snapshots of each rank: the newest, among them the newest two that every rank
sent to a partner too, for a node that is lost takes all others' steps with it. Copies of a
timeline that was rolled back go first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from launch.checkpoints import write_rank_file
from launch.digests import Payload
from launch.process_end import Enlisted
from launch.snapshots import (
    MismatchedSnapshotError,
    MissingSnapshotError,
    SnapshotKey,
    StoredSnapshot,
    refuse_damaged,
)
from launch.state_header import ranks_of

Result = TypeVar("Result")

ASKED = "asked"
"""Ray's concurrency group of what is asked of a keeper."""
WATCHED = "watched"
"""The same of calls that last as long as the keeper does."""
REPLICATED_KEPT = 2
"""The newest step on partners may still be on its way there; the one before it is whole."""


def most_held(keep: int) -> int:
    """Snapshots that a keeper holds of one rank at most: two on partners, and the newest."""
    return max(keep, REPLICATED_KEPT + 1)


@dataclass(frozen=True, slots=True)
class Inventory:
    """What a keeper holds of one job."""

    nbytes: dict[SnapshotKey, int]
    """Size of each snapshot, oldest first."""
    total_nbytes: int
    """Memory that its snapshots take, of all jobs."""
    worlds: dict[SnapshotKey, int] = field(default_factory=dict)
    """Ranks of the job that each snapshot is a part of; 0 where it doesn't say."""


class Keeper:
    """Snapshots by (job, rank, attempt, timeline, step) in this process' memory.

    Run as a Ray actor (``keeper_class``), one a node, which takes the node's whole bundle of
    the placement group; a plain object in tests.
    """

    def __init__(self, keep: int = 4, name: str = "") -> None:
        """``name``: of the actor; one that takes its place knows the node's ranks by it."""
        if keep < 2:
            # With one, ranks that are a snapshot apart would have no step in common.
            raise ValueError(f"keep is {keep}; at least 2 snapshots a rank are needed")
        self._keep = keep
        self._lock = threading.Lock()
        self._held: dict[tuple[str, int], dict[SnapshotKey, StoredSnapshot]] = {}
        self._replicated: set[SnapshotKey] = set()
        self._worlds: dict[SnapshotKey, int] = {}
        self._ranks = Enlisted(name)

    def ping(self) -> bool:
        """True: the actor is up."""
        return True

    def call(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Run a function of ours on this node: this process is there at once."""
        return function(*arguments)

    def enlist(self, pids: Sequence[int]) -> None:
        """Remember the processes of the node's ranks, in place of those before them."""
        self._ranks.replace(pids)

    def end_ranks(self) -> list[int]:
        """End by force those that still run, as frozen ones do; which of them don't end."""
        return self._ranks.end()

    def put(
        self, key: SnapshotKey, payload: Payload, digest: str, *, replicated: bool = False
    ) -> None:
        """Keep a copy of ``payload``; DamagedSnapshotError if it doesn't have ``digest``.

        ``replicated``: every rank's copy of this step goes to a partner node too.
        """
        # A copy of its own: the object store may free the sender's when the sender dies.
        snapshot = StoredSnapshot(np.array(np.frombuffer(payload, dtype=np.uint8)), digest)
        refuse_damaged(snapshot, key.rank, key.step, "memory")
        world = ranks_of(snapshot.payload)
        with self._lock:
            held = self._held.setdefault((key.job, key.rank), {})
            for other in list(held):
                if _given_up(other, key):
                    self._forget(held, other)
            held[key] = snapshot
            self._worlds[key] = world
            if replicated:
                self._replicated.add(key)
            for surplus in self._surplus(held):
                self._forget(held, surplus)

    def get(self, key: SnapshotKey) -> StoredSnapshot | None:
        """The snapshot, or None if it isn't held. Raises DamagedSnapshotError."""
        with self._lock:
            snapshot = self._held.get((key.job, key.rank), {}).get(key)
        if snapshot is not None:
            refuse_damaged(snapshot, key.rank, key.step, "memory")
        return snapshot

    def write(
        self, key: SnapshotKey, job_dir: Path, attempt: int, timeline: int, world_size: int
    ) -> None:
        """Write a held snapshot as a rank's file of a checkpoint that ``attempt`` makes.

        Raises what ``get`` and ``launch.checkpoints.write_rank_file`` do, MissingSnapshotError,
        and MismatchedSnapshotError for the state of a rank of other than ``world_size`` ranks.
        """
        snapshot = self.get(key)
        if snapshot is None:
            raise MissingSnapshotError(key.rank, key.step, "memory", "the keeper doesn't hold it")
        if ranks_of(snapshot.payload) != world_size:
            why = "it is of ranks of other degrees"
            raise MismatchedSnapshotError(key.rank, key.step, "memory", why)
        mine = replace(key, attempt=attempt, timeline=timeline)
        write_rank_file(job_dir, mine, snapshot.payload, snapshot.digest)

    def keys(self, job: str) -> list[SnapshotKey]:
        """All snapshots held of ``job``, oldest first."""
        return list(self.inventory(job).nbytes)

    def inventory(self, job: str) -> Inventory:
        """What is held of ``job``, and how much memory all that is held takes."""
        with self._lock:
            sizes = {k: len(s.payload) for held in self._held.values() for k, s in held.items()}
            worlds = {key: world for key, world in self._worlds.items() if key.job == job}
        mine = sorted((key for key in sizes if key.job == job), key=SnapshotKey.order)
        return Inventory({key: sizes[key] for key in mine}, sum(sizes.values()), worlds)

    def retain(self, job: str, ranks: Collection[int]) -> None:
        """Forget other ranks of ``job``: after a change of nodes they are somebody else's."""
        with self._lock:
            for owner in [o for o in self._held if o[0] == job and o[1] not in ranks]:
                for key in self._held.pop(owner):
                    self._replicated.discard(key)
                    del self._worlds[key]

    def drop(self, job: str) -> None:
        """Forget ``job``."""
        self.retain(job, ())

    def _surplus(self, held: dict[SnapshotKey, StoredSnapshot]) -> list[SnapshotKey]:
        """What goes, of one rank's snapshots."""
        ordered = sorted(held, key=SnapshotKey.order)
        staying = {ordered[-1]}
        staying.update([key for key in ordered if key in self._replicated][-REPLICATED_KEPT:])
        for key in reversed(ordered):
            if len(staying) >= self._keep:
                break
            staying.add(key)
        return [key for key in ordered if key not in staying]

    def _forget(self, held: dict[SnapshotKey, StoredSnapshot], key: SnapshotKey) -> None:
        del held[key], self._worlds[key]
        self._replicated.discard(key)


@cache
def keeper_class() -> Any:
    """``Keeper`` for Ray. Who asks what it holds, or whether it is there, has threads of his own:
    the puts of all ranks of a node and of its partner, seconds each where states are large, take
    all others, and a keeper that is late to answer counts as one that holds nothing. Who wants to
    know at once when it has ended calls ``stay``."""
    import ray

    of_their_own = ray.method(concurrency_group=ASKED)
    lasting = ray.method(concurrency_group=WATCHED)

    class OnRay(Keeper):
        @of_their_own
        def ping(self) -> bool:
            return super().ping()

        @of_their_own
        def inventory(self, job: str) -> Inventory:
            return super().inventory(job)

        @lasting
        def stay(self) -> None:
            """Never returns: Ray tells whoever called it, in the queue or not, of our end."""
            threading.Event().wait()

    # Its processes are known by their titles.
    OnRay.__name__, OnRay.__qualname__ = Keeper.__name__, Keeper.__qualname__
    return ray.remote(concurrency_groups={ASKED: 2, WATCHED: 1})(OnRay)


def _given_up(older: SnapshotKey, newer: SnapshotKey) -> bool:
    """Whether ``newer`` shows that training went back to before ``older``.

    The step that an attempt starts from is the same state as in the attempt before.
    """
    if older.attempt < newer.attempt:
        return older.step > newer.step
    return older.branch < newer.branch and older.step >= newer.step
