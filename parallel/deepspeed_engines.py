"""DeepSpeed's engines with Octavo's hooks, and how to build one without its side effects.

Written against DeepSpeed 0.19.8. What is overridden, and why there:

- ``allreduce_no_retain`` receives the flat gradient of every parameter group, for the plain
  and the pipeline engine alike. One level deeper, in ``allreduce_bucket``, DeepSpeed has
  already copied all groups into one tensor and would copy the result back.
  (``_exec_reduce_grads`` can't be overridden: the pipeline's table of instructions holds the
  functions themselves.)
- ``_INSTRUCTION_MAP`` has the instructions whose time is this rank's own, and not a wait. The last
  stage's backward pass lets go of its logits there: DeepSpeed keeps those of two micro-batches,
  and nobody reads them any more.
- ``_take_model_step`` is where both engines run the optimizer.
- ``_do_optimizer_sanity_check`` refuses BF16 weights with FP32 accumulation under ZeRO 0. The
  optimizer that it would choose for ZeRO 1, BF16_Optimizer, partitions over a process group:
  given a group of this one rank it is ZeRO 0, with the same hooks.
- ``get_grads_for_norm`` of BF16_Optimizer takes the gradient norm from, and clips, the whole
  gradient on every rank. Where a rank has the mean of its own part alone, it is replaced on
  the object: the pipeline engine looks for that very class.
- ``gradient_reduction_w_predivide`` of DeepSpeedZeroOptimizer averages a bucket of gradients,
  once a step or under ZeRO 2 in every micro-batch, if it is told not to reduce-scatter. With
  FP32 accumulation what it returns is added to the gradients of this rank's partition; with
  BF16 the bucket itself is taken from there on.
- ``scaled_global_norm`` of it sums over all ranks for one parameter group after the other, and
  waits for ever where pipeline stages have different groups. Replaced, it sums once.

Promises: DeepSpeed is left as it was found, its classes and functions included; nothing of it
is printed while building (its messages go to this module's logger at level DEBUG).
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import deepspeed
import deepspeed.runtime.bf16_optimizer as bf16_optimizer
import torch
import torch.distributed as dist
from deepspeed.runtime.constants import BFLOAT16
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn
from torch.optim import Optimizer

from parallel.config import ParallelismConfig
from parallel.engine_state import takes_buckets
from parallel.model_plan import LayerPlan
from parallel.parameter_groups import is_counted
from parallel.step_hooks import BucketPiece, StepHooks
from parallel.tensor import TensorGroup
from parallel.topology import stage_boundaries

logger = logging.getLogger(__name__)


class _StepHooksMixin:
    """Overrides shared by the two engines; ``attach`` sets ``step_hooks``."""

    step_hooks: StepHooks
    seq_data_parallel_group: Any

    def allreduce_no_retain(
        self,
        bucket: Sequence[Tensor],
        dp_group: Any,
        numel_per_bucket: int = 0,
        dp_world_size: float | None = None,
    ) -> None:
        self.step_hooks.exchange(bucket)

    def _take_model_step(self, lr_kwargs: Any) -> None:
        self.step_hooks.before_update()
        super()._take_model_step(lr_kwargs)  # type: ignore[misc]
        self.step_hooks.after_update(applied=not self.optimizer.overflow)  # type: ignore[attr-defined]

    def _do_optimizer_sanity_check(self, basic_optimizer: Optimizer) -> Any:
        if self.zero_optimization_stage() == 0:  # type: ignore[attr-defined]
            return BFLOAT16
        return super()._do_optimizer_sanity_check(basic_optimizer)  # type: ignore[misc]

    def _configure_bf16_optimizer(self, optimizer: Optimizer | None) -> Any:
        if self.zero_optimization_stage() != 0:  # type: ignore[attr-defined]
            return super()._configure_bf16_optimizer(optimizer)  # type: ignore[misc]
        replicas = self.seq_data_parallel_group
        self.seq_data_parallel_group = dist.new_group(
            [dist.get_rank()], use_local_synchronization=True
        )
        try:
            return super()._configure_bf16_optimizer(optimizer)  # type: ignore[misc]
        finally:
            self.seq_data_parallel_group = replicas


class HookedEngine(_StepHooksMixin, DeepSpeedEngine):
    """DeepSpeed's plain engine with Octavo's hooks."""


_OWN_WORK = (schedule.LoadMicroBatch, schedule.ForwardPass, schedule.BackwardPass)
"""Instructions in which a rank waits for no other."""


def _counted(instruction: Callable[..., None]) -> Callable[..., None]:
    """The instruction, its time counted as this rank's own."""

    def counted(self: HookedPipelineEngine, **kwargs: Any) -> None:
        with self.step_hooks.clock.running():
            instruction(self, **kwargs)

    return counted


def _backward(self: HookedPipelineEngine, buffer_id: int) -> None:
    """DeepSpeed's backward pass, which clears the buffer on all stages but the last."""
    if self.is_last_stage():
        self.pipe_buffers["outputs"][buffer_id] = None
    PipelineEngine._exec_backward_pass(self, buffer_id)


class HookedPipelineEngine(_StepHooksMixin, PipelineEngine):
    """DeepSpeed's pipeline engine with Octavo's hooks."""

    _INSTRUCTION_MAP: ClassVar[dict[type, Callable[..., None]]] = {
        kind: _counted(instruction) if kind in _OWN_WORK else instruction
        for kind, instruction in (
            PipelineEngine._INSTRUCTION_MAP | {schedule.BackwardPass: _backward}
        ).items()
    }


class StagedModule(PipelineModule):
    """A pipeline of layers cut by their costs, every stage with a transformer layer.

    DeepSpeed's own cut by parameters builds every layer on every rank to count them, counts
    the embedding as if it were work, and may leave a stage without a transformer layer.
    """

    def __init__(
        self,
        plans: Sequence[LayerPlan],
        micro_batch: Callable[[], AbstractContextManager[None]],
        **kwargs: Any,
    ) -> None:
        """``micro_batch()`` stands around each forward of this stage."""
        self._plans = tuple(plans)
        self._micro_batch = micro_batch
        super().__init__([_layer_spec(plan) for plan in plans], **kwargs)

    def forward(self, forward_input: Any) -> Any:
        with self._micro_batch():
            return super().forward(forward_input)

    @torch.no_grad()
    def _synchronize_tied_weights(self) -> None:
        # Recorded by autograd, the broadcast would become part of every backward.
        super()._synchronize_tied_weights()

    def _partition_layers(self, method: str = "uniform") -> None:
        self.parts = stage_boundaries(
            [plan.cost for plan in self._plans],
            [plan.transformer for plan in self._plans],
            self.num_stages,
        )
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


class _PlannedLayer(LayerSpec):
    """A plan in the shape that PipelineModule builds."""

    def __init__(self, plan: LayerPlan) -> None:
        super().__init__(nn.Module)
        self._plan = plan

    def build(self, log: bool = False) -> nn.Module:
        return self._plan.build()


class _TiedLayer(TiedLayerSpec):
    """A plan whose module other layers share, on other stages too."""

    def __init__(self, plan: LayerPlan) -> None:
        super().__init__(plan.tied, nn.Module, forward_fn=plan.forward)
        self._plan = plan

    def build(self, log: bool = False) -> nn.Module:
        return self._plan.build()


def _layer_spec(plan: LayerPlan) -> LayerSpec:
    return _PlannedLayer(plan) if plan.tied is None else _TiedLayer(plan)


def staged_module(
    plans: Sequence[LayerPlan],
    degrees: ParallelismConfig,
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    micro_batch: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> StagedModule:
    """This rank's stage of the model, on DeepSpeed's grid of ranks."""
    topology = PipeModelDataParallelTopology(
        num_pp=degrees.pipeline, num_mp=degrees.tensor, num_dp=degrees.data
    )
    with _contained():
        # PipelineModule makes its groups through DeepSpeed's own layer over torch.distributed.
        deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False)
        return StagedModule(plans, micro_batch, topology=topology, loss_fn=loss_fn)


def replica_group(engine: Any) -> dist.ProcessGroup:
    """The data-parallel ranks that hold the same stage as this rank."""
    if isinstance(engine, PipelineEngine):
        return engine.grid.get_data_parallel_group()
    return engine.seq_data_parallel_group


def initialize(model: nn.Module, optimizer: Optimizer, config: dict[str, Any]) -> Any:
    """``deepspeed.initialize`` with the hooked engines in place of DeepSpeed's.

    The process group must exist. Returns the engine; ``attach`` gives it its hooks.
    """
    # DeepSpeed's all-gather of the updated weights uses a name that torch 2.13 deprecates.
    warnings.filterwarnings("ignore", ".*all_gather_into_tensor.*", FutureWarning)
    with _contained():
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def attach(engine: Any, hooks: StepHooks, tensor: TensorGroup | None) -> None:
    """Give the engine its hooks, and its optimizer those of its class."""
    engine.step_hooks = hooks
    optimizer = engine.optimizer

    def grads_for_norm(for_clipping: bool = False) -> Any:
        if for_clipping:
            return optimizer.fp32_groups_gradient_flat_partition
        # DeepSpeed takes the norm of this one element, and adds up the other stages'.
        return [hooks.owned_norm()], {}

    def reduce(bucket: Tensor, dtype: torch.dtype) -> Tensor:
        pieces = [
            BucketPiece(
                group,
                index,
                optimizer.round_robin_bit16_offsets[group][index],
                optimizer.bit16_groups[group][index].numel(),
            )
            for group, index, _ in optimizer.ipg_buckets[dtype].params
        ]
        if not pieces:  # before a gradient that is larger than a bucket and comes first
            return bucket
        mean = hooks.reduce(bucket, pieces)
        if optimizer.gradient_accumulation_dtype == optimizer.dtype:
            bucket.copy_(mean)
        return mean

    def global_norm(norm_type: int = 2) -> Tensor:
        counted: list[Tensor] = []
        others: list[Tensor] = []
        for i, parameters in enumerate(optimizer.params_in_partition):
            gradients = (
                g for g in optimizer.averaged_gradients[i] if not hasattr(g, "_zero_padding")
            )
            # A partition may end behind the last parameter.
            for gradient, parameter in zip(gradients, parameters, strict=False):
                (counted if is_counted(parameter, tensor) else others).append(gradient)
        square = torch.zeros((), device=engine.device)
        if counted:
            square += torch.stack(torch._foreach_norm(counted, dtype=torch.float32)).square().sum()
        if others:  # 0 where they are finite, NaN where they aren't
            square += torch.stack(torch._foreach_norm(others, dtype=torch.float32)).mul_(0.0).sum()
        dist.all_reduce(square, group=optimizer.dp_process_group)
        optimizer._model_parallel_all_reduce(square, dist.ReduceOp.SUM)
        return square.sqrt()

    if takes_buckets(optimizer):
        optimizer.gradient_reduction_w_predivide = reduce
        optimizer.scaled_global_norm = global_norm
    elif hooks.scattered:
        optimizer.get_grads_for_norm = grads_for_norm


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Send what DeepSpeed prints on standard output to the log, at level DEBUG."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        for line in printed.getvalue().splitlines():
            logger.debug("deepspeed: %s", line)


@contextlib.contextmanager
def _contained() -> Iterator[None]:
    """Everything that building an engine changes in DeepSpeed, put back afterwards."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_quiet())
        stack.enter_context(_replaced(deepspeed, "DeepSpeedEngine", HookedEngine))
        stack.enter_context(_replaced(deepspeed, "PipelineEngine", HookedPipelineEngine))
        # Forced on, it collects garbage and prints the machine's memory six times a build.
        stack.enter_context(_replaced(bf16_optimizer, "see_memory_usage", lambda *_, **__: None))
        # With an empty table DeepSpeed doesn't compile its shared-memory collectives, which
        # training never calls; filling the table would probe a compiler for every op it has.
        stack.enter_context(_replaced(deepspeed.ops, "__compatible_ops__", {}))
        yield


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    # Through the namespace: reading `__compatible_ops__` by attribute would fill it.
    names = vars(owner)
    missing = object()
    before = names.get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
