"""What the keepers of a job's nodes hold, and what each rank has to do with them.

Promises: what is told is as of when they were last asked; one that doesn't answer holds nothing,
and is told apart from one that is gone; every wait is bounded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from launch.commands import Assignment
from launch.keeper import Inventory
from launch.keeper_clients import KeeperHandles
from launch.node_calls import named_actor, names_of_actors
from launch.rank_group import Seat
from launch.replicas import partners
from launch.snapshots import SnapshotKey

Copy = tuple[int, tuple[int, int, int]]
"""A rank's state: the rank, and ``SnapshotKey.order`` of when it was."""

logger = logging.getLogger(__name__)

ANSWER_S = 10.0
"""Seconds that keepers may take to answer, all of them together."""


class HeldCopies:
    """Of one job."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._held: dict[str, Inventory] = {}
        """By keeper."""
        self._found: list[str] = []
        """Keepers that the job had as this began."""
        self.silent: tuple[str, ...] = ()
        """Keepers that may hold something, and didn't say so when they were last asked."""

    def begin(self, seats: Sequence[Seat]) -> None:
        """Note all keepers of the job that has these seats, which are numbered: it may have left
        nodes that hold its newest state before this process knew of it."""
        numbered = seats[0].keeper.rpartition("-")[0] + "-"
        names = names_of_actors(numbered)
        self._found = [name for name in names if name.removeprefix(numbered).isdigit()]

    def ask(self, keepers: Iterable[str]) -> list[SnapshotKey]:
        """What these hold now, and those that there were, each copy once."""
        import ray

        asked = {}
        for name in dict.fromkeys([*keepers, *self._found]):
            keeper = named_actor(name)
            if keeper is not None:
                asked[keeper.inventory.remote(self._job)] = name
        if asked:
            ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)
        self._held = {}
        silent = []
        for reference, name in asked.items():
            try:
                self._held[name] = ray.get(reference, timeout=0)
            except ray.exceptions.RayError as error:
                logger.warning("keeper %s does not answer: %s", name, error)
                if not isinstance(error, ray.exceptions.ActorDiedError):
                    silent.append(name)
        self.silent = tuple(silent)
        return list(dict.fromkeys(key for held in self._held.values() for key in held.nbytes))

    def memory(self) -> dict[str, int]:
        """Bytes that each keeper held, of all jobs."""
        return {name: held.total_nbytes for name, held in self._held.items()}

    def handles(
        self, seats: Sequence[Seat], assignments: Sequence[Assignment]
    ) -> list[KeeperHandles]:
        """For each rank, in order, of the seat that it has: its node's keeper, the partners that
        get copies, and whoever holds one that it may start from."""
        order = list(dict.fromkeys(seat.keeper for seat in seats))
        places = {name: place for place, name in enumerate(order)}
        keepers = {name: named_actor(name) for name in dict.fromkeys([*order, *self._held])}
        # There are as many copies as there are ranks, and a few times that: they are gone through
        # once, not by every rank.
        index = _index(self._held)
        found = []
        for seat, assignment in zip(seats, assignments, strict=True):
            replicas = assignment.run.snapshots.replicas or 0
            ring = [order[p] for p in partners(places[seat.keeper], len(order), replicas)]
            holding = _holding(index, assignment)
            # Partners first: theirs is the way that the copies came.
            others = sorted(holding.keys() - {seat.keeper}, key=lambda name: name not in ring)
            own = self._held.get(seat.keeper)
            living = [name for name in ring if keepers[name] is not None]
            found.append(
                KeeperHandles(
                    own=keepers[seat.keeper],
                    own_name=seat.keeper,
                    partners=tuple(keepers[name] for name in living),
                    partner_names=tuple(living),
                    sources=tuple(k for name in others if (k := keepers.get(name)) is not None),
                    own_is_source=seat.keeper in holding,
                    nbytes=max(holding.values(), default=0),
                    held_nbytes=own.total_nbytes if own is not None else 0,
                )
            )
        return found

    def settle(self, seats: Sequence[Seat], replicas: int) -> None:
        """Have keepers forget ranks that neither sit with them nor send them copies."""
        order = list(dict.fromkeys(seat.keeper for seat in seats))
        places = {name: place for place, name in enumerate(order)}
        theirs: dict[str, set[int]] = {name: set() for name in order}
        for rank, seat in enumerate(seats):
            place = places[seat.keeper]
            for holder in (place, *partners(place, len(order), replicas)):
                theirs[order[holder]].add(rank)
        for name, ranks in theirs.items():
            if (keeper := named_actor(name)) is not None:
                keeper.retain.remote(self._job, ranks)


def _index(held: Mapping[str, Inventory]) -> dict[Copy, dict[str, int]]:
    """Who holds what, and its bytes."""
    found: dict[Copy, dict[str, int]] = {}
    for name, inventory in held.items():
        for key, nbytes in inventory.nbytes.items():
            found.setdefault((key.rank, key.order()), {})[name] = nbytes
    return found


def _holding(index: Mapping[Copy, Mapping[str, int]], assignment: Assignment) -> dict[str, int]:
    """Keepers with a copy that this rank may start from, and the size of the largest."""
    points = [p for p in (assignment.restore, *assignment.fallbacks) if p is not None]
    found: dict[str, int] = {}
    for point in points:
        if point.tier == "memory":
            made = (point.attempt, point.timeline, point.step)
            for name, nbytes in index.get((assignment.rank, made), {}).items():
                found[name] = max(nbytes, found.get(name, 0))
    return found
