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

import re
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

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

_QUANTITY = re.compile(r"[1-9]\d{0,6}(Mi|Gi|Ti)")
_MIB = {"Mi": 1, "Gi": 1024, "Ti": 1024 * 1024}
_SECRET_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_PLAIN = re.compile(r"[A-Za-z0-9_./:@=+,~-]+")


def _quantity(text: str) -> str:
    if not _QUANTITY.fullmatch(text):
        raise ValueError("is no amount of memory, which is as 512Mi, 64Gi or 2Ti")
    return text


def _secret_name(text: str) -> str:
    if not _SECRET_NAME.fullmatch(text):
        raise ValueError(
            "is no name of a Kubernetes secret (lower-case letters, digits, dashes): "
            "name the secret here, and put the value into it"
        )
    return text


def _plain(text: str) -> str:
    # What is rendered from it are shell scripts and units: a quote or blank would end a word.
    if not _PLAIN.fullmatch(text):
        raise ValueError("may have letters, digits and _./:@=+,~- only")
    return text


def _absolute(text: str) -> str:
    if not _plain(text).startswith("/"):
        raise ValueError("must be an absolute path, the same on every node")
    return text


def _host(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.:-]*[A-Za-z0-9])?", text):
        raise ValueError("is no address or host name")
    return text


def _image(text: str) -> str:
    name, _, tag = _plain(text).rpartition("/")[2].partition(":")
    if "@sha256:" not in text and (not name or not tag or tag == "latest"):
        raise ValueError("needs a tag of its own or a digest: every node must run the same image")
    return text


Quantity = Annotated[str, AfterValidator(_quantity)]
SecretName = Annotated[str, AfterValidator(_secret_name)]
Word = Annotated[str, AfterValidator(_plain)]
AbsolutePath = Annotated[str, AfterValidator(_absolute)]
HostName = Annotated[str, AfterValidator(_host)]
ImageName = Annotated[str, AfterValidator(_image)]


def mebibytes(quantity: str) -> int:
    """``64Gi`` → 65536."""
    return int(quantity[:-2]) * _MIB[quantity[-2:]]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Toleration(_Section):
    """Of a Kubernetes taint."""

    key: Word
    operator: Literal["Exists", "Equal"] = "Exists"
    value: Word | None = None
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
    node_selector: dict[Word, Word] = {}
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
    gpu_resource: Word = "nvidia.com/gpu"
    """What Kubernetes calls a GPU there."""
    labels: dict[Word, Word] = {}
    """Ray labels of its nodes, besides ``ray.io/node-group``, which is its name."""
    node_selector: dict[Word, Word] = {}
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
    rdma: Literal["none", "infiniband", "roce", "efa"] = "none"
    rdma_resource: Word | None = None
    """What Kubernetes calls one adapter, as rdma/hca_shared_devices_a."""
    rdma_count: int = Field(1, ge=1, le=64)
    """Adapters a node."""


class VolumeConfig(_Section):
    """A folder, and in Kubernetes the volume that it is on."""

    path: AbsolutePath
    claim: SecretName | None = None
    """A claim that is there already; unset: one is made."""
    storage_class: Word | None = None
    size: Quantity = "100Gi"


class HomeVolume(VolumeConfig):
    """Of the controller: its store, its token, its settings."""

    path: AbsolutePath = "/octavo/home"
    size: Quantity = "20Gi"


class JobsVolume(VolumeConfig):
    """Of jobs' directories: every node sees it under the same path."""

    path: AbsolutePath = "/octavo/jobs"
    size: Quantity = "1Ti"


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
    allow_namespaces: tuple[SecretName, ...] = ()
    """Kubernetes namespaces that may reach the API."""
    ray_token_secret: SecretName | None = None
    """Kubernetes secret with Ray's token (key auth_token); unset: KubeRay makes one."""
    ray_token_file: Word = "~/.ray/auth_token"
    """Ray's token (0600), elsewhere than on Kubernetes; the same on every host."""
    wandb_secret: SecretName | None = None
    """Kubernetes secret with W&B's key (key WANDB_API_KEY)."""


class RedisConfig(_Section):
    """A Redis for Ray's tables: jobs outlive the loss of Ray's head with it."""

    address: Word
    """HOST:PORT, or rediss://HOST:PORT for TLS."""
    password_secret: SecretName | None = None
    """Kubernetes secret with its password (key password)."""
    password_file: AbsolutePath | None = None
    """File with ``RAY_REDIS_PASSWORD=…`` (0600), elsewhere than on Kubernetes."""


class KubernetesConfig(_Section):
    """Of the Kubernetes cluster."""

    namespace: SecretName = "octavo"
    operator_namespace: SecretName = "kuberay-operator"
    priority_class: SecretName | None = None
    user_id: int = Field(1000, ge=1)
    """Of all processes in containers, and the group of their volumes."""


class SlurmConfig(_Section):
    """Of Slurm."""

    partition: Word | None = None
    account: Word | None = None
    time: str = Field("1-00:00:00", pattern=r"^(\d+-)?\d{1,3}(:\d\d){0,2}$")
    notice_s: int = Field(300, ge=60, le=3600)
    """Seconds before the time is up at which jobs are paused after a checkpoint."""


class CloudConfig(_Section):
    """Of the account at a cloud."""

    region: Word | None = None
    zone: Word | None = None
    project: Word | None = None
    """At gcp."""
    resource_group: Word | None = None
    """At azure."""
    image: Word | None = None
    """Machine image with driver and container runtime; unset: Ray's choice."""
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

    currency: str = Field("USD", pattern=r"^[A-Z]{3}$")
    node_hour: dict[str, Annotated[float, Field(ge=0)]] = {}


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
