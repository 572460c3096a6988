"""The nodes that jobs hold, on Ray: one placement group and one keeper a node.

Each seat of a group is a placement group of one bundle that is pinned to its node, so that a node
can be replaced, or a spare added, while the others stay where they are; which node it is, is
decided by ``orchestrator.placement``. The bundle is held by a keeper, so that ranks need no
resources of their own and a restart can't lose its place to another job.

Promises: seats are taken all or none; what a controller took before it died, and no record knows,
is removed before it is in the way; every wait is bounded.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from launch.keeper import Inventory, keeper_class
from launch.rank_errors import in_one_line
from launch.snapshots import SnapshotKey
from orchestrator.node_slot import NodeSlot
from orchestrator.placement.placement import NodeCapacity, Resource
from orchestrator.protocol import NAMESPACE, keeper_actor

logger = logging.getLogger(__name__)

GRANT_TIMEOUT_S = 5.0
"""Seconds in which Ray reserves seats that fit, of all together; it takes milliseconds."""
PING_S = 3.0
"""Seconds that the keepers of a group may take to answer."""
AGAIN_S = 0.2
"""Seconds after which one that couldn't be reached is asked again."""
STARTING_S = 60.0
"""Seconds that a keeper may take to start on an overworked node."""


@dataclass(eq=False)
class _Watch:
    """A keeper whose end is told by Ray: no look asks all of them."""

    over: bool = False
    """Nothing more will be told of it."""
    died: bool = False
    call: Any = None
    """The reference that Ray settles then."""


@dataclass(frozen=True, slots=True)
class DiskOrder:
    """Copies of all ranks of one step, that are to become files of a checkpoint."""

    job_dir: Path
    attempt: int
    """Whose checkpoint it is to be."""
    timeline: int
    keys: Mapping[int, Sequence[SnapshotKey]]
    """By seat, of which each rank's copy is the one to write."""
    world_size: int
    timeout_s: float


class NodeGroups(Protocol):
    """Where nodes come from."""

    def capacities(self) -> list[NodeCapacity]:
        """Living nodes."""

    def take(
        self, job: str, seats: Sequence[NodeSlot], resource: Resource, keep: int
    ) -> list[NodeSlot]:
        """Hold all of ``seats``, each with a keeper of ``keep`` snapshots a rank; or none of
        them, and the ones that weren't granted."""

    def lost(self, job: str, seats: Sequence[NodeSlot], resource: Resource, keep: int) -> set[int]:
        """Numbers of held seats that can't be used any more; those whose keeper or placement is
        gone from a node that lives are made anew there."""

    def keepers_ended(self, job: str, seats: Sequence[NodeSlot]) -> list[NodeSlot]:
        """Seats whose keeper is known to have ended; asks and waits for none that is known."""

    def revive(
        self, job: str, seats: Sequence[NodeSlot], resource: Resource, keep: int
    ) -> list[NodeSlot]:
        """Start keepers anew that ended, where their nodes live; of which seats."""

    def give_back(self, job: str, seats: Sequence[NodeSlot]) -> None:
        """End these seats' keepers and give their nodes back; what is gone is no error."""

    def release(self, job: str) -> None:
        """Give back all that the job holds, whether a record knows it or not."""

    def seats_held(self) -> dict[str, set[int]]:
        """Numbers of the seats that are held, by job, whether a record knows them or not."""

    def copies(self, job: str) -> dict[int, Inventory]:
        """What the keeper of each seat holds, whether a record knows the seat or not; those that
        don't answer are left out."""

    def silent(self, job: str) -> set[int]:
        """Seats whose keeper may hold something and did not answer when ``copies`` last asked."""

    def write_copies(self, order: DiskOrder) -> dict[int, str]:
        """Have keepers write what they hold; why not, by rank, of those that could not."""

    def wish(self, shapes: Sequence[dict[str, float]]) -> None:
        """Ask the cluster's autoscaler to make room for these at once; none: for nothing more."""


def group_name(job: str) -> str:
    """What the names of the job's placement groups begin with."""
    return f"octavo-{job}"


class RayNodeGroups:
    """Groups on the Ray cluster that this process belongs to."""

    def __init__(self) -> None:
        self._started: dict[str, float] = {}
        """When this process started a keeper: one that is young is not lost for being silent."""
        self._watches: dict[str, _Watch] = {}
        """Of keepers of jobs that train, by name."""
        self._unheard: dict[str, set[int]] = {}
        """Seats by job, of those whose keepers were asked what they hold."""

    def capacities(self) -> list[NodeCapacity]:
        import ray
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        return [
            NodeCapacity(
                n["NodeID"],
                dict(n["Resources"]),
                dict(free.get(n["NodeID"], {})),
                n["NodeManagerAddress"],
                n["NodeManagerHostname"],
            )
            for n in ray.nodes()
            if n["Alive"]
        ]

    def take(
        self, job: str, seats: Sequence[NodeSlot], resource: Resource, keep: int
    ) -> list[NodeSlot]:
        from ray.util import placement_group

        self.give_back(job, seats)
        deadline = time.monotonic() + GRANT_TIMEOUT_S
        groups = {
            seat: placement_group(
                [{resource: seat.slots}],
                name=_seat_name(job, seat.bundle),
                # It must outlive a controller that restarts.
                lifetime="detached",
                bundle_label_selector=[{"ray.io/node-id": seat.node_id}],
            )
            for seat in seats
        }
        refused = [
            seat
            for seat, group in groups.items()
            if not group.wait(max(0.05, deadline - time.monotonic()))
        ]
        if refused:
            self.give_back(job, seats)
            return refused
        for seat, group in groups.items():
            _start_keeper(job, seat, group, resource, keep)
            self._started[keeper_actor(job, seat.bundle)] = time.monotonic()
        return []

    def lost(self, job: str, seats: Sequence[NodeSlot], resource: Resource, keep: int) -> set[int]:
        import ray

        gone = self._silent(job, seats)
        alive = {n["NodeID"] for n in ray.nodes() if n["Alive"]}
        lost = {seat.bundle for seat in seats if seat.node_id not in alive}
        for seat in seats:
            why = gone.get(seat.bundle)
            if why is None or seat.bundle in lost:
                continue
            if why == "silent" or self.take(job, [seat], resource, keep):
                lost.add(seat.bundle)
            else:
                logger.warning("the keeper of %s on %s died, and starts again", job, seat.node_ip)
        return lost

    def revive(
        self, job: str, seats: Sequence[NodeSlot], resource: Resource, keep: int
    ) -> list[NodeSlot]:
        import ray

        alive = {n["NodeID"] for n in ray.nodes() if n["Alive"]} if seats else set()
        revived = []
        for seat in seats:
            group = _placement_group(_seat_name(job, seat.bundle))
            # What else is lost is for the next attempt to replace.
            if group is not None and seat.node_id in alive:
                with contextlib.suppress(ValueError):  # its name is free at the next look
                    _start_keeper(job, seat, group, resource, keep)
                    self._started[keeper_actor(job, seat.bundle)] = time.monotonic()
                    self._watches.pop(keeper_actor(job, seat.bundle), None)
                    revived.append(seat)
        return revived

    def keepers_ended(self, job: str, seats: Sequence[NodeSlot]) -> list[NodeSlot]:
        return [seat for seat in seats if self._has_ended(keeper_actor(job, seat.bundle))]

    def _has_ended(self, name: str) -> bool:
        watch = self._watches.get(name)
        if watch is not None and (watch.died or not watch.over):
            return watch.died
        # A new one; or one that was out of reach, which says nothing of its end.
        keeper = _actor(name)
        if keeper is not None:
            self._watches[name] = _watch(keeper)
        return keeper is None

    def give_back(self, job: str, seats: Sequence[NodeSlot]) -> None:
        import ray
        from ray.util import remove_placement_group

        keepers = {seat.bundle: _actor(keeper_actor(job, seat.bundle)) for seat in seats}
        _end_ranks([keeper for keeper in keepers.values() if keeper is not None])
        for seat in seats:
            self._started.pop(keeper_actor(job, seat.bundle), None)
            self._watches.pop(keeper_actor(job, seat.bundle), None)
            keeper = keepers[seat.bundle]
            if keeper is not None:
                with contextlib.suppress(Exception):  # it may be gone already
                    ray.kill(keeper, no_restart=True)
            group = _placement_group(_seat_name(job, seat.bundle))
            if group is not None:
                remove_placement_group(group)

    def seats_held(self) -> dict[str, set[int]]:
        from ray.util import placement_group_table

        found: dict[str, set[int]] = {}
        for entry in placement_group_table().values():
            job, seat, number = entry["name"].removeprefix(group_name("")).rpartition("-seat-")
            ours = seat and entry["name"].startswith(group_name("")) and number.isdigit()
            if ours and entry["state"] != "REMOVED":
                found.setdefault(job, set()).add(int(number))
        return found

    def release(self, job: str) -> None:
        self._unheard.pop(job, None)
        self.give_back(job, [NodeSlot("", "", number, 0) for number in _seat_numbers(job)])

    def copies(self, job: str) -> dict[int, Inventory]:
        import ray

        keepers = {number: _actor(keeper_actor(job, number)) for number in _seat_numbers(job)}
        asked = {k.inventory.remote(job): number for number, k in keepers.items() if k is not None}
        if asked:
            ray.wait(list(asked), num_returns=len(asked), timeout=PING_S)
        found = {}
        silent = set()
        for reference, number in asked.items():
            try:
                found[number] = ray.get(reference, timeout=0)
            except ray.exceptions.RayError as error:
                logger.warning("seat %d of %s doesn't say what it holds: %s", number, job, error)
                if not isinstance(error, ray.exceptions.ActorDiedError):
                    silent.add(number)
        self._unheard[job] = silent
        return found

    def silent(self, job: str) -> set[int]:
        return self._unheard.get(job, set())

    def write_copies(self, order: DiskOrder) -> dict[int, str]:
        import ray

        made = (order.job_dir, order.attempt, order.timeline, order.world_size)
        asked, failed = {}, {}
        for number, keys in order.keys.items():
            for key in keys:
                keeper = _actor(keeper_actor(key.job, number))
                if keeper is None:
                    failed[key.rank] = "its keeper is gone"
                else:
                    asked[keeper.write.remote(key, *made)] = key.rank
        if asked:
            ray.wait(list(asked), num_returns=len(asked), timeout=order.timeout_s)
        for reference, rank in asked.items():
            try:
                ray.get(reference, timeout=0)
            except ray.exceptions.GetTimeoutError:
                failed[rank] = f"its keeper hasn't written it in {order.timeout_s:.0f} s"
            except ray.exceptions.RayError as error:
                cause = getattr(error, "cause", None)
                failed[rank] = in_one_line(cause if isinstance(cause, Exception) else error)
        return failed

    def wish(self, shapes: Sequence[dict[str, float]]) -> None:
        from ray.autoscaler.sdk import request_resources

        request_resources(bundles=list(shapes))

    def _silent(self, job: str, seats: Sequence[NodeSlot]) -> dict[int, str]:
        """Seats whose keeper doesn't answer: ``dead``, or ``silent``, which is worse: there is
        no telling what still runs there."""
        import ray

        asked, found = {}, {}
        for seat in seats:
            name = keeper_actor(job, seat.bundle)
            keeper = _actor(name)
            if keeper is None:
                found[seat.bundle] = "dead"
            else:
                asked[keeper.ping.remote()] = (seat.bundle, name, keeper)
        deadline = time.monotonic() + PING_S
        while asked and (left := deadline - time.monotonic()) > 0:
            answered, _ = ray.wait(list(asked), num_returns=len(asked), timeout=min(left, AGAIN_S))
            away = []
            for reference in answered:
                bundle, name, keeper = asked.pop(reference)
                try:
                    ray.get(reference, timeout=0)
                except ray.exceptions.ActorUnavailableError:
                    # A broken connection, Ray says: it lives, and so do the copies in it.
                    away.append((bundle, name, keeper))
                except ray.exceptions.RayError:
                    found[bundle] = "dead"
            if away:
                time.sleep(min(left, AGAIN_S))
            asked.update({each[2].ping.remote(): each for each in away})
        for bundle, name, _ in asked.values():
            if time.monotonic() - self._started.get(name, -math.inf) > STARTING_S:
                found[bundle] = "silent"
        return found


def _watch(keeper: Any) -> _Watch:
    import ray

    watch = _Watch()

    def ended(future: Future[Any]) -> None:
        # In a thread of Ray's, which must not ask Ray anything.
        watch.died = isinstance(future.exception(), ray.exceptions.ActorDiedError)
        watch.over = True

    # One that an Octavo before this one started doesn't have it: the next attempt sees to it.
    if hasattr(keeper, "stay"):
        watch.call = keeper.stay.remote()
        watch.call.future().add_done_callback(ended)
    return watch


def _end_ranks(keepers: Sequence[Any]) -> None:
    """By force, those that still run on these nodes: a frozen rank notices nothing itself."""
    import ray

    asked = [keeper.end_ranks.remote() for keeper in keepers]
    if asked:
        ray.wait(asked, num_returns=len(asked), timeout=PING_S)


def _start_keeper(job: str, seat: NodeSlot, group: Any, resource: Resource, keep: int) -> None:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    keeper = keeper_class().options(
        name=keeper_actor(job, seat.bundle),
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=seat.slots if resource == "CPU" else 0,
        num_gpus=seat.slots if resource == "GPU" else 0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0, False),
        max_concurrency=8,
    )
    deadline = time.monotonic() + PING_S
    while True:
        try:
            keeper.remote(keep, keeper_actor(job, seat.bundle))
            return
        except ValueError:
            # One of this name was ended a moment ago, and Ray hasn't taken it in.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _seat_name(job: str, bundle: int) -> str:
    return f"{group_name(job)}-seat-{bundle}"


def _seat_numbers(job: str) -> list[int]:
    """Of all that the job holds."""
    from ray.util import placement_group_table

    prefix = _seat_name(job, 0)[:-1]
    held = [
        entry["name"].removeprefix(prefix)
        for entry in placement_group_table().values()
        if entry["name"].startswith(prefix) and entry["state"] != "REMOVED"
    ]
    return sorted(int(number) for number in held if number.isdigit())


def _placement_group(name: str) -> Any | None:
    from ray.util import get_placement_group, placement_group_table

    try:
        found = get_placement_group(name)
    except ValueError:
        return None
    return None if placement_group_table(found).get("state") in (None, "REMOVED") else found


def _actor(name: str) -> Any | None:
    import ray

    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
