"""The training engine of one rank: DeepSpeed with FP8 linears and the gradient exchange.

    engine = build_engine(parallelism=…, model=…, …)  # parallel.engine_build
    result = engine.train_step(micro_batches, lr=3e-4)

Promises: a step computes the same on every layout up to rounding; a step whose gradients are
not finite leaves parameters, optimizer and scaling state as they were, on every rank; copying
``live_tensors`` out and back in place with ``meta`` and ``load_meta`` replays the same losses
to the bit. Octavo adds no wait for the device to a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from parallel import engine_state
from parallel.config import (
    EXCHANGE_BITS,
    ExchangeDtype,
    Precision,
)
from parallel.exchange_choice import ExchangeChoice, choice_of, measure
from parallel.faults import Faults
from parallel.gradients import take_statistics
from parallel.layout import RankLayout
from parallel.model_plan import ModelPlan, parameter_name
from parallel.precision.backend import LayerScope
from parallel.precision.choice import BackendChoice
from parallel.replica_check import ReplicaCheck
from parallel.step_hooks import GradientGroup, StepHooks
from parallel.topology import Coordinate

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
    """One rank's model, optimizer and scaling state; made by ``engine_build.build_engine``."""

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
