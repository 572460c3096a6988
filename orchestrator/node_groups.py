"""Nodes for a job: what it needs, whether that fits, and the placement group that holds it.

Promises: ``fit`` is pure and says what is missing in numbers. A group is taken whole or
not at all; its bundles are held by one keeper each, so that ranks need no resources of
their own and a restart can't lose its place to another job.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from orchestrator.protocol import NAMESPACE, NodeSlot, keeper_actor
from orchestrator.spec import JobSpec
from orchestrator.spec_completion import slots_per_node

logger = logging.getLogger(__name__)

Resource = Literal["CPU", "GPU"]

GRANT_TIMEOUT_S = 10.0
"""Seconds in which Ray reserves a group that fits; a longer wait means that it doesn't."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a job asks of the cluster: ``nodes`` different nodes with ``slots`` each."""

    nodes: int
    slots: int
    resource: Resource

    def __str__(self) -> str:
        unit = "GPUs" if self.resource == "GPU" else "CPU slots"
        return f"{self.nodes} node{'s' * (self.nodes > 1)} with {self.slots} {unit}"


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """One living node, in slots of each resource."""

    node_id: str
    total: dict[str, float]
    free: dict[str, float]


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a need can be met. ``reason`` is empty only where it can be met now."""

    now: bool
    ever: bool
    """Could be met with the nodes there are, if nothing else ran."""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """A placement group that a job holds."""

    id: str
    nodes: tuple[NodeSlot, ...]


class NodeGroups(Protocol):
    """Where nodes come from."""

    def capacities(self) -> list[NodeCapacity]:
        """Living nodes."""

    def acquire(self, job: str, need: Need, keep: int) -> Group | None:
        """Take a group with a keeper a bundle (``keep`` snapshots a rank); None: not now."""

    def repair(self, job: str, need: Need, keep: int, group: str) -> Group | None:
        """The group as it stands now, keepers that died started again; None: not now."""

    def release(self, job: str, group: str) -> None:
        """End the keepers and give the nodes back; what is gone already is no error."""


def need_of(spec: JobSpec) -> Need:
    """What a completed spec asks for."""
    return Need(spec.num_nodes, slots_per_node(spec), "GPU" if spec.gpus_per_node else "CPU")


def fit(need: Need, nodes: Sequence[NodeCapacity]) -> Fit:
    """Whether ``need`` can be met by ``nodes``, now and ever."""
    able = [n for n in nodes if n.total.get(need.resource, 0) >= need.slots]
    ready = [n for n in able if n.free.get(need.resource, 0) >= need.slots]
    unit = "GPUs" if need.resource == "GPU" else "CPU slots"
    if len(able) < need.nodes:
        most = max((n.total.get(need.resource, 0) for n in nodes), default=0)
        have = (
            f"the cluster has {len(able)} such of {len(nodes)}"
            if most >= need.slots
            else f"the largest of {len(nodes)} has {most:g}"
        )
        return Fit(False, False, f"needs {need}; {have}")
    if len(ready) < need.nodes:
        free = sorted((n.free.get(need.resource, 0) for n in able), reverse=True)
        listed = ", ".join(f"{f:g}" for f in free[:8])
        return Fit(False, True, f"needs {need}; free now: {listed} {unit}")
    return Fit(True, True)


class RayNodeGroups:
    """Groups on the Ray cluster that this process belongs to."""

    def capacities(self) -> list[NodeCapacity]:
        import ray
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        return [
            NodeCapacity(n["NodeID"], dict(n["Resources"]), dict(free.get(n["NodeID"], {})))
            for n in ray.nodes()
            if n["Alive"]
        ]

    def acquire(self, job: str, need: Need, keep: int) -> Group | None:
        from ray.util import placement_group, remove_placement_group

        self._remove_named(job)
        group = placement_group(
            [{need.resource: need.slots}] * need.nodes,
            strategy="STRICT_SPREAD" if need.nodes > 1 else "PACK",
            name=_group_name(job),
            # It must outlive a controller that restarts.
            lifetime="detached",
        )
        if not group.wait(GRANT_TIMEOUT_S):
            remove_placement_group(group)
            return None
        nodes = self._nodes(group, need)
        self._start_keepers(job, group, need, keep)
        return Group(group.id.hex(), nodes)

    def repair(self, job: str, need: Need, keep: int, group: str) -> Group | None:
        from ray.util import placement_group_table

        found = _placement_group(group) if group else None
        if found is None or placement_group_table(found).get("state") in (None, "REMOVED"):
            return self.acquire(job, need, keep)
        if not found.wait(GRANT_TIMEOUT_S):
            return None
        self._start_keepers(job, found, need, keep)
        return Group(group, self._nodes(found, need))

    def release(self, job: str, group: str) -> None:
        import ray
        from ray.util import placement_group_table, remove_placement_group

        found = _placement_group(group)
        bundles = placement_group_table(found).get("bundles") if found else None
        for bundle in range(len(bundles or ())):
            keeper = _actor(keeper_actor(job, bundle))
            if keeper is not None:
                ray.kill(keeper)
        if found is not None:
            remove_placement_group(found)

    def _remove_named(self, job: str) -> None:
        """A controller that died between reserving and storing left a group of that name."""
        from ray.util import get_placement_group, remove_placement_group

        try:
            left = get_placement_group(_group_name(job))
        except ValueError:
            return
        logger.warning("removing a placement group of %s that no record knows", job)
        remove_placement_group(left)

    def _nodes(self, group: Any, need: Need) -> tuple[NodeSlot, ...]:
        import ray
        from ray.util import placement_group_table

        address = {n["NodeID"]: n["NodeManagerAddress"] for n in ray.nodes()}
        where = placement_group_table(group)["bundles_to_node_id"]
        return tuple(
            NodeSlot(where[bundle], address[where[bundle]], bundle, need.slots)
            for bundle in sorted(where)
        )

    def _start_keepers(self, job: str, group: Any, need: Need, keep: int) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from launch.keeper import Keeper

        for bundle in range(need.nodes):
            if _actor(keeper_actor(job, bundle)) is not None:
                continue
            place = PlacementGroupSchedulingStrategy(group, bundle, False)
            ray.remote(Keeper).options(
                name=keeper_actor(job, bundle),
                namespace=NAMESPACE,
                lifetime="detached",
                num_cpus=need.slots if need.resource == "CPU" else 0,
                num_gpus=need.slots if need.resource == "GPU" else 0,
                scheduling_strategy=place,
                max_concurrency=8,
            ).remote(keep)


def _group_name(job: str) -> str:
    return f"octavo-{job}"


def _placement_group(hex_id: str) -> Any | None:
    from ray._raylet import PlacementGroupID
    from ray.util.placement_group import PlacementGroup

    try:
        return PlacementGroup(PlacementGroupID.from_hex(hex_id))
    except ValueError:
        return None


def _actor(name: str) -> Any | None:
    import ray

    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None
