"""The training engine of one rank: DeepSpeed with FP8 linears and the gradient exchange.

    engine = build_engine(parallelism=…, model=…, numbers=…, precision="fp8", …)
    result = engine.train_step(micro_batches, lr=3e-4)

Promises: a step computes the same on every layout up to rounding; a step whose gradients are
not finite leaves parameters, optimizer and scaling state as they were, on every rank; copying
``live_tensors`` out and back in place with ``meta`` and ``load_meta`` replays the same losses
to the bit. Octavo adds no wait for the device to a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel import engine_state
from parallel.compute_clock import ComputeClock
from parallel.config import (
    EXCHANGE_BITS,
    ExchangeDtype,
    FP8Config,
    GradientExchangeConfig,
    ModelConfig,
    ParallelismConfig,
    Precision,
)
from parallel.deepspeed_config import BatchShape, accumulation_dtype, merged_config, own_config
from parallel.exchange_choice import ExchangeChoice, choice_of, measure
from parallel.faults import Faults
from parallel.gradients import take_statistics
from parallel.layout import RankLayout
from parallel.model_factory import factory_plan
from parallel.model_plan import ModelPlan, parameter_name, recomputed
from parallel.parameter_groups import adamw, gradient_groups, parameter_groups
from parallel.parameter_names import unmatched
from parallel.precision import recipes
from parallel.precision.backend import LayerScope, make_scope
from parallel.precision.choice import BackendChoice, workload_of
from parallel.precision.detection import choose_together
from parallel.rank_groups import RankGroups, build_groups
from parallel.replica_check import ReplicaCheck
from parallel.step_hooks import GradientGroup, StepHooks
from parallel.topology import Coordinate, data_size
from parallel.transformer import ffn_size, layer_plans, loss_fn

MicroBatch = tuple[Tensor, Tensor]
"""Token ids and targets, each int64 [sequences, seq_len]."""


@dataclass(frozen=True, slots=True)
class TrainingNumbers:
    """What the engine needs to know of the training section."""

    micro_batch_size: int
    """Sequences a micro-batch on one replica."""
    accumulation_steps: int
    """Micro-batches a step."""
    seq_len: int
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0
    seed: int = 0
    recompute: Literal["none", "full"] = "none"
    """``full``: transformer layers keep their input alone and run again in the backward."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step came to; loss, norm and ``skipped`` are the same on every rank."""

    loss: Tensor
    """Mean cross-entropy in nats a token, over micro-batches and replicas; FP32 scalar."""
    skipped: bool
    """The gradient norm was not finite and the update was left out."""
    nonfinite_parameters: tuple[str, ...]
    """Parameters whose gradient on this rank was not finite; empty unless ``skipped``."""
    nonfinite_loss: Tensor
    """Bool scalar on the device."""
    norm: Tensor | float = field(repr=False)
    """Norm of the averaged gradient before clipping; inf when it was not finite."""

    @property
    def grad_norm(self) -> float:
        """``norm`` as a number. Waits for the device: read it off the step's path."""
        return float(self.norm)


class Engine:
    """One rank's model, optimizer and scaling state; made by ``build_engine``."""

    def __init__(
        self,
        deepspeed_engine: Any,
        *,
        plan: ModelPlan,
        switchable: Iterable[str],
        coordinate: Coordinate,
        scope: LayerScope,
        backend: BackendChoice,
        groups: tuple[GradientGroup, ...],
        exchange_dtype: ExchangeDtype,
        hooks: StepHooks,
        replicas: dist.ProcessGroup,
        pipelined: bool,
        faults: Faults,
        layout: RankLayout,
    ) -> None:
        self.coordinate = coordinate
        self.scope = scope
        self.backend = backend
        """What the linears run on, and why; the same on every rank."""
        self.exchange_dtype = exchange_dtype
        """What gradients cross the network in, those left out that must go in a wider one."""
        self.faults = faults
        """What drills do to this rank's model."""
        self.layout = layout
        """What of the model is in ``live_tensors``."""
        self._engine = deepspeed_engine
        self._plan = plan
        self._switchable = frozenset(switchable)
        self._groups = groups
        self._hooks = hooks
        self._replicas = replicas
        self._pipelined = pipelined

    def train_step(self, micro_batches: Iterator[MicroBatch], lr: float) -> StepResult:
        """Run one step with learning rate ``lr``: all micro-batches, exchange, update.

        Draws ``accumulation_steps`` micro-batches of this replica; a stage in the middle of a
        pipeline draws none. Every rank must call it.
        """
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        if self._pipelined:
            loss = self._engine.train_batch(data_iter=micro_batches)
        else:
            loss = self._accumulate(micro_batches)
        self.faults.after_step()
        skipped = bool(self._engine.optimizer.overflow)
        return StepResult(
            loss=loss,
            skipped=skipped,
            nonfinite_parameters=self._hooks.nonfinite_parameters() if skipped else (),
            nonfinite_loss=~loss.isfinite(),
            norm=self._engine.optimizer._global_grad_norm,
        )

    def _accumulate(self, micro_batches: Iterator[MicroBatch]) -> Tensor:
        """A step of the plain engine; the mean loss over micro-batches and replicas."""
        engine = self._engine
        engine.train()
        total = torch.zeros((), dtype=torch.float32, device=engine.device)
        count = engine.gradient_accumulation_steps()
        for _ in range(count):
            with self._hooks.clock.running():
                tokens, targets = next(micro_batches)
                with self.scope.micro_batch():
                    output = engine(tokens.to(engine.device, non_blocking=True))
                loss = self._plan.loss(output, targets.to(engine.device, non_blocking=True))
                del output  # the backward doesn't need the logits, and they are large
                engine.backward(loss)
            engine.step()
            total += loss.detach()
        total /= count
        replicas = dist.get_world_size(self._replicas)
        if replicas > 1:
            dist.all_reduce(total, group=self._replicas)
            total /= replicas
        return total

    def set_precision(self, precision: Mapping[str, Precision]) -> None:
        """Change linears' precision between steps; each rank takes those of its stage.

        Raises ValueError, on every rank alike, for a name that no stage has and for a linear
        whose precision is fixed.
        """
        for name in precision:
            if name not in self._switchable:
                raise ValueError(f"linear {name!r} is not one whose precision can change")
        mine = set(self.scope.layers)
        self.scope.set_precision({name: p for name, p in precision.items() if name in mine})

    def set_exchange(self, dtype: ExchangeDtype) -> None:
        """Change what the matrices' gradients travel in, between steps, on every rank alike.

        Where FP8 comes back, error feedback begins with nothing: what an exchange of long ago
        left over is no part of these gradients.
        """
        for group in self._groups:
            if group.residual is not None and dtype == "fp8" and self.exchange_dtype != "fp8":
                group.residual.zero_()
            group.take_dtype(dtype)
        self.exchange_dtype = dtype

    def choose_exchange(self, world: dist.ProcessGroup) -> ExchangeChoice:
        """Measure what gradients cross this network in the faster, and take it from here on.

        Every rank calls it between steps; ``world`` is a group of all on CPU. The answer is
        the same on all of them, training's state is as before.
        """
        sizes = [(g.exchange, g.numel) for g in self._groups if g.least == "fp8"]
        choice = choice_of(measure(sizes, world))
        self.set_exchange(choice.dtype)
        return choice

    def take_exchange_statistics(self) -> dict[str, float]:
        """Statistics of the gradient exchange since the last call, and reset.

        Of all groups together; ``wire_bits`` are what a value takes on the network where
        nothing asks for more.
        """
        statistics = take_statistics([group.exchange for group in self._groups])
        statistics["wire_bits"] = float(EXCHANGE_BITS[self.exchange_dtype])
        return statistics

    def take_compute_seconds(self) -> Callable[[], float]:
        """Seconds that this rank computed since the last call, without waiting for others.

        What is returned may wait for the device: call it off the step's path.
        """
        return self._hooks.clock.take()

    def replica_check(self) -> ReplicaCheck:
        """Checksums of this rank's parameters, for a comparison with its replicas."""
        named = self._engine.module.named_parameters()
        layers = self._plan.layers
        return ReplicaCheck(((parameter_name(n, layers), p) for n, p in named), self._replicas)

    def live_tensors(self) -> dict[str, Tensor]:
        """Every tensor of this rank's state, by stable name; copy them out and back in place."""
        names = [group.name for group in self._groups]
        tensors = engine_state.optimizer_tensors(self._engine.optimizer, names)
        for name, tensor in self.scope.state_tensors().items():
            tensors[f"precision.{name}"] = tensor
        for group in self._groups:
            if group.residual is not None:
                tensors[f"exchange.{group.name}.residual"] = group.residual
        return tensors

    def meta(self) -> dict[str, Any]:
        """The rest of the state, for JSON."""
        return {
            "counters": engine_state.counters(self._engine),
            "precision": self.scope.state_meta(),
            "exchange_dtype": self.exchange_dtype,
        }

    def load_meta(self, meta: Mapping[str, Any]) -> None:
        """Take back ``meta`` after the tensors were copied in place."""
        engine_state.load_counters(self._engine, meta["counters"])
        self.scope.load_meta(meta["precision"])
        self.exchange_dtype = meta["exchange_dtype"]
        for group in self._groups:
            group.take_dtype(self.exchange_dtype)


def build_engine(
    *,
    parallelism: ParallelismConfig,
    model: ModelConfig,
    numbers: TrainingNumbers,
    precision: Precision,
    fp8: FP8Config,
    communication_data_type: ExchangeDtype,
    gradient_exchange: GradientExchangeConfig,
    deepspeed: Mapping[str, Any] | None = None,
    backend: BackendChoice | None = None,
) -> Engine:
    """Build this rank's engine; the default process group must exist, every rank calls it.

    ``backend``: unset, the ranks agree on one by their devices (``parallel.precision.choice``).
    ``LOCAL_RANK`` must be set, and ``DS_ACCELERATOR=cpu`` on a machine without an accelerator.
    Raises ValueError for degrees that don't fit the world, for a model that tensor ranks can't
    share, for ZeRO 3, for ZeRO 2 with what it doesn't go with, for FP8 without a linear that
    computes in it, and for a ``deepspeed`` section that contradicts the rest.
    """
    degrees = _checked_degrees(parallelism)
    assert degrees.data is not None
    batch = BatchShape(numbers.micro_batch_size, numbers.accumulation_steps, degrees.data)
    own = own_config(
        batch,
        zero_stage=degrees.zero_stage,
        max_norm=numbers.max_norm,
        communication_data_type=communication_data_type,
        accumulation=accumulation_dtype(deepspeed or {}),
    )
    config = merged_config(own, deepspeed or {})

    # DeepSpeed takes seconds to import; nothing above needs it.
    from deepspeed.accelerator import get_accelerator

    from parallel import deepspeed_engines

    device = torch.device(get_accelerator().current_device_name())
    ranks = build_groups(degrees)
    workload = workload_of(
        model,
        ffn=ffn_size(model),
        shards=degrees.tensor,
        tokens=numbers.micro_batch_size * numbers.seq_len,
        recompute=numbers.recompute == "full",
    )
    backend = backend or choose_together(precision, fp8, device, workload)
    scope = make_scope(
        backend,
        precision,
        fp8,
        num_layers=model.num_layers,
        device=device,
        tensor=ranks.tensor,
        stage=ranks.stage,
        built_in=model.factory is None,
    )
    plan = _model_plan(model, numbers, scope, ranks)
    # Sharded and shared parameters are DeepSpeed's pipeline engine's business, one stage or more.
    tied = any(layer.tied for layer in plan.layers)
    pipelined = degrees.pipeline > 1 or ranks.tensor is not None or tied
    if degrees.zero_stage == 2 and pipelined:
        raise ValueError(
            "ZeRO stage 2 doesn't go with pipeline stages, tensor ranks or tied embeddings: "
            "make it 1"
        )
    module = (
        deepspeed_engines.staged_module(plan.layers, degrees, plan.loss, scope.micro_batch)
        if pipelined
        else nn.Sequential(*(layer.build() for layer in plan.layers)).to(device)
    )
    kept = gradient_exchange.high_precision_parameters
    _check_parameter_patterns(
        kept, [parameter_name(n, plan.layers) for n, _ in module.named_parameters()]
    )
    grouped = parameter_groups(module, ranks.tensor, plan.layers, kept)
    optimizer = adamw(
        grouped, betas=numbers.betas, eps=numbers.eps, weight_decay=numbers.weight_decay
    )
    engine = deepspeed_engines.initialize(module, optimizer, config)
    engine_state.create_moments(engine.optimizer.optimizer)

    replicas = deepspeed_engines.replica_group(engine)
    groups = gradient_groups(
        engine,
        grouped,
        plan.layers,
        dtype=communication_data_type,
        config=gradient_exchange,
        replicas=replicas,
        tensor=ranks.tensor,
        device=device,
    )
    everywhere = _of_all_ranks((*scope.layers, *scope.fixed_layers))
    if unmatched := recipes.unmatched_patterns(fp8.high_precision_layers, everywhere):
        raise ValueError("; ".join(unmatched))
    switchable = _of_all_ranks(scope.layers)
    if precision == "fp8" and not switchable:
        raise ValueError(
            "precision is fp8 and no linear of this model computes in FP8: make them with the "
            "scope or convert them, leave fewer to fp8.high_precision_layers, or make it bf16"
        )
    hooks = StepHooks(scope, groups, replicas, ranks.stage, ComputeClock(device))
    deepspeed_engines.attach(engine, hooks, ranks.tensor)
    names = tuple(parameter_name(n, plan.layers) for n, _ in module.named_parameters())
    faults = Faults(
        module,
        plan,
        scope=scope,
        hooks=hooks,
        coordinate=ranks.coordinate,
        linears=switchable,
        parameters=_of_all_ranks(names),
    )
    return Engine(
        engine,
        plan=plan,
        switchable=switchable,
        coordinate=ranks.coordinate,
        scope=scope,
        backend=backend,
        groups=groups,
        exchange_dtype=communication_data_type,
        hooks=hooks,
        replicas=replicas,
        pipelined=pipelined,
        faults=faults,
        layout=RankLayout(
            degrees=(degrees.pipeline, degrees.data, degrees.tensor),
            coordinate=(ranks.coordinate.pipe, ranks.coordinate.data, ranks.coordinate.tensor),
            accumulation=numbers.accumulation_steps,
            groups=engine_state.group_layouts(
                engine.optimizer,
                [
                    (group.name, list(zip(group.parameters, of.parameters, strict=True)))
                    for group, of in zip(groups, grouped, strict=True)
                ],
                ranks.coordinate.data,
            ),
            linears=scope.layers,
        ),
    )


def _model_plan(
    model: ModelConfig, numbers: TrainingNumbers, scope: LayerScope, ranks: RankGroups
) -> ModelPlan:
    arguments: dict[str, Any] = {
        "seq_len": numbers.seq_len,
        "seed": numbers.seed,
        "scope": scope,
        "tensor": ranks.tensor,
    }
    plan = (
        ModelPlan(layer_plans(model, **arguments), loss_fn)
        if model.factory is None
        else factory_plan(model, **arguments)
    )
    if numbers.recompute == "none":
        return plan
    layers = [
        recomputed(layer, scope.checkpoint) if layer.transformer else layer for layer in plan.layers
    ]
    return ModelPlan(layers, plan.loss)


def _checked_degrees(parallelism: ParallelismConfig) -> ParallelismConfig:
    if parallelism.zero_stage > 2:
        raise ValueError("ZeRO stage 3 is not supported, only 0, 1 and 2")
    replicas = data_size(dist.get_world_size(), parallelism)
    return parallelism.model_copy(update={"data": replicas})


def _check_parameter_patterns(patterns: Sequence[str], mine: Sequence[str]) -> None:
    """Raise ValueError, on every rank alike, for a pattern that means no stage's parameter."""
    if not patterns:
        return
    if wrong := unmatched(patterns, _of_all_ranks(tuple(mine))):
        raise ValueError(
            "; ".join(
                f"gradient_exchange.high_precision_parameters: {found.pattern!r} matches no "
                f"parameter; did you mean {found.nearest!r}?"
                for found in wrong
            )
        )


def _of_all_ranks(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names of all stages, so that every rank refuses the same."""
    found: list[tuple[str, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(found, names)
    return tuple(dict.fromkeys(name for of_rank in found for name in of_rank))
