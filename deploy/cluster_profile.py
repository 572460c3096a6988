"""The cluster profile: ``cluster.yaml``, the one description that everything here is rendered from.

    name: lab
    target: kuberay
    image: {gpu: "registry.example.com/octavo:0.1.0"}
    node_groups:
      - {name: h100, device: h100, gpus: 8, cpus: 96, memory: 1024Gi, min: 2, max: 16}
    storage: {jobs: {claim: octavo-jobs}}

Promises: frozen values, unknown keys refused (``profile_file`` reads and checks a file); nothing
that a shell would read otherwise gets into what is rendered. No secret is in a profile: it names
Kubernetes secrets and files of mode 0600, never a value.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from deploy.profile_values import (
    AbsolutePath,
    Currency,
    HostName,
    ImageName,
    LabelKey,
    LabelValue,
    Namespace,
    ObjectName,
    Quantity,
    RayLabel,
    RedisAddress,
    ResourceName,
    SecretName,
    SlurmTime,
    TokenFile,
    VolumePath,
    Word,
)
from orchestrator.spec.job import NAME_PATTERN

Target = Literal[
    "kuberay", "rayjob", "aws", "gcp", "azure", "on-prem", "slurm", "systemd", "container"
]
TARGETS: tuple[Target, ...] = get_args(Target)
KUBERNETES: tuple[Target, ...] = ("kuberay", "rayjob")
CLOUDS: tuple[Target, ...] = ("aws", "gcp", "azure")
OWN_HOSTS: tuple[Target, ...] = ("on-prem", "systemd")

Device = Literal[
    "cpu", "a100", "l40s", "h100", "h200", "gh200", "b200", "gb200", "b300", "other-gpu"
]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Toleration(_Section):
    """Of a Kubernetes taint."""

    key: LabelKey | None = None
    """Unset: of all taints, with operator Exists."""
    operator: Literal["Exists", "Equal"] | None = None
    """Unset: Equal where there is a value, else Exists."""
    value: LabelValue | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


class ImageConfig(_Section):
    """Container images: what nodes run, and what they are built on."""

    gpu: ImageName | None = None
    cpu: ImageName | None = None
    """Of the head, and of groups without GPUs; unset: as ``gpu``."""
    pull_secret: SecretName | None = None
    gpu_base: ImageName = "nvcr.io/nvidia/pytorch:26.10-py3"
    """NVIDIA's PyTorch image: driver libraries, NCCL and Transformer Engine inside."""
    cpu_base: ImageName = "python:3.11-slim-bookworm"


class HeadConfig(_Section):
    """The head: Ray's tables and the controller; no rank runs on it."""

    cpus: int = Field(4, ge=1, le=1024)
    memory: Quantity = "16Gi"
    address: HostName | None = None
    """Of the host, for on-prem and systemd."""
    instance: Word | None = None
    """Type of the machine at a cloud."""
    node_selector: dict[LabelKey, LabelValue] = {}
    tolerations: tuple[Toleration, ...] = ()


class NodeGroup(_Section):
    """Nodes that are alike."""

    name: str = Field(pattern=NAME_PATTERN)
    device: Device = "cpu"
    gpus: int = Field(0, ge=0, le=64)
    """A node."""
    cpus: int = Field(ge=1, le=4096)
    memory: Quantity
    shared_memory: Quantity = "16Gi"
    """Of ``memory``, for /dev/shm: Ray's objects, which snapshots are among, and NCCL's buffers."""
    count: int | None = Field(None, ge=0, le=100_000)
    """So many, always; or between ``min`` and ``max``."""
    min: int | None = Field(None, ge=0, le=100_000)
    max: int | None = Field(None, ge=1, le=100_000)
    instance: Word | None = None
    """Type of the machine at a cloud."""
    spot: bool = False
    """Cheaper, and taken away at will; at clouds."""
    hosts: tuple[HostName, ...] = ()
    """Addresses, for on-prem and systemd."""
    partition: Word | None = None
    """Of Slurm."""
    gpu_resource: ResourceName = "nvidia.com/gpu"
    """What Kubernetes calls a GPU there."""
    labels: dict[RayLabel, LabelValue] = {}
    """Ray labels of its nodes, besides ``ray.io/node-group``, which is its name."""
    node_selector: dict[LabelKey, LabelValue] = {}
    tolerations: tuple[Toleration, ...] = ()

    @property
    def fewest(self) -> int:
        return self.count if self.count is not None else self.min or 0

    @property
    def most(self) -> int:
        return self.count if self.count is not None else self.max or 0

    @property
    def scales(self) -> bool:
        """Whether its number changes with what jobs want."""
        return self.fewest != self.most


class NetworkConfig(_Section):
    """What ranks speak over."""

    interface: Word | None = None
    """For gloo and NCCL's sockets, as eth0; unset: theirs to choose."""
    rdma: Literal["auto", "none", "infiniband", "roce", "efa"] = "auto"
    """auto: NCCL takes what it finds; none: it is told to take none (NCCL_IB_DISABLE)."""
    rdma_resource: ResourceName | None = None
    """What Kubernetes calls one adapter, as rdma/hca_shared_devices_a or vpc.amazonaws.com/efa."""
    rdma_count: int = Field(1, ge=1, le=64)
    """Adapters a node."""


class VolumeConfig(_Section):
    """A folder, and in Kubernetes the volume that it is on."""

    path: VolumePath
    claim: ObjectName | None = None
    """A claim that is there already; unset: one is made."""
    storage_class: ObjectName | None = None
    size: Quantity = "100Gi"


class HomeVolume(VolumeConfig):
    """Of the controller: its store, its token, its settings."""

    path: VolumePath = "/octavo/home"
    size: Quantity = "20Gi"


class JobsVolume(VolumeConfig):
    """Of jobs' directories: every node sees it under the same path."""

    path: VolumePath = "/octavo/jobs"
    size: Quantity = "1Ti"
    nfs: Word | None = None
    """HOST:/EXPORT that each machine of a cloud mounts there, as EFS, Filestore or Azure Files."""


class StorageConfig(_Section):
    """What outlives nodes."""

    home: HomeVolume = HomeVolume()
    jobs: JobsVolume = JobsVolume()


class SecurityConfig(_Section):
    """Who is let in; secrets by name."""

    listen: str = "127.0.0.1"
    """Address of the API; beyond the loopback it speaks TLS."""
    port: int = Field(8443, ge=1, le=65535)
    tls_secret: SecretName | None = None
    """Kubernetes secret of type kubernetes.io/tls, for the API."""
    tls_cert: AbsolutePath | None = None
    tls_key: AbsolutePath | None = None
    """PEM files (the key 0600) on the head, elsewhere than on Kubernetes."""
    plain_http: bool = False
    """The API may listen beyond the loopback without TLS: the network is yours alone."""
    allow_namespaces: tuple[Namespace, ...] = ()
    """Kubernetes namespaces that may reach the API."""
    ray_token_secret: SecretName | None = None
    """Kubernetes secret with Ray's token (key auth_token); unset: KubeRay makes one."""
    ray_token_file: TokenFile = "~/.ray/auth_token"
    """Ray's token (0600), elsewhere than on Kubernetes; the same on every host."""
    wandb_secret: SecretName | None = None
    """Kubernetes secret with W&B's key (key WANDB_API_KEY)."""


class RedisConfig(_Section):
    """A Redis for Ray's tables: jobs outlive the loss of Ray's head with it."""

    address: RedisAddress
    """HOST:PORT, or rediss://HOST:PORT for TLS."""
    password_secret: SecretName | None = None
    """Kubernetes secret with its password (key password)."""
    password_file: AbsolutePath | None = None
    """File with ``RAY_REDIS_PASSWORD=…`` (0600), elsewhere than on Kubernetes."""


class KubernetesConfig(_Section):
    """Of the Kubernetes cluster."""

    namespace: Namespace = "octavo"
    operator_namespace: Namespace = "kuberay-operator"
    priority_class: ObjectName | None = None
    user_id: int = Field(1000, ge=1)
    """Of all processes in containers, and the group of their volumes."""


class SlurmConfig(_Section):
    """Of Slurm."""

    partition: Word | None = None
    account: Word | None = None
    time: SlurmTime = "1-00:00:00"
    notice_s: int = Field(300, ge=60, le=3600)
    """Seconds before the time is up at which jobs are paused after a checkpoint."""
    requeue: bool = True
    """When the time is up it goes on in another allocation, until the job is at its end."""


class CloudConfig(_Section):
    """Of the account at a cloud."""

    region: Word | None = None
    zone: Word | None = None
    project: Word | None = None
    """At gcp."""
    resource_group: Word | None = None
    """At azure."""
    subscription: Word | None = None
    """At azure, its id: without, Ray wants the packages of Azure's own command line too."""
    image: Word | None = None
    """Machine image with driver, Docker and NVIDIA's container runtime, for all machines: an AMI,
    projects/P/global/images/family/F, or PUBLISHER:OFFER:SKU:VERSION."""
    disk: Quantity = "300Gi"
    """Of each machine, for system and container image."""
    root_device: Word = "/dev/sda1"
    """At aws, what the machine image calls it: Amazon Linux has /dev/xvda."""
    ssh_user: Word = "ubuntu"
    prepare: tuple[str, ...] = ()
    """Commands on each machine before its container starts, as the mount of jobs' folder."""
    idle_minutes: int = Field(10, ge=1)
    """After which a node of a group that scales is given back."""


class HostsConfig(_Section):
    """Of machines that nobody but you manages, and of Slurm's."""

    environment: AbsolutePath = "/opt/octavo/.venv"
    """Python environment that Octavo is installed in, the same on all."""
    user: Word = "octavo"
    """Whom services run as, and who logs in."""


class PricesConfig(_Section):
    """What a node costs an hour, by group."""

    currency: Currency = "USD"
    node_hour: dict[str, Annotated[float, Field(ge=0, le=1e9)]] = {}


class ClusterProfile(_Section):
    """One cluster, which is one domain of trust (``deploy/SECURITY.md``)."""

    name: str = Field(pattern=NAME_PATTERN)
    target: Target | None = None
    """What is rendered where no other is asked for."""
    image: ImageConfig = ImageConfig()
    head: HeadConfig = HeadConfig()
    node_groups: tuple[NodeGroup, ...]
    network: NetworkConfig = NetworkConfig()
    storage: StorageConfig = StorageConfig()
    security: SecurityConfig = SecurityConfig()
    redis: RedisConfig | None = None
    kubernetes: KubernetesConfig = KubernetesConfig()
    slurm: SlurmConfig = SlurmConfig()
    cloud: CloudConfig = CloudConfig()
    hosts: HostsConfig = HostsConfig()
    prices: PricesConfig = PricesConfig()


def hourly(profile: ClusterProfile) -> str:
    """What the node groups cost an hour, from fewest nodes to most; empty without prices."""
    prices = profile.prices.node_hour
    if not prices:
        return ""
    groups = [(group, prices.get(group.name)) for group in profile.node_groups]
    bounds = [
        sum(price * number for (_, price), number in zip(groups, numbers, strict=True) if price)
        for numbers in ([g.fewest for g, _ in groups], [g.most for g, _ in groups])
    ]
    low, high = (f"{bound:g}" for bound in bounds)
    told = f"{low} {profile.prices.currency} an hour"
    if low != high:
        told = f"{low} to {high} {profile.prices.currency} an hour"
    unknown = [group.name for group, price in groups if price is None]
    return told + (f", without {', '.join(unknown)}" if unknown else "")
