"""Reading a cluster profile, and what is wrong with one, for any target and for a certain one.

Promises: all problems of a file are told at once, each with file, key, value, line and what to do,
the nearest right name for a typo; what a target needs and the profile lacks is refused before
anything is rendered, and so is what a target would not use; a value written where the name of a
secret belongs is not repeated.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from deploy.cluster_profile import (
    CLOUDS,
    KUBERNETES,
    OWN_HOSTS,
    TARGETS,
    ClusterProfile,
    NodeGroup,
    Target,
    mebibytes,
)
from orchestrator.home.listening import on_loopback
from orchestrator.spec.errors import (
    Finding,
    KeyPath,
    Problem,
    SpecError,
    pydantic_findings,
    read_text,
    read_yaml,
    type_findings,
)

WHAT = "a cluster profile"


def load_profile(path: Path, target: Target | None = None) -> tuple[ClusterProfile, Target]:
    """The profile in a file, and what it is for; raises ``SpecError`` with every problem."""
    return parse_profile(read_text(path), str(path), target)


def parse_profile(
    text: str, file: str, target: Target | None = None
) -> tuple[ClusterProfile, Target]:
    """The profile of a YAML text; ``file`` is only named in messages."""
    start = "start with `name: my-cluster` and `node_groups:`"
    source = read_yaml(text, file, what=WHAT, start=start)
    findings = type_findings(ClusterProfile, source.data)
    profile: ClusterProfile | None = None
    try:
        profile = ClusterProfile.model_validate(source.data)
    except ValidationError as error:
        seen = {finding.path for finding in findings}
        found = pydantic_findings(error, ClusterProfile, source.data, what=WHAT)
        findings += [finding for finding in found if finding.path not in seen]
    wanted = target
    if profile is not None:
        wanted = target or profile.target
        findings += list(check_profile(profile))
        if wanted is None:
            remedy = f"give `target:`, or --target; one of {', '.join(TARGETS)}"
            findings.append(Finding(("target",), "is missing", remedy))
        else:
            findings += list(check_target(profile, wanted))
    if findings or profile is None or wanted is None:
        findings.sort(key=lambda finding: source.problem(finding).line or 0)
        raise SpecError([_veiled(source.problem(finding)) for finding in findings])
    return profile, wanted


def _veiled(problem: Problem) -> Problem:
    """Without its value where somebody may have written a secret instead of its name."""
    return replace(problem, value="***") if problem.key.endswith("_secret") else problem


def check_profile(profile: ClusterProfile) -> Iterator[Finding]:
    """What contradicts itself, whatever the target."""
    if not profile.node_groups:
        yield Finding(("node_groups",), "is empty: no rank runs on the head", "give one at least")
    seen: dict[str, int] = {}
    for i, group in enumerate(profile.node_groups):
        at: KeyPath = ("node_groups", i)
        if group.name in seen:
            yield Finding((*at, "name"), "is another group's name too", "each needs its own")
        seen[group.name] = i
        yield from _check_numbers(group, at)
    for name in profile.prices.node_hour:
        if name not in seen:
            told = f"there is no such group; there are {', '.join(seen)}"
            yield Finding(("prices", "node_hour", name), told)
    security = profile.security
    if (security.tls_cert is None) != (security.tls_key is None):
        missing = "tls_key" if security.tls_key is None else "tls_cert"
        yield Finding(("security", missing), "is missing", "TLS takes a certificate and its key")
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


def check_target(profile: ClusterProfile, target: Target) -> Iterator[Finding]:
    """What ``target`` needs and the profile lacks."""
    security, listen = profile.security, ("security", "listen")
    beyond = _valid(security.listen) and not on_loopback(security.listen)
    if target in (*KUBERNETES, *CLOUDS) and profile.image.gpu is None and profile.image.cpu is None:
        remedy = "build one with `octavo deploy render --target container` and name it"
        yield Finding(("image", "gpu"), "is missing: nodes run an image", remedy)
    if profile.redis is not None and target in (*CLOUDS, "on-prem", "slurm"):
        told = f"is not used by {target}: a head is lost with its tables, jobs go on from disk"
        yield Finding(("redis",), told, "take it away, or use systemd or kuberay")
    if target in KUBERNETES:
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
        wanted = {"aws": ["region"], "gcp": ["region", "zone", "project"]}
        for key in wanted.get(target, ["region", "resource_group"]):
            if getattr(profile.cloud, key) is None:
                yield Finding(("cloud", key), f"is missing: {target} wants it", f"add `{key}:`")
        if profile.head.instance is None:
            yield Finding(("head", "instance"), "is missing", "name a type of machine")
        for i, group in enumerate(profile.node_groups):
            if group.instance is None:
                at = ("node_groups", i, "instance")
                yield Finding(at, "is missing", "name a type of machine")
    if target == "slurm":
        for i, group in enumerate(profile.node_groups):
            if group.scales:
                at = ("node_groups", i, "min")
                yield Finding(at, "an allocation of Slurm has one size", "give `count:`")


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
