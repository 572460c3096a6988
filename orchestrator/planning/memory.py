"""Bytes that one rank and one node hold, by kind: what the engine and the snapshots allocate.

As DeepSpeed 0.19 and Octavo really do it, not as ZeRO's paper counts:

- Under ZeRO 0 and 1 with FP32 accumulation (``BF16_Optimizer``) *every* rank has the whole FP32
  gradient of its stage, and the BF16 gradients that autograd made stay allocated beside it: six
  bytes a parameter. ZeRO 1 divides masters and moments alone.
- The gradients in BF16 are let go of after each step, not after each micro-batch; those of a matrix
  that embedding and head share stand side by side until they are added.
- Under ZeRO 2, and ZeRO 1 with ``deepspeed: {data_types: {grad_accum_dtype: bf16}}``
  (``DeepSpeedZeroOptimizer``), gradients go through a bucket of ``reduce_bucket_size`` elements,
  whose mean is taken in FP32, twice as large as the bucket and once more in rows.
- Native FP8 linears keep their weights quantized for a step, as values in BF16; Transformer Engine
  keeps eight bits of them in both directions, which is as much.
- A snapshot is parameters, masters and moments; the ring has ``keep`` + 1 of a rank's own, its
  keeper, the way there and partner nodes more (``launch.replicas.memory_needed``).

A step needs most at one of several moments (``_moments``): at the loss, in a layer's backward,
while a gradient is added up, while a bucket is reduced, in the update. Compared with CPU runs by
``tests/benchmarks/bench_plan.py``: what is in use is foretold; what is resident besides, in holes
between blocks, is not, and has a bound. On a GPU nothing was tried: ``runtime`` is what CUDA's
context, cuBLAS and NCCL may take.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from launch.replicas import RankState, memory_needed
from orchestrator.planning.activations import Widths, kept_bytes, working_bytes
from orchestrator.planning.shapes import Held, Stage, held, shape_of, stages
from orchestrator.spec.completion import slots_per_node
from orchestrator.spec.job import JobSpec
from parallel.deepspeed_config import accumulation_dtype
from parallel.precision.recipes import LINEARS, ROLES, expand

BUCKET = 500_000_000
"""DeepSpeed's default ``zero_optimization.reduce_bucket_size``, in elements."""
GPU_RUNTIME = 2_000_000_000
"""CUDA's context, cuBLAS workspaces and NCCL's channels of three groups, about."""
CPU_RUNTIME = 10_000_000
"""Scratch memory of products and of the first calls of a larger model, measured."""
CPU_HOLES = 2.0
"""Of activations and what is needed for a while, what glibc keeps free between blocks on CPU at
most. Measured, it is from 0.4 to 2.0 of it, by which blocks happen to lie side by side."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Of a rank of one stage, at the step's peak; bytes. ``total`` is the sum of all fields."""

    weights: int
    """Parameters in BF16."""
    masters: int
    """FP32, this rank's part."""
    moments: int
    """Adam's two, FP32, this rank's part."""
    gradients: int
    """As autograd made them, and as they are added up."""
    error_feedback: int
    activations: int
    """Of all micro-batches under way."""
    working: int
    """The largest of what is needed for a while: the loss, a layer's backward, the update."""
    fp8: int
    """Quantized weights of a step, and scaling state."""
    exchange: int
    """Buffers of the gradient exchange."""
    runtime: int
    """What the device's libraries take, without the imports of a rank on CPU."""
    holes: int
    """On CPU, what the allocator keeps free between blocks at most; on a GPU ``estimate.USABLE`` is
    for that."""

    @property
    def total(self) -> int:
        """All kinds together."""
        return sum(self.parts().values())

    @property
    def alive(self) -> int:
        """What is in use at the peak."""
        return self.total - self.holes

    @property
    def state(self) -> int:
        """What is there from the first step to the last."""
        return self.weights + self.masters + self.moments + self.gradients

    def parts(self) -> dict[str, int]:
        """By kind."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True)
class JobMemory:
    """Of a whole job."""

    stages: tuple[RankMemory, ...]
    """A rank of each pipeline stage."""
    snapshots: tuple[int, ...]
    """Bytes of one snapshot of a rank of each stage."""
    host: int
    """Snapshots on the node that holds most, in its memory."""
    host_least: int
    """On the one that holds least."""
    checkpoint: int
    """One checkpoint on disk: every rank writes its own state."""

    @property
    def worst(self) -> int:
        """The stage whose ranks need most."""
        return max(range(len(self.stages)), key=lambda i: self.stages[i].total)


def job_memory(spec: JobSpec) -> JobMemory:
    """Of a completed spec with the built-in model."""
    degrees, training = spec.parallelism, spec.training
    cut = stages(spec.model, training.seq_len, degrees.pipeline, degrees.tensor)
    # Worked out once for stages that are alike: a pipeline may have a hundred.
    alike = {(stage, _under_way(spec, i)): i for i, stage in enumerate(cut)}
    ranks = {key: rank_memory(spec, i) for key, i in alike.items()}
    snapshots = {stage: snapshot_bytes(spec, i) for (stage, _), i in alike.items()}
    of_stages = tuple(snapshots[stage] for stage in cut)
    on_nodes = host_bytes(spec, of_stages)
    return JobMemory(
        tuple(ranks[stage, _under_way(spec, i)] for i, stage in enumerate(cut)),
        of_stages,
        max(on_nodes),
        min(on_nodes),
        sum(of_stages) * degrees.tensor * (degrees.data or 1),
    )


def _under_way(spec: JobSpec, stage: int) -> int:
    """Micro-batches whose activations a stage holds at most: DeepSpeed's 1F1B schedule."""
    accumulation = spec.training.gradient_accumulation_steps
    assert accumulation is not None, "the spec is complete"
    return min(spec.parallelism.pipeline - stage, accumulation)


def rank_memory(spec: JobSpec, stage: int) -> RankMemory:
    """Of a rank of ``stage``."""
    degrees, training = spec.parallelism, spec.training
    assert degrees.data is not None and training.train_micro_batch_size_per_gpu is not None
    shape, on_gpu, fp8 = shape_of(spec.model), bool(spec.gpus_per_node), spec.precision == "fp8"
    here = stages(spec.model, training.seq_len, degrees.pipeline, degrees.tensor)[stage]
    mine = held(shape, here, degrees.tensor)
    parts = degrees.data if degrees.zero_stage else 1
    widths = Widths.of(shape, degrees.tensor)
    tokens = training.train_micro_batch_size_per_gpu * training.seq_len
    under_way = _under_way(spec, stage)
    how = {
        "fp8": fp8,
        "on_gpu": on_gpu,
        "recompute": training.recompute == "full",
    }
    kept = kept_bytes(widths, here.layers, head=here.head, **how) * tokens
    # A stage keeps what it sent and received for every micro-batch under way.
    between = 2 * widths.hidden * tokens * 2 if degrees.pipeline > 1 else 0
    activations = (kept + between) * under_way
    exchange = _exchange_bytes(spec, mine)
    working = max(0, *_moments(spec, here, mine, exchange, kept, activations, under_way))
    return RankMemory(
        weights=2 * mine.total,
        masters=4 * mine.total // parts,
        moments=8 * mine.total // parts,
        gradients=_gradient_bytes(spec, mine),
        error_feedback=_feedback_bytes(spec, mine),
        activations=activations,
        working=working,
        fp8=_fp8_bytes(spec, mine, here.layers),
        exchange=exchange.stays,
        runtime=GPU_RUNTIME if on_gpu else CPU_RUNTIME,
        holes=0 if on_gpu else int(CPU_HOLES * (activations + working)),
    )


def _moments(
    spec: JobSpec,
    here: Stage,
    mine: Held,
    exchange: _Exchange,
    kept: int,
    activations: int,
    under_way: int,
) -> Iterator[int]:
    """What is there for a while at each moment at which a step may need most.

    Beyond the state and all ``activations``: those of ``under_way`` micro-batches, each of which
    has ``kept`` of its layers.
    """
    degrees, training = spec.parallelism, spec.training
    assert degrees.data is not None and training.train_micro_batch_size_per_gpu is not None
    shape, data = shape_of(spec.model), degrees.data
    tokens = training.train_micro_batch_size_per_gpu * training.seq_len
    at_loss, in_layer = working_bytes(
        Widths.of(shape, degrees.tensor),
        head=here.head,
        fp8=spec.precision == "fp8",
        on_gpu=bool(spec.gpus_per_node),
        recompute=training.recompute == "full",
    )
    gate_up = 2 * shape.hidden * shape.ffn // degrees.tensor
    table = shape.table if here.embedding or here.head else 0
    # A shared matrix has the head's gradient until the embedding has made its own.
    tied = 2 * table if shape.tied and here.embedding and here.head else 0
    # DeepSpeed lets go of the gradients in BF16 after each step: where the first backward finds all
    # activations there are, they aren't there yet, and later fewer activations are.
    first = training.gradient_accumulation_steps == under_way and not takes_buckets(spec)
    for moment in (at_loss * tokens, in_layer * tokens + 2 * gate_up + tied + exchange.bucket):
        yield moment - 2 * mine.total * first
        if first and under_way > 1:
            yield moment - activations // under_way
    # A gradient is made beside the one that it is added to, then added up in FP32, when its
    # micro-batch's activations are gone; a shared matrix's three stand side by side.
    yield max(4 * max(gate_up, table), 3 * tied) - kept
    yield exchange.bucket + exchange.reducing - kept * (mine.total <= bucket_size(spec))
    # The update comes when all activations are gone.
    parts = data if degrees.zero_stage else 1
    yield exchange.update + _update_bytes(spec, mine, parts) - activations


def snapshot_bytes(spec: JobSpec, stage: int) -> int:
    """Of one snapshot of a rank of ``stage``, on host memory and on disk."""
    degrees = spec.parallelism
    assert degrees.data is not None
    here = stages(spec.model, spec.training.seq_len, degrees.pipeline, degrees.tensor)[stage]
    mine = held(shape_of(spec.model), here, degrees.tensor)
    parts = degrees.data if degrees.zero_stage else 1
    state = 2 * mine.total + 12 * mine.total // parts
    feedback = _feedback_bytes(spec, mine) // 2  # the copy of it during a step isn't state
    return state + feedback + _scaling_state(spec, here.layers)


def host_bytes(spec: JobSpec, snapshots: Sequence[int]) -> tuple[int, ...]:
    """Of all snapshots on a node; of each kind of nodes that there is, by what they hold.

    ``snapshots``: of a rank of each stage. Nodes have consecutive ranks, and a node's partners are
    the next ones.
    """
    degrees, per_node = spec.parallelism, slots_per_node(spec)
    assert degrees.data is not None
    of_stage = degrees.data * degrees.tensor
    copies = min(spec.snapshots.replicas or 0, spec.num_nodes - 1)

    def own(node: int) -> int:
        first, last = node * per_node, (node + 1) * per_node
        return sum(
            snapshots[stage] * (min(last, (stage + 1) * of_stage) - max(first, stage * of_stage))
            for stage in range(first // of_stage, min(-(-last // of_stage), degrees.pipeline))
        )

    # Nodes amid the ranks of one stage, as the nodes before them are, are all alike.
    starts = (stage * of_stage // per_node for stage in range(degrees.pipeline))
    nodes = {(start + n) % spec.num_nodes for start in starts for n in range(copies + 2)}
    found = []
    for node in sorted(nodes):
        # What a node holds follows from itself and the ``copies`` nodes before it.
        ring = [own((node - n) % spec.num_nodes) for n in range(copies, -1, -1)]
        states = [RankState(i, nbytes, 0) for i, nbytes in enumerate(ring)]
        found.append(memory_needed(states, copies, spec.snapshots.keep, copies))
    return tuple(found)


def takes_buckets(spec: JobSpec) -> bool:
    """Whether DeepSpeed's optimizer is the one that reduces gradients in buckets."""
    stage = spec.parallelism.zero_stage
    return stage == 2 or (stage == 1 and accumulation_dtype(spec.deepspeed) == "bf16")


def bucket_size(spec: JobSpec) -> int:
    """Elements of one of its buckets at most."""
    section = spec.deepspeed.get("zero_optimization")
    asked = section.get("reduce_bucket_size") if isinstance(section, Mapping) else None
    return int(asked) if isinstance(asked, int | float) and asked >= 1 else BUCKET


def _gradient_bytes(spec: JobSpec, mine: Held) -> int:
    data, added = spec.parallelism.data or 1, accumulation_dtype(spec.deepspeed)
    width = 4 if added == "fp32" else 2
    if not takes_buckets(spec):
        return 2 * mine.total + width * mine.total
    if spec.parallelism.zero_stage == 2:
        return width * mine.total // data
    return 2 * mine.total + width * mine.total // data


def _feedback_bytes(spec: JobSpec, mine: Held) -> int:
    """The residual, and its copy while a step is under way; 0 where nothing is exchanged."""
    wanted = spec.gradient_exchange.error_feedback and (spec.parallelism.data or 1) > 1
    return 8 * (mine.linears + mine.tables) if wanted else 0


def _scaling_state(spec: JobSpec, layers: int) -> int:
    recipe = expand(spec.fp8)
    if spec.precision != "fp8" or not recipe.has_state:
        return 0
    operands = layers * len(LINEARS) * len(ROLES)
    return operands * (4 * recipe.amax_history_len + 5)


def _fp8_bytes(spec: JobSpec, mine: Held, layers: int) -> int:
    if spec.precision != "fp8":
        return 0
    of_weight = {"mxfp8": 4, "block": 4 if spec.fp8.use_f32_scales else 2}
    kept = spec.fp8.high_precision_layers
    share = max(0, layers - kept.first - kept.last) / layers if layers else 0.0
    quantized = int(mine.linears * share) * of_weight.get(spec.fp8.recipe, 2)
    return quantized + _scaling_state(spec, layers)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Buffers of the gradient exchange; bytes."""

    stays: int = 0
    """From the first step to the last."""
    bucket: int = 0
    """DeepSpeed's, during a backward."""
    reducing: int = 0
    """Copies of a bucket while its mean is taken, in the midst of a backward or at its end."""
    update: int = 0
    """Copies between the last backward and the next step."""


def _exchange_bytes(spec: JobSpec, mine: Held) -> _Exchange:
    data, bucketed = spec.parallelism.data or 1, takes_buckets(spec)
    if data == 1 and not bucketed:
        return _Exchange()
    config, wire = spec.gradient_exchange, spec.communication_data_type
    matrices = mine.linears + mine.tables
    numel = min(bucket_size(spec), matrices) if bucketed else matrices
    # Elements for each replica of a bucket on the wire.
    share = min(config.bucket, -(-numel // data))
    scattered = spec.parallelism.zero_stage > 0
    stays, copies = 0.0, 0.0
    if wire in ("fp8", "auto"):
        row = share * (config.block + 1) / config.block
        stays = 2 * 2 * data * row if scattered else 3 * 3 * data * row + 4 * share
    elif scattered:
        copies = 2 * (2 if wire == "bf16" else 4) * data * share
    elif wire == "bf16":
        copies = 2.0 * numel
    # gloo gathers the updated parameters by way of a copy.
    gathered = 2 * mine.total if scattered and not spec.gpus_per_node else 0
    if not bucketed:
        return _Exchange(int(stays), update=max(int(copies), gathered))
    # What is never touched of it takes no memory on CPU.
    bucket = 2 * (bucket_size(spec) if spec.gpus_per_node else numel)
    # The mean in FP32, and once more in a row for each replica.
    reducing = int(copies) + (4 + 4 * (data > 1)) * numel
    if spec.parallelism.zero_stage == 2:
        return _Exchange(int(stays), bucket, reducing, gathered)
    return _Exchange(int(stays), update=max(bucket + reducing, gathered))


def _update_bytes(spec: JobSpec, mine: Held, parts: int) -> int:
    """Gradients of this rank's part in one piece, where the optimizer takes buckets."""
    return 4 * mine.total // parts if takes_buckets(spec) else 0
