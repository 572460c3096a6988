"""What every way of starting Ray has alike: versions, environment, the command words of a node.

Promises: pure; environment is ``CLUSTER_ENVIRONMENT``, so that a cluster that is rendered
and one that is started by hand behave alike when nodes die.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from importlib.metadata import version

from deploy.cluster_profile import ClusterProfile, NodeGroup
from deploy.profile_values import mebibytes
from orchestrator.cluster.environment import CLUSTER_ENVIRONMENT
from orchestrator.lifecycle import LONGEST_STOP_S

GCS_PORT = 6379
DASHBOARD_PORT = 8265
NODE_GROUP_VARIABLE = "RAY_NODE_TYPE_NAME"
"""Ray makes its label ``ray.io/node-group`` of it."""
LOOPBACK = "127.0.0.1"
EXIT_S = 30
"""Seconds that the head has for itself once its jobs are paused."""
HEAD_GRACE_S = int(LONGEST_STOP_S) + EXIT_S
"""Seconds that a platform gives the head to pause its jobs, each after a checkpoint. It exits as
soon as they are."""
OPEN_FILES = 'ulimit -n 65536 2> /dev/null || ulimit -n "$(ulimit -Hn)"'
"""For a shell: as many as Ray wants, or as many as it may have."""


def ray_version() -> str:
    """Of the Ray that is tested here."""
    return version("ray")


def environment(profile: ClusterProfile, group: NodeGroup | None = None) -> dict[str, str]:
    """Of Ray's processes on a node of ``group``, or on the head; ranks inherit it."""
    found = dict(CLUSTER_ENVIRONMENT)
    if group is not None:
        found[NODE_GROUP_VARIABLE] = group.name
    network = profile.network
    if network.interface is not None:
        found["GLOO_SOCKET_IFNAME"] = network.interface
        found["NCCL_SOCKET_IFNAME"] = network.interface
    # Of every node, since where one environment is all nodes' (a launcher's commands, a batch
    # script) none knows its group yet; nodes without GPUs have nothing that reads it.
    if any(each.gpus for each in profile.node_groups):
        if network.rdma == "none":
            found["NCCL_IB_DISABLE"] = "1"
        elif network.rdma == "efa":
            found["FI_PROVIDER"] = "efa"
    return found


def head_shared_memory(profile: ClusterProfile) -> int:
    """MiB of the head's memory for /dev/shm: no rank's state is there."""
    return min(4096, mebibytes(profile.head.memory) // 4)


def head_options(profile: ClusterProfile, dashboard: str = LOOPBACK) -> list[str]:
    """Of ``ray start --head``: no rank runs there, so it has no CPU to give."""
    return [
        "--num-cpus=0",
        "--num-gpus=0",
        f"--dashboard-host={dashboard}",
        "--disable-usage-stats",
    ]


def node_options(group: NodeGroup) -> list[str]:
    """Of ``ray start`` on a node of ``group``."""
    options = [f"--num-cpus={group.cpus}", f"--num-gpus={group.gpus}"]
    if group.labels:
        labels = ",".join(f"{key}={value}" for key, value in sorted(group.labels.items()))
        options.append(f"--labels={labels}")
    return options


def api_options(profile: ClusterProfile, cert: str | None = None, key: str | None = None) -> str:
    """Of the controller (``deploy.serve``), as words for a shell."""
    security = profile.security
    words: list[str] = ["--jobs-dir", profile.storage.jobs.path, "--port", str(security.port)]
    words += ["--listen", security.listen]
    if cert is not None and key is not None:
        words += ["--tls-cert", cert, "--tls-key", key]
    elif security.plain_http:
        words.append("--plain-http")
    return shell_words(words)


def shell_words(words: Sequence[str]) -> str:
    """One line for a shell."""
    return " ".join(shlex.quote(word) for word in words)
