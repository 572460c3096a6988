"""The hooks notice a DeepSpeed that doesn't call them as it did."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from parallel.config import FP8Config, GradientExchangeConfig
from parallel.gradients import GradientExchange
from parallel.precision.scope import PrecisionScope
from parallel.step_hooks import GradientGroup, StepHooks


@pytest.fixture
def hooks() -> Iterator[tuple[StepHooks, torch.Tensor]]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = dist.group.WORLD
        assert world is not None
        flat = torch.ones(6)
        exchange = GradientExchange("fp32", GradientExchangeConfig(), world)
        views = (flat[:4], flat[4:])
        group = GradientGroup("matrices", exchange, ("a.weight", "b.weight"), views)
        scope = PrecisionScope("bf16", FP8Config(), num_layers=1)
        yield StepHooks(scope, [group], world), flat
    finally:
        dist.destroy_process_group()


def test_an_update_without_an_exchange_is_an_error(hooks: tuple[StepHooks, torch.Tensor]) -> None:
    with pytest.raises(RuntimeError, match="0 times"):
        hooks[0].before_update()


def test_an_update_after_two_exchanges_is_an_error(hooks: tuple[StepHooks, torch.Tensor]) -> None:
    hooks[0].exchange([hooks[1]])
    hooks[0].exchange([hooks[1]])
    with pytest.raises(RuntimeError, match="2 times"):
        hooks[0].before_update()


def test_every_group_must_come_as_one_buffer(hooks: tuple[StepHooks, torch.Tensor]) -> None:
    with pytest.raises(RuntimeError, match="2 buffers for 1 groups"):
        hooks[0].exchange(list(hooks[1].split(3)))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_only_the_non_finite_gradient_is_named(
    hooks: tuple[StepHooks, torch.Tensor], value: float
) -> None:
    step, flat = hooks
    flat[5] = value
    step.exchange([flat])
    assert step.nonfinite_parameters() == ("b.weight",)
    flat.fill_(1e4)
    step.exchange([flat])
    assert step.nonfinite_parameters() == ()
