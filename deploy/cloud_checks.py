"""What is wrong with a cluster profile for a cloud, where Ray's launcher starts the machines.

Read in Ray 2.60's launcher (``ray/autoscaler/_private``: command_runner, docker, aws, gcp, _azure).
Promises: pure; refused is what would let no cluster start, or one that trains over the wrong
network or loses its checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from deploy.cluster_profile import ClusterProfile, Target
from orchestrator.spec.errors import Finding, KeyPath

WANTED: dict[Target, tuple[str, ...]] = {
    "aws": ("region", "image"),
    "gcp": ("region", "zone", "project", "image"),
    "azure": ("region", "resource_group", "subscription", "image"),
}
IMAGES: dict[Target, tuple[str, str]] = {
    # Ray's own choice there has a driver for CUDA 11.2.
    "aws": (
        r"ami-[0-9a-f]+",
        "an AMI with a driver for CUDA 12.1 or later, as ami-0123456789",
    ),
    "gcp": (
        r"(https://.*/)?projects/[^/]+/global/images/.+",
        "as projects/PROJECT/global/images/family/FAMILY",
    ),
    "azure": (r"[^:]+:[^:]+:[^:]+:[^:]+", "as PUBLISHER:OFFER:SKU:VERSION"),
}
WITHOUT_GPUS = re.compile(r"(n\d|e2|c\d|m\d|t2|f1|g1)")
"""Families of gcp's machines that have GPUs only where they are attached one by one, or none."""


def check_cloud(profile: ClusterProfile, target: Target) -> Iterator[Finding]:
    """What ``target``, a cloud, needs and the profile lacks, and what can't work there."""
    cloud = profile.cloud
    shape, example = IMAGES[target]
    for key in WANTED[target]:
        if getattr(cloud, key) is None:
            remedy = example if key == "image" else f"add `{key}:`"
            yield Finding(("cloud", key), f"is missing: {target} wants it", remedy)
    if cloud.image is not None and not re.fullmatch(shape, cloud.image):
        yield Finding(("cloud", "image"), f"is no machine image of {target}", f"write it {example}")
    if profile.head.instance is None:
        yield Finding(("head", "instance"), "is missing", "name a type of machine")
    for i, group in enumerate(profile.node_groups):
        at: KeyPath = ("node_groups", i, "instance")
        if group.instance is None:
            yield Finding(at, "is missing", "name a type of machine")
        elif target == "gcp" and group.gpus and WITHOUT_GPUS.match(group.instance):
            told = "has no GPUs of its own, and none are attached"
            yield Finding(at, told, "take a machine that has: a2, a3, a4 or g2")
    if profile.network.rdma not in ("auto", "none"):
        # EFA wants an interface a card, in one placement group; InfiniBand at azure one scale set;
        # gcp's networks one VPC an adapter. The launcher starts single machines on one network.
        told = f"can't be had at {target} by Ray's launcher, whose machines speak TCP alone"
        remedy = "take it away, or a managed Kubernetes (kuberay, rdma_resource) or Slurm there"
        yield Finding(("network", "rdma"), told, remedy)
    if profile.storage.jobs.nfs is None and not cloud.prepare:
        told = f"is missing: {profile.storage.jobs.path} would be each machine's own disk"
        remedy = "give HOST:/EXPORT, or mount a shared file system in cloud.prepare"
        yield Finding(("storage", "jobs", "nfs"), told, remedy)
    inside = (f"{profile.storage.home.path}/", f"{profile.storage.jobs.path}/")
    for key in ("tls_cert", "tls_key"):
        path = getattr(profile.security, key)
        if path is not None and not path.startswith(inside):
            remedy = f"put it below {profile.storage.jobs.path}, or use `ray attach -p` and no TLS"
            told = "is not in the container that the controller runs in"
            yield Finding(("security", key), told, remedy)
