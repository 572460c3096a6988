"""A cluster as one file for Ray's cluster launcher (``ray up``): aws, gcp, azure, own hosts.

Promises: pure; valid by Ray's own schema; ranks run on nodes of the groups alone; Ray's token
travels as a file (0600) that ``ray up`` copies over ssh, never as a value; dashboard and API stay
on the head's loopback unless the profile says otherwise (`ray attach -p 8443` forwards the port).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from deploy.cluster_profile import ClusterProfile, NodeGroup, Target
from deploy.ray_options import (
    GCS_PORT,
    OPEN_FILES,
    api_options,
    environment,
    head_options,
    node_options,
    shell_words,
)

Object = dict[str, Any]

HEAD_TYPE = "head"
TOKEN = "~/.ray/auth_token"
PROVIDERS = {"aws": "aws", "gcp": "gcp", "azure": "azure", "on-prem": "local"}
CONTAINER = "octavo"


def launcher_object(profile: ClusterProfile, target: Target) -> Object:
    """What ``ray up`` takes."""
    own = target == "on-prem"
    found: Object = {
        "cluster_name": profile.name,
        "max_workers": sum(group.most for group in profile.node_groups),
        "provider": _provider(profile, target),
        "auth": {"ssh_user": profile.hosts.user if own else profile.cloud.ssh_user},
        "file_mounts": {TOKEN: profile.security.ray_token_file},
    }
    if not own:
        found["idle_timeout_minutes"] = profile.cloud.idle_minutes
        found["docker"] = _container(profile)
        found["head_node_type"] = HEAD_TYPE
        found["available_node_types"] = _node_types(profile, target)
    found["initialization_commands"] = list(profile.cloud.prepare) if not own else []
    found["setup_commands"] = [f"chmod 600 {TOKEN}"]
    found["head_start_ray_commands"] = head_commands(profile, own_hosts=own)
    found["worker_start_ray_commands"] = worker_commands(profile, own_hosts=own)
    return found


def head_commands(profile: ClusterProfile, *, own_hosts: bool) -> list[str]:
    """That start Ray's head and the controller, which both stay when the commands have ended."""
    bin_folder = f"{profile.hosts.environment}/bin/" if own_hosts else ""
    address = profile.head.address if own_hosts else "$(hostname -I | cut -d' ' -f1)"
    options = [*head_options(profile), f"--port={GCS_PORT}"]
    options.append("--autoscaling-config=~/ray_bootstrap_config.yaml")
    if own_hosts:
        options.append(f"--node-ip-address={address}")
    security = profile.security
    given = exports(environment(profile))
    return [
        f"{bin_folder}ray stop",
        f"{given}; {OPEN_FILES}; {bin_folder}ray start --head {' '.join(options)}",
        f"{given}; {bin_folder}python -m deploy.serve {profile.storage.home.path} "
        f"--address {address}:{GCS_PORT} --once "
        f"{api_options(profile, security.tls_cert, security.tls_key)}",
    ]


def worker_commands(profile: ClusterProfile, *, own_hosts: bool) -> list[str]:
    """That start Ray on a node. At a cloud Ray itself says which group it is of.

    On hosts of one's own the launcher knows no groups: each node looks for its address in them.
    """
    bin_folder = f"{profile.hosts.environment}/bin/" if own_hosts else ""
    given = exports(environment(profile))
    if own_hosts:
        start = _start_by_address(profile, bin_folder)
    else:
        start = f"ray start --address=$RAY_HEAD_IP:{GCS_PORT}"
    return [f"{bin_folder}ray stop", f"{given}; {OPEN_FILES}; {start}"]


def _start_by_address(profile: ClusterProfile, bin_folder: str) -> str:
    cases = []
    for group in profile.node_groups:
        options = shell_words(node_options(group))
        common = environment(profile)
        own = environment(profile, group).items()
        more = exports({name: value for name, value in own if common.get(name) != value})
        pattern = "|".join(f"*' {host} '*" for host in group.hosts)
        cases.append(
            f"{pattern}) {more}; exec {bin_folder}ray start "
            f"--address=$RAY_HEAD_IP:{GCS_PORT} {options};;"
        )
    told = "echo 'this host is in no node group of the cluster profile' >&2; exit 1"
    return f'case " $(hostname -I) $(hostname) " in {" ".join(cases)} *) {told};; esac'


def exports(given: Mapping[str, str]) -> str:
    """As words for a shell."""
    words = " ".join(f"{name}={shlex.quote(value)}" for name, value in given.items())
    return f"export {words}"


def _provider(profile: ClusterProfile, target: Target) -> Object:
    cloud = profile.cloud
    found: Object = {"type": PROVIDERS[target]}
    if target == "aws":
        found |= {"region": cloud.region, "use_internal_ips": False, "cache_stopped_nodes": False}
        if cloud.zone is not None:
            found["availability_zone"] = cloud.zone
        # From outside ssh alone; among themselves nodes of one security group speak freely.
        found["security_group"] = {"GroupName": f"octavo-{profile.name}"}
    elif target == "gcp":
        found |= {
            "region": cloud.region,
            "availability_zone": cloud.zone,
            "project_id": cloud.project,
        }
    elif target == "azure":
        found |= {"location": cloud.region, "resource_group": cloud.resource_group}
    else:
        hosts = [host for group in profile.node_groups for host in group.hosts]
        found |= {"head_ip": profile.head.address, "worker_ips": hosts}
    return found


def _container(profile: ClusterProfile) -> Object:
    """Everything runs in one container a node, with the host's network and shared memory."""
    image = profile.image
    storage = profile.storage
    options = [
        "--ulimit=nofile=65536:65536",
        "--ulimit=memlock=-1",
        # Docker gives 64 MiB, where Ray's objects and NCCL's buffers have no room.
        "--ipc=host",
        f"--volume={storage.home.path}:{storage.home.path}",
        f"--volume={storage.jobs.path}:{storage.jobs.path}",
    ]
    if profile.network.rdma != "none":
        options.append("--device=/dev/infiniband")
    found: Object = {
        "image": image.gpu or image.cpu,
        "container_name": CONTAINER,
        "pull_before_run": True,
        "run_options": options,
    }
    if image.gpu is not None and image.cpu is not None:
        found["head_image"] = image.cpu
    return found


def _node_types(profile: ClusterProfile, target: Target) -> Object:
    head: Object = {
        "resources": {"CPU": 0},
        "min_workers": 0,
        "max_workers": 0,
        "node_config": _node_config(profile, target, profile.head.instance, spot=False),
    }
    found: Object = {HEAD_TYPE: head}
    for group in profile.node_groups:
        found[group.name] = _node_type(profile, group, target)
    return found


def _node_type(profile: ClusterProfile, group: NodeGroup, target: Target) -> Object:
    resources = {"CPU": group.cpus}
    if group.gpus:
        resources["GPU"] = group.gpus
    found: Object = {
        "resources": resources,
        "min_workers": group.fewest,
        "max_workers": group.most,
        "node_config": _node_config(profile, target, group.instance, spot=group.spot),
    }
    if group.labels:
        found["labels"] = dict(group.labels)
    return found


def _node_config(
    profile: ClusterProfile, target: Target, instance: str | None, *, spot: bool
) -> Object:
    image = profile.cloud.image
    if target == "aws":
        found: Object = {"InstanceType": instance}
        # Version 2 alone: a process that can be made to fetch a URL gets no credentials.
        found["MetadataOptions"] = {"HttpTokens": "required"}
        if image is not None:
            found["ImageId"] = image
        if spot:
            found["InstanceMarketOptions"] = {"MarketType": "spot"}
        return found
    if target == "gcp":
        found = {"machineType": instance}
        disk: Object = {
            "boot": True,
            "autoDelete": True,
            "type": "PERSISTENT",
            "initializeParams": {"diskSizeGb": 200},
        }
        if image is not None:
            disk["initializeParams"]["sourceImage"] = image
        found["disks"] = [disk]
        # Machines with GPUs can't be moved while they run.
        scheduling: list[Object] = [{"onHostMaintenance": "TERMINATE"}]
        if spot:
            scheduling.append({"preemptible": True})
        found["scheduling"] = scheduling
        return found
    parameters: Object = {"vmSize": instance}
    if image is not None:
        publisher, offer, sku, version = [*image.split(":"), "latest", "", ""][:4]
        parameters |= {
            "imagePublisher": publisher,
            "imageOffer": offer,
            "imageSku": sku,
            "imageVersion": version or "latest",
        }
    if spot:
        parameters |= {"priority": "Spot", "billingProfile": {"maxPrice": -1}}
    return {"azure_arm_parameters": parameters}
