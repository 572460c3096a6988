"""What a plan takes from a cluster, and where a job does not fit it. Pure.

Whoever knows clusters makes a ``Cluster`` (``deploy.planned`` does of a profile) and finds here
what it lacks for a job, before pods or an allocation wait for nodes that can't exist. Promises: a
finding is about the job's file, with the cluster's number in it; prices and memory are those of the
cluster, never a guess.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from monitoring.wording import counted
from orchestrator.planning.devices import DEVICES
from orchestrator.spec.completion import slots_per_node
from orchestrator.spec.errors import Finding, Source, nearest
from orchestrator.spec.job import JobSpec


@dataclass(frozen=True, slots=True)
class ClusterGroup:
    """Nodes that are alike."""

    name: str
    device: str
    """What a rank computes on, by the cluster's name for it."""
    gpus: int
    """A node."""
    cpus: int
    memory: int
    """Bytes a node."""
    nodes: int
    """At most."""
    price: float | None = None
    """Of a node an hour."""

    @property
    def slots(self) -> int:
        """Ranks that a node has room for: a GPU each, or a CPU."""
        return self.gpus or self.cpus

    @property
    def device_price(self) -> float | None:
        """Of what one rank has, an hour."""
        return None if self.price is None or not self.slots else self.price / self.slots


@dataclass(frozen=True, slots=True)
class Cluster:
    """One cluster, as far as a plan needs it."""

    name: str
    groups: tuple[ClusterGroup, ...]
    network: str = ""
    """Of ``orchestrator.planning.devices``; empty: it doesn't say."""
    currency: str = ""

    def to_json(self, group: ClusterGroup) -> dict[str, Any]:
        """What of it a plan is made with."""
        return {
            "name": self.name,
            "group": group.name,
            "device": group.device,
            "nodes": group.nodes,
            "slots_a_node": group.slots,
            "memory_a_node": group.memory,
            "price_a_node_hour": group.price,
            "currency": self.currency,
            "network": self.network or None,
        }


class GroupError(ValueError):
    """Which group is meant is not known; the message has those that there are."""


def group_of(cluster: Cluster, data: Mapping[str, Any], asked: str = "") -> ClusterGroup:
    """The group that a job file's ranks would be on; ``asked``: by name. Raises GroupError.

    Of several it is the only one with such slots, or the only one that such nodes fit on.
    """
    names = [group.name for group in cluster.groups]
    if asked:
        found = next((group for group in cluster.groups if group.name == asked), None)
        if found is None:
            there = f"{nearest(asked, names)} there are {', '.join(names)}".strip()
            raise GroupError(f"{cluster.name} has no group {asked!r}: {there}")
        return found
    gpus, slots = _number(data.get("gpus_per_node")), _number(data.get("slots_per_node"))
    among: Sequence[ClusterGroup] = cluster.groups
    if gpus or slots:
        among = [group for group in among if bool(group.gpus) == bool(gpus)] or among
    if len(among) > 1:
        nodes = _number(data.get("num_nodes")) or 1
        room = [g for g in among if g.slots >= (gpus or slots or 1) and g.nodes >= nodes]
        among = room or among
    if len(among) != 1:
        told = f"{cluster.name} has several groups for such a job: {', '.join(names)}"
        raise GroupError(told if among else f"{cluster.name} has no group")
    return among[0]


def with_cluster(source: Source, cluster: Cluster, group: ClusterGroup) -> tuple[Source, list[str]]:
    """A job file's values on the cluster's hardware, and the keys that it gave where they had none.

    The device is the group's, whatever the file says; the network the file's, where it has one.
    """
    data, given = dict(source.data), []
    gpus, slots = _number(data.get("gpus_per_node")), _number(data.get("slots_per_node"))
    if not gpus and not slots and group.gpus:
        data["gpus_per_node"] = group.gpus
        given.append("gpus_per_node")
    if data.get("num_nodes") is None and group.nodes:
        data["num_nodes"] = group.nodes
        given.append("num_nodes")
    resources = data.get("resources")
    of_file = dict(resources) if isinstance(resources, Mapping) else {}
    device = group.device if data.get("gpus_per_node") else "cpu"
    if device in DEVICES:
        of_file["device"] = device
    if cluster.network and of_file.get("network") is None:
        of_file["network"] = cluster.network
        given.append("resources.network")
    if isinstance(resources, Mapping | None):
        data["resources"] = of_file
    return replace(source, data=data), given


def check_cluster(cluster: Cluster, spec: JobSpec) -> Iterator[Finding]:
    """What of a completed job the cluster does not have, on all its groups together."""
    wanted, on_gpu = slots_per_node(spec), bool(spec.gpus_per_node)
    what = "GPUs" if on_gpu else "CPUs"
    there = [(group.gpus if on_gpu else group.cpus, group.nodes) for group in cluster.groups]
    most = max((slots for slots, _ in there), default=0)
    nodes = sum(number for slots, number in there if slots >= wanted)
    least = spec.resources.min_nodes or spec.num_nodes
    if wanted > most:
        told = f"is more than any node of {cluster.name} has: {most} {what}"
        remedy = "ask for fewer, or give the cluster's profile a group that has them"
        yield Finding(("gpus_per_node" if on_gpu else "slots_per_node",), told, remedy)
    elif least > nodes:
        told = (
            f"is more than {cluster.name} can have: {counted(nodes, 'node')} with {wanted} {what}"
        )
        yield Finding(("num_nodes",), told, "ask for fewer, or raise the group's `max:`")


def check_group(
    cluster: Cluster, group: ClusterGroup, spec: JobSpec, data: Mapping[str, Any]
) -> Iterator[Finding]:
    """What of a completed job the cluster does not have, on one group; ``data``: its file's."""
    yield from check_cluster(replace(cluster, groups=(group,)), spec)
    resources = data.get("resources")
    named = resources.get("device") if isinstance(resources, Mapping) else None
    on_gpu = bool(spec.gpus_per_node)
    if named is not None and on_gpu and group.device in DEVICES and named != group.device:
        told = f"is not what group {group.name} of {cluster.name} has: {group.device}"
        yield Finding(("resources", "device"), told, "leave it out, or name another --group")
    spares = spec.resources.spares
    if spares and spec.num_nodes <= group.nodes < spec.num_nodes + spares:
        told = f"has no room: {spec.num_nodes} nodes train, and {cluster.name} has {group.nodes}"
        remedy = "raise the group's `max:`: a lost node is waited for otherwise"
        yield Finding(("resources", "spares"), told, remedy)


def _number(value: object) -> int:
    """Of a file not yet checked."""
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
