"""Which keys of a cluster profile each target has a use for: what has none is told, not dropped.

One profile serves several targets, so a key that another one wants is no error. Promises: pure;
``tests/unit/test_deploy_used_keys.py`` tries each key on each target, and finds it in the rendered
files just where this says so.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel

from deploy.cluster_profile import CLOUDS, KUBERNETES, ClusterProfile, Target

FOR_PEOPLE = (
    "name",
    "target",
    "node_groups[].device",
    "node_groups[].memory",
    "image.gpu_base",
    "image.cpu_base",
    "prices.currency",
    "prices.node_hour",
)
"""Of whatever target: what a node is, what it costs, and how the images are built."""
_ANYWHERE = (
    "node_groups[].name",
    "node_groups[].gpus",
    "node_groups[].cpus",
    "node_groups[].count",
    "node_groups[].labels",
    "network.interface",
    "network.rdma",
    "storage.home.path",
    "storage.jobs.path",
    "security.listen",
    "security.port",
    "security.plain_http",
)
_SCALES = ("node_groups[].min", "node_groups[].max", "cloud.idle_minutes")
_FILES = ("security.tls_cert", "security.tls_key", "security.ray_token_file")
_IN_PODS = (
    *_ANYWHERE,
    *_SCALES,
    "image.gpu",
    "image.cpu",
    "image.pull_secret",
    "head.cpus",
    "head.memory",
    "head.node_selector",
    "head.tolerations",
    "node_groups[].memory",
    "node_groups[].shared_memory",
    "node_groups[].gpu_resource",
    "node_groups[].node_selector",
    "node_groups[].tolerations",
    "network.rdma_resource",
    "network.rdma_count",
    "storage.home.claim",
    "storage.home.storage_class",
    "storage.home.size",
    "storage.jobs.claim",
    "storage.jobs.storage_class",
    "storage.jobs.size",
    "security.tls_secret",
    "security.allow_namespaces",
    "security.ray_token_secret",
    "security.wandb_secret",
    "redis.address",
    "redis.password_secret",
    "kubernetes.namespace",
    "kubernetes.operator_namespace",
    "kubernetes.priority_class",
    "kubernetes.user_id",
)
_AT_CLOUDS = (
    *_ANYWHERE,
    *_SCALES,
    *_FILES,
    "image.gpu",
    "image.cpu",
    "head.memory",
    "head.instance",
    "node_groups[].shared_memory",
    "node_groups[].instance",
    "node_groups[].spot",
    "storage.jobs.nfs",
    "kubernetes.user_id",
    "cloud.region",
    "cloud.zone",
    "cloud.image",
    "cloud.disk",
    "cloud.ssh_user",
    "cloud.prepare",
)
_ON_HOSTS = (
    *_ANYWHERE,
    *_FILES,
    "head.address",
    "node_groups[].hosts",
    "hosts.environment",
    "hosts.user",
)
USED: dict[Target, tuple[str, ...]] = {
    "kuberay": _IN_PODS,
    "rayjob": _IN_PODS,
    "aws": (*_AT_CLOUDS, "cloud.root_device"),
    "gcp": (*_AT_CLOUDS, "cloud.project"),
    "azure": (*_AT_CLOUDS, "cloud.resource_group", "cloud.subscription"),
    "on-prem": _ON_HOSTS,
    "systemd": (*_ON_HOSTS, "redis.address", "redis.password_file"),
    "slurm": (
        *_ANYWHERE,
        *_FILES,
        "node_groups[].memory",
        "node_groups[].partition",
        "slurm.partition",
        "slurm.account",
        "slurm.time",
        "slurm.notice_s",
        "slurm.requeue",
        "hosts.environment",
    ),
    "container": (
        "image.gpu_base",
        "image.cpu_base",
        "storage.home.path",
        "storage.jobs.path",
        "kubernetes.user_id",
    ),
}


def unused(profile: ClusterProfile, target: Target) -> list[str]:
    """Keys that somebody has written and ``target`` does nothing with, as ``slurm.time``."""
    if target == "container":
        # An image is of no cluster: most of a profile is for other targets.
        return []
    used = {*USED[target], *FOR_PEOPLE}
    return [shown for key, shown in _written(profile) if key not in used]


def notes(profile: ClusterProfile, target: Target) -> list[str]:
    """What somebody should know who reads what is rendered."""
    found = []
    if keys := unused(profile, target):
        found.append(f"Without effect on {target}: {', '.join(keys)}.")
    if target in KUBERNETES and profile.network.rdma_resource is not None:
        found.append(
            "RDMA pins memory: the nodes' container runtime wants LimitMEMLOCK=infinity, since "
            "these containers are no root's (`octavo doctor --group GROUP` shows the limit)."
        )
    if target in CLOUDS and sum(g.most for g in profile.node_groups if g.gpus) > 1:
        found.append("Nodes speak TCP with each other: Ray's launcher gives them no RDMA network.")
    return found


def _written(section: BaseModel, key: str = "", shown: str = "") -> Iterator[tuple[str, str]]:
    """(key as in ``USED``, key as in the file) of each value that isn't a default."""
    for name in type(section).model_fields:
        if name not in section.model_fields_set:
            continue
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _written(value, f"{key}{name}.", f"{shown}{name}.")
        elif name == "node_groups":
            for i, group in enumerate(value):
                yield from _written(group, "node_groups[].", f"node_groups[{i}].")
        elif value is not None:
            yield f"{key}{name}", f"{shown}{name}"
