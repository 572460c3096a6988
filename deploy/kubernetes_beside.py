"""What stands beside a cluster in Kubernetes: its volumes, who may reach it, what may be evicted.

Promises: pure; every object of a certain cluster has its name in front; any node may be drained.
"""

from __future__ import annotations

from typing import Any

from deploy.cluster_profile import ClusterProfile, NodeGroup
from deploy.kubernetes import HOME, JOBS, Object, claim, metadata
from deploy.ray_options import DASHBOARD_PORT
from orchestrator.home.listening import on_loopback

CLUSTER_LABEL, ROLE_LABEL, GROUP_LABEL = "octavo-cluster", "octavo-role", "octavo-group"


def beside(profile: ClusterProfile) -> list[Object]:
    """What stands beside the cluster: volumes, who may reach it, what may be evicted."""
    storage = profile.storage
    claims = [
        claim(profile, storage.home, HOME, "ReadWriteOnce"),
        claim(profile, storage.jobs, JOBS, "ReadWriteMany"),
    ]
    return [
        *(made for made in claims if made is not None),
        _network_policy(profile),
        # None for the head: of one pod none could go, so that its node could never be drained. It
        # has the time to pause jobs after a checkpoint, and the next one resumes them.
        *(_disruption(profile, group) for group in profile.node_groups if group.fewest > 1),
    ]


def pod_labels(profile: ClusterProfile, role: str = "") -> dict[str, str]:
    """Of the cluster's pods: our own, since a ``RayJob``'s cluster has a name that KubeRay makes
    up."""
    return {CLUSTER_LABEL: profile.name} | ({ROLE_LABEL: role} if role else {})


def _disruption(profile: ClusterProfile, group: NodeGroup) -> Object:
    """A drain takes one of the group's fewest nodes at a time: training goes on, from memory.

    Kubernetes' ``maxUnavailable`` and percentages count what the pods' owner wants by its scale
    subresource, which a RayCluster hasn't: such a budget would let no pod go, ever.
    """
    selected = {CLUSTER_LABEL: profile.name, GROUP_LABEL: group.name}
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(profile, f"{profile.name}-{group.name}"),
        "spec": {
            "minAvailable": group.fewest - 1,
            "selector": {"matchLabels": selected},
            # Else pods that don't start would hold nodes that nobody can drain.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def _network_policy(profile: ClusterProfile) -> Object:
    """Into the cluster's pods: from each other, from the operator to the dashboard, and to the
    API from where the profile says."""
    security = profile.security
    rules: list[Object] = [
        {"from": [{"podSelector": {"matchLabels": pod_labels(profile)}}]},
        {
            "from": [_namespace(profile.kubernetes.operator_namespace)],
            "ports": [{"protocol": "TCP", "port": DASHBOARD_PORT}],
        },
    ]
    if security.allow_namespaces and not on_loopback(security.listen):
        rules.append(
            {
                "from": [_namespace(name) for name in security.allow_namespaces],
                "ports": [{"protocol": "TCP", "port": security.port}],
            }
        )
    spec: dict[str, Any] = {
        "podSelector": {"matchLabels": pod_labels(profile)},
        "policyTypes": ["Ingress"],
        "ingress": rules,
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(profile, profile.name),
        "spec": spec,
    }


def _namespace(name: str) -> Object:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}
