"""torchao's emulated FP8 training in the place of a model's BF16 linears.

What its users train with where there is no GPU: ``torchao.float8`` with ``emulate=True`` in its
recipes ``tensorwise``, ``rowwise`` and ``rowwise_with_gw_hp`` (``convert_to_float8_training``'s
``Float8Linear``), and ``mxfp8`` as ``MXFP8_EMULATED_RCEIL`` of its prototype for training has it.
Each is as it is fastest here: ``Float8Linear`` compiled, as its documentation asks of whoever wants
speed ("torch.compile is necessary", ``torchao/float8/README.md``), for each shape by itself;
``mxfp8`` eager (3.5 against 4.9 times BF16's time at 1,024 × 1,024). Either can be asked for.
Promises: the parameters stay those of the model, so that whoever trains them goes on training
them; torchao is imported only when it is asked for. Checked with torchao 0.18.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from parallel.precision.linear import BF16Linear

FLOAT8 = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
RECIPES = (*FLOAT8, "mxfp8")
MOST_SHAPES = 64
"""Of linears, in one process."""


def why_not() -> str:
    """Why torchao can't be used here, or an empty string."""
    if importlib.util.find_spec("torchao") is None:
        return "torchao isn't installed: pip install -c constraints.txt -e '.[bench]'"
    return ""


def plain_linear(
    inputs: int, outputs: int, recipe: str, *, compiled: bool | None = None
) -> nn.Linear:
    """One BF16 linear without a bias as torchao converts it. KeyError for no recipe of these."""
    layer = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)
    layer.forward = _forward_of(layer, recipe, compiled)  # type: ignore[method-assign]
    return layer


def take_over(module: nn.Module, recipe: str, *, compiled: bool | None = None) -> None:
    """From here on every linear of ``module`` that stays in BF16 computes as torchao's does.

    Raises KeyError for no recipe of these, NotImplementedError for a shard over tensor ranks.
    """
    for linear in module.modules():
        if isinstance(linear, BF16Linear):
            if linear.shard is not None:
                raise NotImplementedError("torchao's linears here know no shards")
            linear.forward = _forward_of(linear, recipe, compiled)  # type: ignore[method-assign]


def is_compiled(recipe: str) -> bool:
    """Whether it is faster so."""
    return recipe in FLOAT8


def _forward_of(
    linear: nn.Linear, recipe: str, compiled: bool | None
) -> Callable[[Tensor], Tensor]:
    if recipe not in RECIPES:
        raise KeyError(f"torchao's recipes here are {', '.join(RECIPES)}, not {recipe!r}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager = _mxfp8(linear) if recipe == "mxfp8" else _float8(linear, recipe)
    if compiled is None:
        compiled = is_compiled(recipe)
    return _compiled(eager) if compiled else eager


def _compiled(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    import torch._dynamo

    # All linears share one code, which is compiled once a shape; beyond the limit Dynamo would go
    # on eagerly, in silence.
    torch._dynamo.config.recompile_limit = MOST_SHAPES
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    compiled: Callable[[Tensor], Tensor] = torch.compile(forward, dynamic=False)
    return compiled


def _float8(linear: nn.Linear, recipe: str) -> Callable[[Tensor], Tensor]:
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    # It shares the parameter, and stands beside the model, whose names stay as they are.
    converted: nn.Module = Float8Linear.from_float(linear, config)
    return converted.forward


def _mxfp8(linear: nn.Linear) -> Callable[[Tensor], Tensor]:
    from torchao.prototype.moe_training.config import (
        MXFP8TrainingOpConfig,
        MXFP8TrainingRecipe,
    )
    from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm

    # Its own way in, quantize_, replaces parameters by a tensor subclass that DeepSpeed can't
    # flatten; this is what that subclass makes of F.linear.
    config = MXFP8TrainingOpConfig.from_recipe(MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)

    def forward(weight: nn.Parameter, input: Tensor) -> Tensor:
        output: Tensor = _to_mxfp8_then_scaled_mm(
            input,
            weight,
            config.kernel_preference,
            config.scale_calculation_mode,
            config.wgrad_with_hp,
        )
        return output

    return partial(forward, linear.weight)
