"""A cluster as KubeRay's objects: ``RayCluster``, or ``RayJob`` with a job of its own.

The head has Ray's tables and the controller (``deploy.serve``), whose home is on a volume of its
own; each node group is a worker group. KubeRay's command line is not taken for the head: it would
have the Redis' password on it, and no controller. Promises: pure; what is rendered is valid by
KubeRay 1.7's schema and by Kubernetes' (``tests/unit/test_deploy_schemas.py``); nothing listens
beyond a pod's loopback for outsiders unless the profile says so.
"""

from __future__ import annotations

import hashlib

from deploy.cluster_profile import ClusterProfile, NodeGroup
from deploy.kubernetes import (
    HOME,
    JOBS,
    RAY_FILES,
    RAY_FOLDER,
    SHARED_MEMORY,
    TLS,
    TLS_FOLDER,
    Object,
    claim_name,
    container_security,
    healthy,
    metadata,
    of_secret,
    plain,
    pod_security,
    probes,
    tolerations,
)
from deploy.kubernetes_beside import GROUP_LABEL, beside, pod_labels
from deploy.ray_options import (
    DASHBOARD_PORT,
    EXIT_S,
    GCS_PORT,
    HEAD_GRACE_S,
    LOOPBACK,
    OPEN_FILES,
    api_options,
    environment,
    head_options,
    head_shared_memory,
    node_options,
    ray_version,
)
from orchestrator.home.listening import on_loopback

AGENT_PORT = 52365
RAYLET_HEALTH = f"{AGENT_PORT}/api/local_raylet_healthz"
GCS_HEALTH = f"{DASHBOARD_PORT}/api/gcs_healthz"
OWN_TLS = "/dev/shm/octavo-tls"
OWN_COMMAND = "ray.io/overwrite-container-cmd"
"""KubeRay's annotation: containers run their own command, KubeRay's is in a variable."""
GENERATED = "KUBERAY_GEN_RAY_START_CMD"
STAYS = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}
"""Annotations: whoever adds and takes nodes leaves these pods' alone (Karpenter within its pool's
terminationGracePeriod); a drain evicts them."""
JOB_FILE = "job.yaml"
JOB_FOLDER = "/octavo/job"
DIGEST = 8
"""Characters of a job's digest that its RayJob is named by."""


def cluster_objects(profile: ClusterProfile) -> list[Object]:
    """All objects of a ``RayCluster``, in the order in which they are made."""
    cluster: Object = {
        "apiVersion": "ray.io/v1",
        "kind": "RayCluster",
        "metadata": metadata(profile, profile.name, annotations={OWN_COMMAND: "true"}),
        "spec": _cluster(profile, profile.storage.home.path),
    }
    return [*beside(profile), cluster]


def job_objects(profile: ClusterProfile, job: str) -> list[Object]:
    """All objects of a ``RayJob`` that trains the job file of text ``job``."""
    # Of the job's text: KubeRay does nothing more for a RayJob that has ended, whatever is applied
    # to it, so each job is one of its own; the same text again is the same.
    digest = hashlib.sha256(job.encode()).hexdigest()[:DIGEST]
    name = f"{profile.name}-{digest}"
    # A home has one controller.
    home = f"{profile.storage.home.path}/{name}"
    config: Object = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(profile, name),
        "data": {JOB_FILE: job},
    }
    spec = _cluster(profile, home, dashboard="0.0.0.0", job_config=name)
    ray_job: Object = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": metadata(profile, name, annotations={OWN_COMMAND: "true"}),
        "spec": {
            # It runs in the head's pod, where home and job file are; a second try finds the job.
            "entrypoint": (
                f"python -m deploy.job_runner {home} {JOB_FOLDER}/{JOB_FILE} --key {name}"
            ),
            # The operator asks Ray's own API for it: no pod more, that would have to be let in.
            "submissionMode": "HTTPMode",
            "backoffLimit": 2,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 600,
            "rayClusterSpec": spec,
        },
    }
    return [*beside(profile), config, ray_job]


def _cluster(
    profile: ClusterProfile, home: str, dashboard: str = LOOPBACK, job_config: str | None = None
) -> Object:
    """Of a ``RayCluster`` or within a ``RayJob``; ``home`` is the controller's."""
    scales = any(group.scales for group in profile.node_groups)
    security = profile.security
    auth: Object = {"mode": "token"}
    if security.ray_token_secret is not None:
        auth["secretName"] = security.ray_token_secret
    spec: Object = {"rayVersion": ray_version(), "authOptions": auth}
    spec["enableInTreeAutoscaling"] = scales
    if scales:
        spec["autoscalerOptions"] = {
            "version": "v2",
            "idleTimeoutSeconds": 60 * profile.cloud.idle_minutes,
            "upscalingMode": "Default",
            "securityContext": container_security(),
        }
    if profile.redis is not None:
        tables: Object = {
            "redisAddress": profile.redis.address,
            "externalStorageNamespace": job_config or profile.name,
        }
        if profile.redis.password_secret is not None:
            reference = {"name": profile.redis.password_secret, "key": "password"}
            tables["redisPassword"] = {"valueFrom": {"secretKeyRef": reference}}
        spec["gcsFaultToleranceOptions"] = tables
    spec["headGroupSpec"] = {
        "serviceType": "ClusterIP",
        # KubeRay reads from these what it has to know of the head.
        "rayStartParams": {"num-cpus": "0", "num-gpus": "0", "dashboard-host": dashboard},
        "template": {
            "metadata": {"labels": pod_labels(profile, "head"), "annotations": dict(STAYS)},
            "spec": _head(profile, home, dashboard, job_config, scales=scales),
        },
    }
    spec["workerGroupSpecs"] = [_worker_group(profile, group) for group in profile.node_groups]
    return spec


def _head(
    profile: ClusterProfile, home: str, dashboard: str, job_config: str | None, *, scales: bool
) -> Object:
    security, storage = profile.security, profile.storage
    files = (f"{OWN_TLS}/tls.crt", f"{OWN_TLS}/tls.key") if security.tls_secret else ()
    options = [*head_options(profile, dashboard), f"--port={GCS_PORT}"]
    options.append("--node-ip-address=$POD_IP")
    if scales:
        # KubeRay's container beside this one is the autoscaler.
        options.append("--no-monitor")
    # Kubernetes lets a volume's group read the key, which the controller refuses: a copy of ours.
    copied = f"umask 077; mkdir -p {OWN_TLS}; cp {TLS_FOLDER}/tls.* {OWN_TLS}; " if files else ""
    command = (
        f"{copied}{OPEN_FILES}; exec python -m deploy.serve {home} "
        f"--address $POD_IP:{GCS_PORT} {api_options(profile, *files)} "
        f"--grace {HEAD_GRACE_S - EXIT_S} --head -- {' '.join(options)}"
    )
    variables = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "OCTAVO_HOME", "value": home},
        *_variables(profile, None),
    ]
    if profile.redis is not None and profile.redis.password_secret is not None:
        variables.append(of_secret("RAY_REDIS_PASSWORD", profile.redis.password_secret, "password"))
    ports = [
        {"containerPort": GCS_PORT, "name": "gcs-server"},
        {"containerPort": DASHBOARD_PORT, "name": "dashboard"},
    ]
    if not on_loopback(security.listen):
        ports.append({"containerPort": security.port, "name": "octavo"})
    volumes = [_claimed(HOME, claim_name(profile, storage.home, HOME))]
    mounts: list[Object] = [{"name": HOME, "mountPath": storage.home.path}]
    if security.tls_secret is not None:
        secret = {"secretName": security.tls_secret, "defaultMode": 0o440}
        volumes.append({"name": TLS, "secret": secret})
        mounts.append({"name": TLS, "mountPath": TLS_FOLDER, "readOnly": True})
    if job_config is not None:
        volumes.append({"name": "job", "configMap": {"name": job_config}})
        mounts.append({"name": "job", "mountPath": JOB_FOLDER, "readOnly": True})
    resources = {"cpu": str(profile.head.cpus), "memory": profile.head.memory}
    container: Object = {
        "name": "ray-head",
        "image": profile.image.cpu or profile.image.gpu,
        "command": ["/bin/bash", "-c", "--"],
        "args": [command],
        "env": variables,
        "ports": ports,
        "resources": {"requests": resources, "limits": dict(resources)},
        "securityContext": container_security(),
        **probes(healthy(RAYLET_HEALTH, GCS_HEALTH)),
    }
    pod = _pod(profile, container, volumes, mounts, f"{head_shared_memory(profile)}Mi")
    pod["terminationGracePeriodSeconds"] = HEAD_GRACE_S
    # Only the autoscaler, which KubeRay gives an account of its own, speaks to Kubernetes.
    if not scales:
        pod["automountServiceAccountToken"] = False
    return pod | _placing(profile.head.node_selector, tolerations(profile.head.tolerations))


def _worker_group(profile: ClusterProfile, group: NodeGroup) -> Object:
    limits = {"cpu": str(group.cpus), "memory": group.memory}
    if group.gpus:
        limits[group.gpu_resource] = str(group.gpus)
    network = profile.network
    if group.gpus and network.rdma_resource is not None:
        limits[network.rdma_resource] = str(network.rdma_count)
    image = profile.image.gpu if group.gpus else profile.image.cpu
    container: Object = {
        "name": "ray-worker",
        "image": image or profile.image.gpu or profile.image.cpu,
        "command": ["/bin/bash", "-c", "--"],
        "args": [f'{OPEN_FILES}; exec /bin/bash -c "${GENERATED}"'],
        "env": _variables(profile, group),
        "resources": {"requests": limits, "limits": dict(limits)},
        "securityContext": container_security(),
        **probes(healthy(RAYLET_HEALTH)),
    }
    pod = _pod(profile, container, [], [], group.shared_memory)
    pod["automountServiceAccountToken"] = False
    pod["terminationGracePeriodSeconds"] = 30
    pod |= _placing(group.node_selector, tolerations(group.tolerations))
    flags = dict(option.removeprefix("--").split("=", 1) for option in node_options(group))
    labels = flags.pop("labels", "")
    found: Object = {
        "groupName": group.name,
        "minReplicas": group.fewest,
        "maxReplicas": group.most,
        "rayStartParams": flags,
        "template": {
            "metadata": {
                "labels": pod_labels(profile, "worker") | {GROUP_LABEL: group.name},
                "annotations": dict(STAYS),
            },
            "spec": pod,
        },
    }
    if not group.scales:
        # Where it scales the number is the autoscaler's to say.
        found["replicas"] = group.fewest
    if labels:
        found["labels"] = dict(group.labels)
    return found


def _pod(
    profile: ClusterProfile,
    container: Object,
    volumes: list[Object],
    mounts: list[Object],
    shared_memory: str,
) -> Object:
    """A pod with what both kinds have: jobs' folder, shared memory, Ray's files."""
    storage = profile.storage
    container["volumeMounts"] = [
        *mounts,
        {"name": JOBS, "mountPath": storage.jobs.path},
        {"name": SHARED_MEMORY, "mountPath": "/dev/shm"},
        {"name": RAY_FILES, "mountPath": RAY_FOLDER},
    ]
    memory = {"medium": "Memory", "sizeLimit": shared_memory}
    pod: Object = {
        "securityContext": pod_security(profile),
        "enableServiceLinks": False,
        "containers": [container],
        "volumes": [
            *volumes,
            _claimed(JOBS, claim_name(profile, storage.jobs, JOBS)),
            {"name": SHARED_MEMORY, "emptyDir": memory},
            {"name": RAY_FILES, "emptyDir": {}},
        ],
    }
    if profile.image.pull_secret is not None:
        pod["imagePullSecrets"] = [{"name": profile.image.pull_secret}]
    if profile.kubernetes.priority_class is not None:
        pod["priorityClassName"] = profile.kubernetes.priority_class
    return pod


def _variables(profile: ClusterProfile, group: NodeGroup | None) -> list[Object]:
    given = environment(profile, group)
    # KubeRay sets these two itself: the one with its secret, the other with the group's name.
    for name in ("RAY_AUTH_MODE", "RAY_NODE_TYPE_NAME"):
        given.pop(name, None)
    found = plain(given)
    if profile.security.wandb_secret is not None:
        found.append(of_secret("WANDB_API_KEY", profile.security.wandb_secret, "WANDB_API_KEY"))
    return found


def _placing(selector: dict[str, str], tolerated: list[Object]) -> Object:
    found: Object = {"nodeSelector": dict(selector)} if selector else {}
    return found | ({"tolerations": tolerated} if tolerated else {})


def _claimed(name: str, claim: str) -> Object:
    return {"name": name, "persistentVolumeClaim": {"claimName": claim}}
