"""Devices and networks by name, with what a plan needs to know of them and where that was read.

Speeds are the makers' dense peaks (without sparsity). What share of them is reached is fitted:
for H100 and B200 to ten published runs, each of which is then met within 8 %
(``tests/unit/test_plan_published.py`` has them, with their sources); an H200 is taken to reach what
an H100 does, and those of A100, L40S and of B200's products in BF16 are guesses by that measure.
Nothing here could be measured on a GPU.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

GB = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Device:
    """What one rank computes on."""

    name: str
    what: str
    source: str
    capability: tuple[int, int] | None
    """CUDA compute capability, by which Transformer Engine runs recipes; None: a CPU."""
    memory: int
    """Bytes; 0: unknown, so that everything fits."""
    bf16: float
    """Operations a second at most, of products in BF16."""
    fp8: float
    """The same in FP8; as ``bf16`` where FP8 is computed as BF16."""
    bandwidth: float
    """Bytes a second of its memory."""
    link: float
    """Bytes a second that it sends to another device of its node."""
    matmul_bf16: float
    """Share of ``bf16`` that products of a large model reach."""
    matmul_fp8: float
    attention: float
    """Share of ``bf16`` that fused attention reaches, forward and backward together."""
    host_memory: int
    """Bytes of its node's memory that are a device's share, as such nodes are sold; 0: unknown."""

    @property
    def gpu(self) -> bool:
        """Whether it is one."""
        return self.capability is not None


@dataclass(frozen=True, slots=True)
class Network:
    """What joins the nodes."""

    name: str
    what: str
    rate: float
    """Bytes a second that a device sends, or a node where ``shared``."""
    latency: float
    """Seconds of one message."""
    shared: bool = False
    """All ranks of a node share the rate."""


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device(
            name="h100",
            what="NVIDIA H100 SXM5, 80 GB",
            source="NVIDIA H100 data sheet; 2 TB a node of 8: DGX H100 user guide",
            capability=(9, 0),
            memory=80 * GB,
            bf16=989e12,
            fp8=1979e12,
            bandwidth=3.35e12,
            link=450e9,
            matmul_bf16=0.55,
            matmul_fp8=0.48,
            attention=0.32,
            host_memory=256 * GB,
        ),
        Device(
            name="h200",
            what="NVIDIA H200 SXM, 141 GB",
            source="NVIDIA H200 data sheet; an H100 with more and faster memory",
            capability=(9, 0),
            memory=141 * GB,
            bf16=989e12,
            fp8=1979e12,
            bandwidth=4.8e12,
            link=450e9,
            matmul_bf16=0.55,
            matmul_fp8=0.48,
            attention=0.32,
            host_memory=256 * GB,
        ),
        Device(
            name="b200",
            what="NVIDIA B200 SXM, 180 GB",
            source="NVIDIA DGX B200 data sheet, an eighth of the system's",
            capability=(10, 0),
            memory=180 * GB,
            bf16=2250e12,
            fp8=4500e12,
            bandwidth=8e12,
            link=900e9,
            matmul_bf16=0.50,
            matmul_fp8=0.44,
            attention=0.25,
            host_memory=256 * GB,
        ),
        Device(
            name="a100",
            what="NVIDIA A100 SXM4, 80 GB; no FP8",
            source="NVIDIA A100 data sheet; arXiv 2104.04473",
            capability=(8, 0),
            memory=80 * GB,
            bf16=312e12,
            fp8=312e12,
            bandwidth=2.039e12,
            link=300e9,
            matmul_bf16=0.65,
            matmul_fp8=0.65,
            attention=0.40,
            host_memory=128 * GB,
        ),
        Device(
            name="l40s",
            what="NVIDIA L40S, 48 GB, on PCIe 4.0",
            source="NVIDIA L40S data sheet",
            capability=(8, 9),
            memory=48 * GB,
            bf16=362e12,
            fp8=733e12,
            bandwidth=0.864e12,
            link=25e9,
            matmul_bf16=0.50,
            matmul_fp8=0.40,
            attention=0.30,
            host_memory=96 * GB,
        ),
        Device(
            name="cpu",
            what="one core with AVX-512 or AMX in BF16",
            source="bench_fp8_linear on this project's machine",
            capability=None,
            memory=0,
            bf16=200e9,
            fp8=200e9,
            bandwidth=10e9,
            link=2e9,
            matmul_bf16=0.7,
            matmul_fp8=0.5,
            attention=0.15,
            host_memory=0,
        ),
    )
}

NETWORKS: Mapping[str, Network] = {
    network.name: network
    for network in (
        Network("ib800", "InfiniBand XDR, 800 Gbit/s a device", 100e9, 4e-6),
        Network("ib400", "InfiniBand NDR, 400 Gbit/s a device", 50e9, 4e-6),
        Network("ib200", "InfiniBand HDR, 200 Gbit/s a device", 25e9, 4e-6),
        Network("roce400", "RDMA over Ethernet or EFA, 400 Gbit/s a device", 50e9, 8e-6),
        Network("roce200", "RDMA over Ethernet, 200 Gbit/s a device", 25e9, 8e-6),
        Network("eth100", "Ethernet, 100 Gbit/s a node", 12.5e9, 30e-6, shared=True),
        Network("eth25", "Ethernet, 25 Gbit/s a node", 3.125e9, 30e-6, shared=True),
        Network("eth10", "Ethernet, 10 Gbit/s a node", 1.25e9, 50e-6, shared=True),
        Network("eth1", "Ethernet, 1 Gbit/s a node", 0.125e9, 100e-6, shared=True),
    )
}

NETWORK_SHARE = 0.8
"""Of a network's rate, what collectives reach."""

DEFAULT_GPU, DEFAULT_GPU_NETWORK = "h100", "ib400"
DEFAULT_CPU, DEFAULT_CPU_NETWORK = "cpu", "eth10"

Named = TypeVar("Named", Device, Network)


class UnknownNameError(ValueError):
    """No device or network of that name; the message has those that there are."""


def device_named(name: str) -> Device:
    """Of ``DEVICES``; UnknownNameError for another name."""
    return _named(name, DEVICES, "device")


def network_named(name: str) -> Network:
    """Of ``NETWORKS``; UnknownNameError for another name."""
    return _named(name, NETWORKS, "network")


def _named(name: str, known: Mapping[str, Named], what: str) -> Named:
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UnknownNameError(f"no {what} {name!r} is known: {hint}there are {', '.join(known)}")
