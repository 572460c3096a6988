"""What `octavo plan --cluster` reads from a cluster profile.

Found by ``orchestrator.cli.plan`` through the entry point group ``octavo.clusters``. Promises: pure
but for reading the file; a plan needs no target, so what only a target needs may be missing.
"""

from __future__ import annotations

from pathlib import Path

from deploy.cluster_profile import ClusterProfile
from deploy.profile_file import load_profile
from deploy.profile_values import mebibytes
from orchestrator.planning.cluster import Cluster, ClusterGroup

_NETWORKS = {"infiniband": "ib400", "roce": "roce400", "efa": "roce400", "none": "eth100"}
"""A profile has the kind of a network and no rate: the usual one of nodes with such GPUs."""


def load_cluster(path: Path) -> Cluster:
    """Of the profile in a file; raises ``SpecError`` with every problem."""
    profile, _ = load_profile(path, "container")
    return cluster_of(profile)


def cluster_of(profile: ClusterProfile) -> Cluster:
    """What a plan needs of a profile."""
    prices = profile.prices.node_hour
    groups = tuple(
        ClusterGroup(
            name=group.name,
            device=group.device,
            gpus=group.gpus,
            cpus=group.cpus,
            memory=mebibytes(group.memory) << 20,
            nodes=group.most,
            price=prices.get(group.name),
        )
        for group in profile.node_groups
    )
    network = _NETWORKS.get(profile.network.rdma, "")
    return Cluster(profile.name, groups, network, profile.prices.currency)
