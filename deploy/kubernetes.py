"""Parts of Kubernetes objects that every pod and object of a cluster has alike.

Promises: pure; no value of a secret, only its name; containers run as an ordinary user, without
privileges, and with no more of the Kubernetes API than they need, which is nothing for workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deploy.cluster_profile import ClusterProfile, Toleration, VolumeConfig

Object = dict[str, Any]

HOME, JOBS, SHARED_MEMORY, RAY_FILES, TLS = "home", "jobs", "shared-memory", "ray-files", "tls"
TLS_FOLDER = "/octavo/tls"
RAY_FOLDER = "/tmp/ray"


def metadata(profile: ClusterProfile, name: str, **more: Any) -> Object:
    """Of an object of the cluster."""
    labels = {"app.kubernetes.io/name": "octavo", "app.kubernetes.io/instance": profile.name}
    found: Object = {"name": name, "namespace": profile.kubernetes.namespace, "labels": labels}
    return found | more


def pod_security(profile: ClusterProfile) -> Object:
    """Of a pod: an ordinary user, whose group owns the volumes."""
    user = profile.kubernetes.user_id
    return {
        "runAsNonRoot": True,
        "runAsUser": user,
        "runAsGroup": user,
        "fsGroup": user,
        # A large volume is not walked through at every start.
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> Object:
    """Of a container. No IPC_LOCK for RDMA, which pins memory: Kubernetes gives an added capability
    to root's processes alone (kubernetes/kubernetes#56374); the limit of the node's runtime counts.
    """
    return {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def of_secret(variable: str, secret: str, key: str) -> Object:
    """An environment variable by reference."""
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def plain(environment: Mapping[str, str]) -> list[Object]:
    """Environment variables by value."""
    return [{"name": name, "value": value} for name, value in environment.items()]


def claim(profile: ClusterProfile, volume: VolumeConfig, kind: str, mode: str) -> Object | None:
    """The claim that is to be made for a volume; None where the profile names one."""
    if volume.claim is not None:
        return None
    spec: Object = {
        "accessModes": [mode],
        "resources": {"requests": {"storage": volume.size}},
    }
    if volume.storage_class is not None:
        spec["storageClassName"] = volume.storage_class
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata(profile, claim_name(profile, volume, kind)),
        "spec": spec,
    }


def claim_name(profile: ClusterProfile, volume: VolumeConfig, kind: str) -> str:
    """Of the volume's claim."""
    return volume.claim or f"{profile.name}-{kind}"


def tolerations(given: tuple[Toleration, ...]) -> list[Object]:
    """As Kubernetes has them, whose own default is Equal, also of what has no value."""
    return [_toleration(one) for one in given]


def _toleration(given: Toleration) -> Object:
    found: Object = {} if given.key is None else {"key": given.key}
    found["operator"] = given.operator or ("Exists" if given.value is None else "Equal")
    return found | given.model_dump(include={"value", "effect"}, exclude_none=True)


def healthy(*addresses: str) -> list[str]:
    """A command that succeeds where all addresses of this pod's loopback answer with 200.

    Neither wget nor curl is in every image, and Python is.
    """
    code = (
        "import sys, urllib.request as r; "
        "[r.urlopen('http://127.0.0.1:' + a, timeout=4).read() for a in sys.argv[1:]]"
    )
    return ["python", "-c", code, *addresses]


def probe(command: list[str], *, period_s: int, failures: int) -> Object:
    """One that gives the command 10 s."""
    return {
        "exec": {"command": command},
        "periodSeconds": period_s,
        "timeoutSeconds": 10,
        "failureThreshold": failures,
    }


def probes(command: list[str]) -> Object:
    """Ten minutes to start, then two without an answer before the container is started again."""
    return {
        "startupProbe": probe(command, period_s=5, failures=120),
        "readinessProbe": probe(command, period_s=10, failures=3),
        "livenessProbe": probe(command, period_s=20, failures=6),
    }
