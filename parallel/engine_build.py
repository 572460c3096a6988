"""Building the engine of one rank from what the spec says.

    engine = build_engine(parallelism=…, model=…, numbers=…, precision="fp8", …)

Promises: every rank calls it and every rank refuses the same, before a parameter is trained on;
what a step needs is made here, moments of the optimizer included, and nothing of it in a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parallel import engine_state
from parallel.compute_clock import ComputeClock
from parallel.config import (
    ExchangeDtype,
    FP8Config,
    GradientExchangeConfig,
    ModelConfig,
    ParallelismConfig,
    Precision,
)
from parallel.deepspeed_config import BatchShape, accumulation_dtype, merged_config, own_config
from parallel.engine import Engine, TrainingNumbers
from parallel.faults import Faults
from parallel.layout import RankLayout
from parallel.model_factory import factory_plan
from parallel.model_plan import ModelPlan, parameter_name, recomputed
from parallel.parameter_groups import ParameterGroup, adamw, gradient_groups, parameter_groups
from parallel.parameter_names import unmatched
from parallel.precision import recipes
from parallel.precision.backend import LayerScope, make_scope
from parallel.precision.choice import BackendChoice, workload_of
from parallel.precision.detection import choose_together
from parallel.rank_groups import RankGroups, build_groups
from parallel.step_hooks import GradientGroup, StepHooks
from parallel.topology import data_size
from parallel.transformer import ffn_size, layer_plans, loss_fn


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
    config = _deepspeed_config(degrees, numbers, communication_data_type, deepspeed or {})

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
    pipelined = _is_pipelined(plan, degrees)
    module = (
        deepspeed_engines.staged_module(plan.layers, degrees, plan.loss, scope.micro_batch)
        if pipelined
        else nn.Sequential(*(layer.build() for layer in plan.layers)).to(device)
    )
    names = tuple(parameter_name(n, plan.layers) for n, _ in module.named_parameters())
    everywhere = _of_all_ranks(names)
    kept = gradient_exchange.high_precision_parameters
    _check_parameter_patterns(kept, everywhere)
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
    switchable = _switchable_linears(scope, precision, fp8)
    hooks = StepHooks(scope, groups, replicas, ranks.stage, ComputeClock(device))
    deepspeed_engines.attach(engine, hooks, ranks.tensor)
    faults = Faults(
        module,
        plan,
        scope=scope,
        hooks=hooks,
        coordinate=ranks.coordinate,
        linears=switchable,
        parameters=everywhere,
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
        layout=_layout(engine, degrees, numbers, ranks, groups, grouped, scope.layers),
    )


def _deepspeed_config(
    degrees: ParallelismConfig,
    numbers: TrainingNumbers,
    communication_data_type: ExchangeDtype,
    deepspeed: Mapping[str, Any],
) -> dict[str, Any]:
    assert degrees.data is not None
    own = own_config(
        BatchShape(numbers.micro_batch_size, numbers.accumulation_steps, degrees.data),
        zero_stage=degrees.zero_stage,
        max_norm=numbers.max_norm,
        communication_data_type=communication_data_type,
        accumulation=accumulation_dtype(deepspeed),
    )
    return merged_config(own, deepspeed)


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


def _is_pipelined(plan: ModelPlan, degrees: ParallelismConfig) -> bool:
    """Whether DeepSpeed's pipeline engine runs it: sharded and shared parameters are its
    business, one stage or more. Raises ValueError for ZeRO 2 with any of these."""
    tied = any(layer.tied for layer in plan.layers)
    pipelined = degrees.pipeline > 1 or degrees.tensor > 1 or tied
    if degrees.zero_stage == 2 and pipelined:
        raise ValueError(
            "ZeRO stage 2 doesn't go with pipeline stages, tensor ranks or tied embeddings: "
            "make it 1"
        )
    return pipelined


def _switchable_linears(scope: LayerScope, precision: Precision, fp8: FP8Config) -> tuple[str, ...]:
    """The linears of all stages whose precision can change. Raises ValueError, on every rank
    alike, for a pattern that means none, and for FP8 that nothing computes in."""
    everywhere = _of_all_ranks((*scope.layers, *scope.fixed_layers))
    if wrong := recipes.unmatched_patterns(fp8.high_precision_layers, everywhere):
        raise ValueError("; ".join(wrong))
    switchable = _of_all_ranks(scope.layers)
    if precision == "fp8" and not switchable:
        raise ValueError(
            "precision is fp8 and no linear of this model computes in FP8: make them with the "
            "scope or convert them, leave fewer to fp8.high_precision_layers, or make it bf16"
        )
    return switchable


def _layout(
    engine: Any,
    degrees: ParallelismConfig,
    numbers: TrainingNumbers,
    ranks: RankGroups,
    groups: Sequence[GradientGroup],
    grouped: Sequence[ParameterGroup],
    linears: tuple[str, ...],
) -> RankLayout:
    """What of the model this rank's state holds."""
    assert degrees.data is not None
    at = ranks.coordinate
    return RankLayout(
        degrees=(degrees.pipeline, degrees.data, degrees.tensor),
        coordinate=(at.pipe, at.data, at.tensor),
        accumulation=numbers.accumulation_steps,
        groups=engine_state.group_layouts(
            engine.optimizer,
            [
                (group.name, list(zip(group.parameters, of.parameters, strict=True)))
                for group, of in zip(groups, grouped, strict=True)
            ],
            at.data,
        ),
        linears=linears,
    )


def _checked_degrees(parallelism: ParallelismConfig) -> ParallelismConfig:
    if parallelism.zero_stage > 2:
        raise ValueError("ZeRO stage 3 is not supported, only 0, 1 and 2")
    replicas = data_size(dist.get_world_size(), parallelism)
    return parallelism.model_copy(update={"data": replicas})


def _check_parameter_patterns(patterns: Sequence[str], names: Sequence[str]) -> None:
    """Raise ValueError for a pattern that means none of ``names``, which are all stages'."""
    if wrong := unmatched(patterns, names):
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
