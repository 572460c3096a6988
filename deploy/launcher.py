"""A cluster as one file for Ray's cluster launcher (``ray up``): aws, gcp, azure, own hosts.

At a cloud everything runs in one container a machine, as the image's user; what the launcher
expects of the image (its HOME, rsync, the cloud's packages) is in ``container``. Promises: pure;
valid by Ray's own schema; ranks run on nodes of the groups alone; Ray's token travels as a file
(0600) that ``ray up`` copies over ssh, never as a value; dashboard and API stay on the head's
loopback unless the profile says otherwise (`ray attach -p 8443` forwards the port).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from deploy.cluster_profile import ClusterProfile, NodeGroup, Target
from deploy.container import CLOUD_MODULES
from deploy.profile_values import mebibytes
from deploy.ray_options import (
    GCS_PORT,
    OPEN_FILES,
    api_options,
    environment,
    head_options,
    head_shared_memory,
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
    found["initialization_commands"] = [] if own else machine_commands(profile)
    found["setup_commands"] = [f"chmod 600 {TOKEN}"]
    if not own:
        found["head_setup_commands"] = [_packages_there(target)]
    found["head_start_ray_commands"] = head_commands(profile, own_hosts=own)
    found["worker_start_ray_commands"] = worker_commands(profile, own_hosts=own)
    return found


def machine_commands(profile: ClusterProfile) -> list[str]:
    """On a cloud's machine, as its user with sudo, before the container is started."""
    user, storage = profile.kubernetes.user_id, profile.storage
    home, jobs = storage.home.path, storage.jobs.path
    own = f"{jobs} is this machine's own disk: mount a shared one (storage.jobs.nfs, cloud.prepare)"
    found = [
        *profile.cloud.prepare,
        # The token is the machine user's file (0600), and the container's user reads it.
        f'test "$(id -u)" = {user} || {{ echo "the user of this machine has id $(id -u), that of '
        f'the image {user}: build it with kubernetes.user_id: $(id -u)" >&2; exit 1; }}',
        f"sudo mkdir -p {jobs}",
    ]
    if storage.jobs.nfs is not None:
        source = storage.jobs.nfs
        found.append(
            "command -v mount.nfs > /dev/null || "
            "{ sudo apt-get update && sudo apt-get install --yes nfs-common; }"
        )
        found.append(
            f"mountpoint -q {jobs} || "
            f"sudo mount -t nfs -o hard,timeo=600,retrans=2,noresvport {source} {jobs}"
        )
    return [
        *found,
        f'test "$(stat -c %d {jobs})" != "$(stat -c %d /)" || {{ echo "{own}" >&2; exit 1; }}',
        # Docker would make what is not there as root's.
        f"test -w {jobs} || sudo chown {user}:{user} {jobs}",
        f"test -w {home} || sudo install -d -o {user} -g {user} -m 700 {home}",
    ]


def _packages_there(target: Target) -> str:
    """A command that fails where the head's image can't start machines."""
    modules = ", ".join(CLOUD_MODULES[target])
    told = f"the image can't start machines at {target}: build it with target: {target}"
    return f"python -c 'import {modules}' || {{ echo \"{told}\" >&2; exit 1; }}"


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
        found["subscription_id"] = cloud.subscription
        # Else stopped machines are kept, and their disks paid for.
        found["cache_stopped_nodes"] = False
        if cloud.zone is not None:
            found["availability_zone"] = cloud.zone
    else:
        hosts = [host for group in profile.node_groups for host in group.hosts]
        found |= {"head_ip": profile.head.address, "worker_ips": hosts}
    return found


def _container(profile: ClusterProfile) -> Object:
    """One container a machine, with the host's network. What differs by group is in its type."""
    image, storage = profile.image, profile.storage
    found: Object = {
        "image": image.gpu or image.cpu,
        "container_name": CONTAINER,
        "pull_before_run": True,
        "run_options": [
            "--ulimit=nofile=65536:65536",
            "--ulimit=memlock=-1",
            f"--volume={storage.jobs.path}:{storage.jobs.path}",
        ],
        "head_run_options": [
            _shared_memory(head_shared_memory(profile)),
            f"--volume={storage.home.path}:{storage.home.path}",
        ],
    }
    if image.gpu is not None and image.cpu is not None:
        found["head_image"] = image.cpu
    return found


def _group_container(profile: ClusterProfile, group: NodeGroup) -> Object:
    """What a group's containers have of their own."""
    image = profile.image
    options = [_shared_memory(mebibytes(group.shared_memory))]
    if group.gpus:
        options.append("--gpus=all")
    found: Object = {"worker_run_options": options}
    if not group.gpus and image.cpu is not None:
        found["worker_image"] = image.cpu
    return found


def _shared_memory(mebi: int) -> str:
    # Docker gives 64 MiB, where Ray's objects and NCCL's buffers have no room.
    return f"--shm-size={mebi}m"


def _node_types(profile: ClusterProfile, target: Target) -> Object:
    head: Object = {
        "resources": {"CPU": 0},
        "min_workers": 0,
        "max_workers": 0,
        "node_config": _node_config(profile, target, profile.head.instance),
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
        "node_config": _node_config(profile, target, group.instance, group),
        "docker": _group_container(profile, group),
    }
    if group.labels:
        found["labels"] = dict(group.labels)
    return found


def _node_config(
    profile: ClusterProfile, target: Target, instance: str | None, group: NodeGroup | None = None
) -> Object:
    """A machine of ``group``, or the head's, as the cloud's own API has it."""
    image, gigabytes = profile.cloud.image or "", mebibytes(profile.cloud.disk) // 1024
    spot = group is not None and group.spot
    if target == "aws":
        found: Object = {"InstanceType": instance, "ImageId": image}
        # Version 2 alone: a process that can be made to fetch a URL gets no credentials.
        found["MetadataOptions"] = {"HttpTokens": "required"}
        disk: Object = {"VolumeSize": gigabytes, "VolumeType": "gp3", "DeleteOnTermination": True}
        found["BlockDeviceMappings"] = [{"DeviceName": profile.cloud.root_device, "Ebs": disk}]
        if spot:
            found["InstanceMarketOptions"] = {"MarketType": "spot"}
        return found
    if target == "gcp":
        boots: Object = {"boot": True, "autoDelete": True, "type": "PERSISTENT"}
        boots["initializeParams"] = {"diskSizeGb": gigabytes, "sourceImage": image}
        found = {"machineType": instance, "disks": [boots]}
        # Machines with GPUs can't be moved while they run, nor those that may be taken away.
        if group is not None and (group.gpus or spot):
            scheduling: list[Object] = [{"onHostMaintenance": "TERMINATE"}]
            found["scheduling"] = [*scheduling, {"preemptible": True}] if spot else scheduling
        return found
    names = ("imagePublisher", "imageOffer", "imageSku", "imageVersion")
    parameters: Object = {"vmSize": instance, "osDiskSize": gigabytes}
    parameters |= dict(zip(names, image.split(":"), strict=True))
    if spot:
        parameters |= {"priority": "Spot", "billingProfile": {"maxPrice": -1}}
    return {"azure_arm_parameters": parameters}
