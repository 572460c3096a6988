"""What is wrong with a cluster profile whose values are right: for any target, and for one.

Promises: pure; what a target needs and the profile lacks is a finding, with what to do, and so is
what could not work there; what a target merely has no use for is told in what is rendered
(``used_keys``).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from deploy.cloud_checks import check_cloud
from deploy.cluster_profile import (
    CLOUDS,
    KUBERNETES,
    OWN_HOSTS,
    ClusterProfile,
    NodeGroup,
    Target,
    Toleration,
)
from deploy.profile_values import mebibytes, slurm_seconds
from orchestrator.home.listening import on_loopback
from orchestrator.spec.errors import Finding, KeyPath

LEAST_HEAD_MIB = 4096
HEADS = ("head", "headgroup")
"""Names that Ray's launcher and KubeRay have for the head among node groups."""
LONGEST_NAME: dict[Target, int] = {
    # KubeRay's names of services and pods are made of it (its constant.go).
    "kuberay": 53,
    # NAME-12345678, of at most 47.
    "rayjob": 38,
    # Names of machines are made of it, ray-NAME-worker-12345678-compute of at most 63 at gcp and
    # ray-NAME-worker-1234-5678 of at most 64 at azure (ray.autoscaler._private).
    "gcp": 35,
    "azure": 40,
}


def check_profile(profile: ClusterProfile) -> Iterator[Finding]:
    """What contradicts itself, whatever the target."""
    if not profile.node_groups:
        yield Finding(("node_groups",), "is empty: no rank runs on the head", "give one at least")
    seen: dict[str, int] = {}
    for i, group in enumerate(profile.node_groups):
        at: KeyPath = ("node_groups", i)
        if group.name in seen:
            yield Finding((*at, "name"), "is another group's name too", "each needs its own")
        if group.name in HEADS:
            yield Finding((*at, "name"), "is what Ray calls the head's group", "take another")
        seen[group.name] = i
        yield from _check_numbers(group, at)
        yield from _check_tolerations(group.tolerations, at)
    yield from _check_tolerations(profile.head.tolerations, ("head",))
    for name in profile.prices.node_hour:
        if name not in seen:
            told = f"there is no such group; there are {', '.join(seen)}"
            yield Finding(("prices", "node_hour", name), told)
    security = profile.security
    if (security.tls_cert is None) != (security.tls_key is None):
        missing = "tls_key" if security.tls_key is None else "tls_cert"
        yield Finding(("security", missing), "is missing", "TLS takes a certificate and its key")
    if mebibytes(profile.head.memory) < LEAST_HEAD_MIB:
        told = "is too little for Ray's tables, the controller and shared memory"
        yield Finding(("head", "memory"), told, "give 4Gi or more; 16Gi for a few hundred ranks")
    home, jobs = profile.storage.home.path, profile.storage.jobs.path
    if home == jobs:
        told = "is the home's folder too"
        yield Finding(("storage", "jobs", "path"), told, "give each a folder of its own")
    network = profile.network
    if network.rdma == "none" and network.rdma_resource is not None:
        told = "is a device that `rdma: none` tells NCCL not to use"
        yield Finding(("network", "rdma_resource"), told, "take one of the two away")
    if security.plain_http and (security.tls_cert or security.tls_secret):
        told = "contradicts the TLS that is given too"
        yield Finding(("security", "plain_http"), told, "take one of the two away")
    if security.allow_namespaces and _valid(security.listen) and on_loopback(security.listen):
        told = f"lets nobody in: the API listens on {security.listen} alone"
        remedy = "give `listen: 0.0.0.0` and TLS, or use `kubectl port-forward`"
        yield Finding(("security", "allow_namespaces"), told, remedy)
    try:
        ipaddress.ip_address(security.listen)
    except ValueError:
        told = "is no address; names are looked up differently on every host"
        yield Finding(("security", "listen"), told, "write 0.0.0.0 for all, or one address")


def _check_numbers(group: NodeGroup, at: KeyPath) -> Iterator[Finding]:
    if group.count is None and group.max is None:
        yield Finding((*at, "count"), "is missing", "give `count:`, or `min:` and `max:`")
    elif group.count is not None and (group.min is not None or group.max is not None):
        yield Finding((*at, "count"), "is given with min or max", "keep `count:`, or the other two")
    elif group.count is None and (group.min or 0) > (group.max or 0):
        yield Finding((*at, "min"), f"is more than max {group.max}", "exchange the two")
    if (group.device == "cpu") != (group.gpus == 0):
        which = "gpus" if group.device == "cpu" else "device"
        remedy = "give `device:` the GPU's name" if group.gpus else "give `gpus:` a node, or cpu"
        key = "device" if group.gpus else "gpus"
        yield Finding((*at, key), f"does not go with {which}", remedy)
    if mebibytes(group.shared_memory) >= mebibytes(group.memory):
        told = f"is all of the node's memory {group.memory}, which it is taken of"
        yield Finding((*at, "shared_memory"), told, "leave most of it to processes")


def _check_tolerations(tolerations: tuple[Toleration, ...], at: KeyPath) -> Iterator[Finding]:
    for i, given in enumerate(tolerations):
        path: KeyPath = (*at, "tolerations", i)
        if given.operator == "Exists" and given.value is not None:
            told = "means nothing with operator Exists, and Kubernetes refuses it"
            yield Finding((*path, "value"), told, "leave the operator out, or the value")
        if given.key is None and (given.operator == "Equal" or given.value is not None):
            yield Finding((*path, "key"), "is missing", "name the taint's key")


def check_target(profile: ClusterProfile, target: Target) -> Iterator[Finding]:
    """What ``target`` needs and the profile lacks."""
    security, listen = profile.security, ("security", "listen")
    beyond = _valid(security.listen) and not on_loopback(security.listen)
    image, on_gpu = profile.image, any(group.gpus for group in profile.node_groups)
    if target in (*KUBERNETES, *CLOUDS) and image.gpu is None and (on_gpu or image.cpu is None):
        remedy = "build one with `octavo deploy render --target container` and name it"
        told = "is missing: nodes with GPUs run it" if on_gpu else "is missing: nodes run an image"
        yield Finding(("image", "gpu"), told, remedy)
    if profile.redis is not None and target in (*CLOUDS, "on-prem", "slurm"):
        told = f"is not used by {target}: a head is lost with its tables, jobs go on from disk"
        yield Finding(("redis",), told, "take it away, or use systemd or kuberay")
    longest = LONGEST_NAME.get(target, 63)
    if len(profile.name) > longest:
        told = f"is too long for {target}, which makes other names of it"
        yield Finding(("name",), told, f"take one of at most {longest} characters")
    if target in KUBERNETES:
        network = profile.network
        if network.rdma in ("infiniband", "roce", "efa") and network.rdma_resource is None:
            told = "is missing: a pod that asks for no adapter has none, and NCCL would take TCP"
            remedy = "name what the nodes' device plugin has, as rdma/hca_shared_devices_a"
            yield Finding(("network", "rdma_resource"), told, remedy)
        if beyond and security.tls_secret is None and not security.plain_http:
            remedy = "give tls_secret, or plain_http: true where the network is yours alone"
            yield Finding(listen, "is beyond the loopback without TLS", remedy)
        if profile.redis is not None and profile.redis.password_secret is None:
            remedy = "name the secret that has it (key password)"
            yield Finding(("redis", "password_secret"), "is missing", remedy)
    elif target != "container" and beyond and not (security.tls_cert or security.plain_http):
        remedy = "give tls_cert and tls_key, or plain_http: true where the network is yours alone"
        yield Finding(listen, "is beyond the loopback without TLS", remedy)
    if target in OWN_HOSTS:
        if profile.head.address is None:
            yield Finding(("head", "address"), "is missing", "give the head's address")
        for i, group in enumerate(profile.node_groups):
            at: KeyPath = ("node_groups", i)
            if len(group.hosts) != group.most:
                told = f"names {len(group.hosts)} hosts, and the group has {group.most}"
                yield Finding((*at, "hosts"), told, "name each of them once")
            if group.scales:
                yield Finding((*at, "min"), "your own hosts are always there", "give `count:`")
        yield from _hosts_twice(profile)
    if target in CLOUDS:
        yield from check_cloud(profile, target)
    if target == "slurm":
        for i, group in enumerate(profile.node_groups):
            if group.scales:
                at = ("node_groups", i, "min")
                yield Finding(at, "an allocation of Slurm has one size", "give `count:`")
            elif not group.most:
                at = ("node_groups", i, "count")
                yield Finding(at, "is no allocation of Slurm", "leave the group out, or give one")
        if slurm_seconds(profile.slurm.time) <= profile.slurm.notice_s:
            told = (
                f"is no longer than notice_s, {profile.slurm.notice_s} s: nothing would be trained"
            )
            yield Finding(("slurm", "time"), told, "give more")


def _hosts_twice(profile: ClusterProfile) -> Iterator[Finding]:
    seen: set[str] = set()
    for i, group in enumerate(profile.node_groups):
        for j, host in enumerate(group.hosts):
            if host in seen:
                yield Finding(("node_groups", i, "hosts", j), "is named twice", "take one away")
            seen.add(host)


def _valid(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True
