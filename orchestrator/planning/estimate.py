"""All that is foretold of one completed spec: memory, traffic, time, cost, and whether it fits.

    found = estimate(spec, Hardware.of(spec), price=2.5)
    found.fits, found.step.total, found.memory.stages[0].parts()

Promises: pure; every total is the sum of its parts; for a model of a factory there is no estimate,
for its size is known to its ranks alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.planning.devices import (
    DEFAULT_CPU,
    DEFAULT_CPU_NETWORK,
    DEFAULT_GPU,
    DEFAULT_GPU_NETWORK,
    Device,
    Network,
    device_named,
    network_named,
)
from orchestrator.planning.memory import JobMemory, job_memory
from orchestrator.planning.shapes import held, shape_of, stages
from orchestrator.planning.step_time import Layout, StepTime, Wire, step_time
from orchestrator.planning.traffic import Traffic, traffic
from orchestrator.spec.backend import backend_of
from orchestrator.spec.completion import slots_per_node
from orchestrator.spec.job import JobSpec
from parallel.precision.choice import BackendRefusedError, recipes_on

USABLE = 0.94
"""Of a device's memory: its allocator keeps holes."""
FASTER, SLOWER = 0.81, 1.48
"""Over the time that is told, what runs on GPUs came to that nothing was fitted to: twelve
published ones of other systems (``tests/unit/test_plan_published.py``). None is of Octavo."""
MARGIN = 0.15
"""Of what a rank needs on a device, by which it may need more: on CPU what is in use comes out
within a few hundredths (``tests/benchmarks/bench_plan.py``), on a GPU nothing was tried."""
USABLE_HOST = 0.8
"""Of a node's memory: the system, the page cache of data, and Ray's own store take the rest."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a plan is made for."""

    device: Device
    network: Network
    node_memory: int = 0
    """Bytes of a node's memory; 0: as nodes with such devices are sold."""

    @classmethod
    def of(cls, spec: JobSpec) -> Hardware:
        """What ``resources`` names, or the defaults. Raises UnknownNameError."""
        on_gpu = bool(spec.gpus_per_node)
        device = spec.resources.device or (DEFAULT_GPU if on_gpu else DEFAULT_CPU)
        other = DEFAULT_GPU_NETWORK if on_gpu else DEFAULT_CPU_NETWORK
        return cls(device_named(device), network_named(spec.resources.network or other))


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of one completed spec on some hardware."""

    hardware: Hardware
    parameters: int
    parameters_a_rank: int
    """On the stage with most."""
    flops_per_token: float
    """Forward and backward, without recompute."""
    ranks: int
    fp8_speed: bool
    """Whether products run in the device's units for FP8."""
    memory: JobMemory
    device_bytes: int
    """Of the rank that needs most."""
    host_bytes: int
    """Of the node that needs most, in its memory: snapshots, and on CPU its ranks."""
    host_room: int
    """Of a node's memory, what can be used; 0: unknown."""
    traffic: Traffic
    step: StepTime
    tokens: int
    """A step."""
    steps: int
    price: float | None
    """Of a device an hour, in any currency."""

    @property
    def device_room(self) -> int:
        """Of a device's memory, what can be used; 0: unknown."""
        return int(USABLE * self.hardware.device.memory)

    @property
    def fits_device(self) -> bool:
        """Whether every rank fits, as far as is known."""
        return not self.device_room or self.device_bytes <= self.device_room

    @property
    def fits_narrowly(self) -> bool:
        """Whether every rank fits, and would not if it needed ``MARGIN`` more."""
        room = self.device_room
        return bool(room) and room / (1 + MARGIN) < self.device_bytes <= room

    @property
    def fits_host(self) -> bool:
        """Whether what is in a node's memory fits, as far as is known."""
        return not self.host_room or self.host_bytes <= self.host_room

    @property
    def fits(self) -> bool:
        """Both."""
        return self.fits_device and self.fits_host

    @property
    def tokens_a_second(self) -> float:
        """Of the whole job."""
        return self.tokens / self.step.total

    @property
    def flops_a_rank(self) -> float:
        """Operations a second that one rank spends on the model, recompute not counted."""
        return self.tokens_a_second * self.flops_per_token / self.ranks

    @property
    def mfu(self) -> float:
        """``flops_a_rank`` over the device's peak in BF16, whatever the job computes in."""
        return self.flops_a_rank / self.hardware.device.bf16

    @property
    def days(self) -> float:
        """Of all steps, without recoveries."""
        return self.steps * self.step.total / 86400

    @property
    def cost(self) -> float | None:
        """Of all ranks for so long; None without a price."""
        return None if self.price is None else self.price * self.ranks * self.days * 24

    @property
    def times(self) -> tuple[float, float] | None:
        """What ``step.total`` and all that follows from it may be, as shares of what is told; None
        on CPU, where it is an order of magnitude."""
        return (FASTER, SLOWER) if self.hardware.device.gpu else None

    @property
    def bubble(self) -> float:
        """Share of the step that pipeline stages stand idle."""
        return self.step.bubble / self.step.total

    def to_json(self) -> dict[str, Any]:
        """Plain values, of every property too."""
        ranks = [{**rank.parts(), "total": rank.total} for rank in self.memory.stages]
        return {
            "device": asdict(self.hardware.device),
            "network": asdict(self.hardware.network),
            "ranks": self.ranks,
            "fp8_speed": self.fp8_speed,
            "parameters": self.parameters,
            "parameters_a_rank": self.parameters_a_rank,
            "flops_per_token": self.flops_per_token,
            "memory": {
                "stages": ranks,
                "worst_stage": self.memory.worst,
                "device_room": self.device_room,
                "snapshot_a_rank": list(self.memory.snapshots),
                "snapshots_a_node": self.memory.host,
                "host_bytes": self.host_bytes,
                "host_room": self.host_room,
                "checkpoint": self.memory.checkpoint,
            },
            "fits": self.fits,
            "fits_device": self.fits_device,
            "fits_narrowly": self.fits_narrowly,
            "fits_host": self.fits_host,
            "traffic": {**self.traffic.parts(), "total": self.traffic.total},
            "step_s": {**self.step.parts(), "total": self.step.total},
            "step_s_range": [self.step.total * share for share in self.times or ()] or None,
            "bubble": self.bubble,
            "tokens_a_step": self.tokens,
            "tokens_a_second": self.tokens_a_second,
            "flops_a_rank": self.flops_a_rank,
            "mfu": self.mfu,
            "steps": self.steps,
            "days": self.days,
            "price_a_device_hour": self.price,
            "cost": self.cost,
        }


def at_fp8_speed(spec: JobSpec, device: Device) -> bool:
    """Whether products run in a device's units for FP8: in Transformer Engine, if it is installed.

    Native FP8 has FP8's numbers at BF16's speed on a GPU; on CPU there is no other.
    """
    if spec.precision != "fp8" or device.capability is None:
        return spec.precision == "fp8"
    try:
        native = backend_of(spec).backend == "native"
    except BackendRefusedError:
        native = True  # the checks refuse it
    return not native and spec.fp8.recipe in recipes_on(device.capability)


def estimate(spec: JobSpec, hardware: Hardware, price: float | None = None) -> Estimate:
    """Of a completed spec with the built-in model; ValueError for one of a factory."""
    if spec.model.factory is not None:
        raise ValueError("a model of model.factory has a size that only its ranks know")
    degrees, training = spec.parallelism, spec.training
    assert degrees.data is not None and training.train_batch_size is not None
    assert training.train_micro_batch_size_per_gpu is not None
    assert training.gradient_accumulation_steps is not None
    shape, sent = shape_of(spec.model), traffic(spec)
    cut = stages(spec.model, training.seq_len, degrees.pipeline, degrees.tensor)
    layout = Layout(
        tensor=degrees.tensor,
        pipeline=degrees.pipeline,
        data=degrees.data,
        per_node=slots_per_node(spec),
        micro_batches=training.gradient_accumulation_steps,
        tokens=training.train_micro_batch_size_per_gpu * training.seq_len,
        zero_stage=degrees.zero_stage,
        recompute=training.recompute == "full",
    )
    wire = Wire(
        sent.gradient_exchange + sent.tied, sent.parameter_gather, sent.tensor, sent.pipeline
    )
    device = hardware.device
    fp8 = at_fp8_speed(spec, device)
    times = (
        step_time(shape, stage, training.seq_len, layout, wire, device, hardware.network, fp8=fp8)
        for stage in sorted(set(cut), key=cut.index)
    )
    memory = job_memory(spec)
    most = memory.stages[memory.worst].total
    return Estimate(
        hardware=hardware,
        parameters=shape.parameters,
        parameters_a_rank=max(held(shape, stage, degrees.tensor).total for stage in cut),
        flops_per_token=shape.flops_per_token(training.seq_len),
        ranks=degrees.tensor * degrees.pipeline * degrees.data,
        fp8_speed=fp8,
        memory=memory,
        device_bytes=most,
        host_bytes=memory.host + most * slots_per_node(spec) * (not device.gpu),
        host_room=int(
            USABLE_HOST * (hardware.node_memory or device.host_memory * slots_per_node(spec))
        ),
        traffic=sent,
        step=max(times, key=lambda step: step.total),
        tokens=training.train_batch_size * training.seq_len,
        steps=training.steps,
        price=price,
    )
