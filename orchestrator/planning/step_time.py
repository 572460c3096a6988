"""How long a step takes: a roofline of the busiest pipeline stage, and what is added to it.

    micro-batch = products / reached peak + attention / reached peak + memory traffic / bandwidth
                  + sums between tensor ranks + passing on to the next stage
    step        = micro-batches · micro-batch + bubble + gradient exchange + update
    bubble      = (stages - 1) / interleaved chunks · micro-batch

Octavo overlaps none of its communication with computing but the buckets of an exchange with their
own casts, so nothing is hidden here unless ``Hidden`` says so, as other systems' published runs
need. Not counted: what a rank waits for others' slower steps, and Python on CPU jobs of small
models, whose estimate is of little worth. Nothing of this was tried on a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from orchestrator.planning.activations import Widths, layer_bytes
from orchestrator.planning.devices import NETWORK_SHARE, Device, Network
from orchestrator.planning.shapes import Shape, Stage, held

_PASSES = 4
"""Times that what a layer keeps crosses memory in forward and backward: written, read, and its
gradient the same."""
_UPDATE_BYTES = 28
"""Read and written a parameter by Adam: gradient, master and moments in FP32."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the work is divided."""

    tensor: int
    pipeline: int
    data: int
    per_node: int
    """Ranks of a node."""
    micro_batches: int
    """A step, on one replica."""
    tokens: int
    """A micro-batch, on one rank."""
    zero_stage: int = 1
    recompute: bool = False
    interleave: int = 1
    """Chunks a stage in an interleaved schedule; Octavo's has 1."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """Share of communication that computing hides; Octavo hides none."""

    tensor: float = 0.0
    pipeline: float = 0.0
    exchange: float = 0.0


@dataclass(frozen=True, slots=True)
class Wire:
    """Bytes that a rank of the busiest stage sends in a step."""

    exchange: int
    gather: int
    """Parameters after the update."""
    tensor: int
    pipeline: int


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step; ``total`` is the sum of all fields."""

    products: float
    """Matrix products of linears and head, recompute included."""
    attention: float
    memory: float
    """What is bound by memory's bandwidth: norms, activations, casts."""
    tensor: float
    pipeline: float
    bubble: float
    exchange: float
    """Of gradients, and of updated parameters."""
    update: float

    @property
    def total(self) -> float:
        """All kinds together."""
        return sum(self.parts().values())

    def parts(self) -> dict[str, float]:
        """By kind."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def step_time(
    shape: Shape,
    stage: Stage,
    seq_len: int,
    layout: Layout,
    wire: Wire,
    device: Device,
    network: Network,
    *,
    fp8: bool,
    hidden: Hidden | None = None,
) -> StepTime:
    """Of a step whose busiest stage is ``stage``; seconds."""
    hidden = hidden or Hidden()
    times, tokens = layout.micro_batches, layout.tokens
    mine = held(shape, stage, layout.tensor)
    products = _products_s(shape, stage, mine.linears, layout, device, fp8)
    # Each token meets half of the others before it, for scores and for values.
    scores = 2.0 * stage.layers * seq_len * shape.hidden * tokens / layout.tensor
    # A fused backward computes the scores once more.
    attention = scores * (3.5 + layout.recompute) / (device.bf16 * device.attention)
    widths = Widths.of(shape, layout.tensor)
    kept = layer_bytes(widths, fp8=fp8, on_gpu=device.gpu) * stage.layers * tokens
    memory = _PASSES * kept * (1.25 if layout.recompute else 1.0) / device.bandwidth
    of_tensor = (1 - hidden.tensor) * wire.tensor / times / (device.link * NETWORK_SHARE)
    passing = (1 - hidden.pipeline) * wire.pipeline / times
    of_pipeline = passing / _between_stages(layout, device, network)
    micro_batch = products + attention + memory + of_tensor + of_pipeline
    exchange = (1 - hidden.exchange) * (wire.exchange + wire.gather)
    parts = layout.data if layout.zero_stage else 1
    return StepTime(
        products=times * products,
        attention=times * attention,
        memory=times * memory,
        tensor=times * of_tensor,
        pipeline=times * of_pipeline,
        bubble=(layout.pipeline - 1) / layout.interleave * micro_batch,
        exchange=exchange * _exchange_s_a_byte(layout, device, network)
        + _latency(layout, network) * (layout.data > 1),
        update=(_UPDATE_BYTES * mine.total / parts + 8 * mine.total) / device.bandwidth,
    )


def _products_s(
    shape: Shape, stage: Stage, linears: int, layout: Layout, device: Device, fp8: bool
) -> float:
    """Matrix products of one micro-batch: forward, and twice that backward."""
    reached = device.fp8 * device.matmul_fp8 if fp8 else device.bf16 * device.matmul_bf16
    of_linears = 2.0 * linears * layout.tokens * (3 + layout.recompute) / reached
    # The head is whole on every tensor rank, and BF16.
    of_head = 6.0 * shape.table * layout.tokens * stage.head / (device.bf16 * device.matmul_bf16)
    return of_linears + of_head


def _local_replicas(layout: Layout) -> int:
    """Replicas of one stage that share a node, and so its links."""
    return max(1, min(layout.data, layout.per_node // layout.tensor))


def _rate(layout: Layout, network: Network) -> float:
    """Bytes a second that one rank reaches between nodes."""
    of_rank = network.rate / layout.per_node if network.shared else network.rate
    return NETWORK_SHARE * of_rank


def _exchange_s_a_byte(layout: Layout, device: Device, network: Network) -> float:
    """Seconds a byte of an all-to-all among replicas, by where its ends are."""
    local = _local_replicas(layout)
    others = max(1, layout.data - 1)
    near = (local - 1) / others / (NETWORK_SHARE * device.link)
    return near + (layout.data - local) / others / _rate(layout, network)


def _between_stages(layout: Layout, device: Device, network: Network) -> float:
    """Bytes a second from one stage to the next."""
    if layout.tensor * layout.data < layout.per_node:
        return NETWORK_SHARE * device.link
    return _rate(layout, network)


def _latency(layout: Layout, network: Network) -> float:
    return network.latency * math.ceil(math.log2(max(2, layout.data))) * 2
