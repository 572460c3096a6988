"""What an API server, KubeRay's operator and the disruption controller refuse of objects that are
valid by their schemas: names, labels, tolerations, budgets, volumes.

Sources: Kubernetes' `validation.go` of core/v1 (tolerations) and apimachinery (names, labels),
"Arbitrary workloads and arbitrary selectors" of its page on disruption budgets; KubeRay 1.7's
`controllers/ray/utils/validation.go` and `constant.go`. Promises: pure; an empty list is valid.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

Object = dict[str, Any]

LONGEST_NAME = {"RayCluster": 53, "RayJob": 47}
SCALABLE = ("Deployment", "StatefulSet", "ReplicaSet")
_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME = re.compile(r"[A-Za-z0-9]([-_.A-Za-z0-9]{0,61}[A-Za-z0-9])?")


def faults(documents: Sequence[Object]) -> list[str]:
    """Of all objects of one file."""
    found = []
    for document in documents:
        metadata = document["metadata"]
        name, kind = metadata["name"], document["kind"]
        if not _SUBDOMAIN.fullmatch(name) or len(name) > 253:
            found.append(f"{kind} {name}: no name")
        if not _DNS_LABEL.fullmatch(metadata["namespace"]):
            found.append(f"{kind} {name}: no namespace {metadata['namespace']}")
        if kind in LONGEST_NAME:
            if len(name) > LONGEST_NAME[kind] or not _DNS_1035.fullmatch(name):
                found.append(f"{kind} {name}: no more than {LONGEST_NAME[kind]} characters")
            found += _of_cluster(document)
        found += _labels(metadata.get("labels", {}))
        if kind == "PodDisruptionBudget":
            found += _of_budget(document, documents)
    return found


def cluster_spec(document: Object) -> Object:
    """Of a RayCluster, or of a RayJob's."""
    spec: Object = document["spec"]
    return spec["rayClusterSpec"] if document["kind"] == "RayJob" else spec


def templates(document: Object) -> list[tuple[Object, int]]:
    """Pod templates of a cluster, each with the fewest pods that are made of it."""
    spec = cluster_spec(document)
    groups = [(g["template"], g["minReplicas"]) for g in spec["workerGroupSpecs"]]
    return [(spec["headGroupSpec"]["template"], 1), *groups]


def _of_cluster(document: Object) -> Iterator[str]:
    spec = cluster_spec(document)
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    for group in groups:
        if "labels" in group["rayStartParams"]:
            yield "labels belong to the group, not to rayStartParams"
        yield from _labels(group.get("labels", {}))
    names = [group["groupName"] for group in spec["workerGroupSpecs"]]
    if len({*names, "headgroup"}) != len(names) + 1:
        yield f"two groups of one name: {names}"
    for variable in groups[0]["template"]["spec"]["containers"][0]["env"]:
        if variable["name"] in ("RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"):
            yield f"{variable['name']} belongs to gcsFaultToleranceOptions"
    for template, _ in templates(document):
        yield from _labels(template["metadata"].get("labels", {}))
        yield from _of_pod(template["spec"])


def _of_pod(pod: Object) -> Iterator[str]:
    for toleration in pod.get("tolerations", ()):
        yield from _of_toleration(toleration)
    yield from _labels(pod.get("nodeSelector", {}))
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in pod["containers"]:
        mounts = container["volumeMounts"]
        paths = [mount["mountPath"] for mount in mounts]
        if len(set(paths)) != len(paths) or any(":" in path for path in paths):
            yield f"mount paths must be unique and have no colon: {paths}"
        if not {mount["name"] for mount in mounts} <= volumes:
            yield "a mount without its volume"
        names = [variable["name"] for variable in container["env"]]
        if len(set(names)) != len(names):
            yield f"a variable twice: {names}"
        for port in container.get("ports", ()):
            if len(port["name"]) > 15 or not re.search("[a-z]", port["name"]):
                yield f"no name of a port: {port['name']}"
        resources = container["resources"]
        for name, amount in resources["limits"].items():
            if name not in ("cpu", "memory"):
                yield from _key(name)
                if "/" not in name or resources["requests"].get(name) != amount:
                    yield f"{name}: an extended resource has a domain, requests equal limits"


def _of_toleration(given: Object) -> Iterator[str]:
    operator = given.get("operator") or "Equal"
    if operator == "Exists" and given.get("value"):
        yield "a toleration's value must be empty when operator is Exists"
    if operator == "Equal" and not given.get("key"):
        yield "operator must be Exists when a toleration's key is empty"
    if "key" in given:
        yield from _key(given["key"])
    if operator == "Equal":
        yield from _value(given.get("value", ""))


def _of_budget(budget: Object, documents: Sequence[Object]) -> Iterator[str]:
    spec, wanted = budget["spec"], budget["spec"]["selector"]["matchLabels"].items()
    name = budget["metadata"]["name"]
    scalable = [d for d in documents if d["kind"] in SCALABLE]
    if "maxUnavailable" in spec and not scalable:
        yield f"{name}: maxUnavailable over pods whose owner has no scale subresource"
    least = spec.get("minAvailable")
    if not isinstance(least, int):
        yield f"{name}: minAvailable must be a number for such pods, not {least!r}"
        return
    pods = sum(
        fewest
        for d in documents
        if d["kind"] in LONGEST_NAME
        for template, fewest in templates(d)
        if wanted <= template["metadata"]["labels"].items()
    )
    if least >= pods:
        yield f"{name}: {least} of {pods} pods must stay, so that no node is ever drained"


def _labels(given: Object) -> Iterator[str]:
    for key, value in given.items():
        yield from _key(key)
        yield from _value(value)


def _key(key: str) -> Iterator[str]:
    prefix, slash, name = key.rpartition("/")
    if not _NAME.fullmatch(name) or (slash and not _SUBDOMAIN.fullmatch(prefix)):
        yield f"{key!r} is no key of a label"


def _value(value: str) -> Iterator[str]:
    if value and not _NAME.fullmatch(value):
        yield f"{value!r} is no value of a label"
