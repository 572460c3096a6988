"""Products of every recipe against float64 products of the operands as its rules quantize them.

Shapes are no multiples of the blocks, so that every operand has broken ones.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from parallel.precision.scope import PrecisionScope
from tests.unit.precision_model import Rules
from tests.unit.precision_recipes import VARIANTS, both_ways, every_variant, fp8_config

NAME = "layers.0.mlp.down"
TOKENS, INPUTS, OUTPUTS = 200, 160, 288


def uneven(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """Normal values whose rows and columns differ so much that blocks lose their smallest."""
    generator = torch.Generator().manual_seed(seed)
    across = 10 ** (5 * torch.rand(shape[-1], generator=generator) - 3)
    down = 10 ** (5 * torch.rand(shape[0], 1, generator=generator) - 3)
    return (torch.randn(*shape, generator=generator) * across * down * scale).bfloat16()


def numbers(x: Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def within_rounding(mine: np.ndarray, a: np.ndarray, b: np.ndarray) -> bool:
    """One or two roundings to BF16, and FP32 sums of some hundred terms."""
    exact, terms = a @ b, np.abs(a) @ np.abs(b)
    return bool(np.all(np.abs(mine - exact) <= 2.0**-7 * np.abs(exact) + 2.0**-19 * terms))


@both_ways
@every_variant
def test_the_three_products_are_those_of_operands_quantized_along_their_contraction(
    compiled, recipe
):
    config = fp8_config(recipe)
    rules = Rules(config)
    scope = PrecisionScope("fp8", config, num_layers=1, compiled=compiled)
    torch.manual_seed(1)
    layer = scope.linear(NAME, INPUTS, OUTPUTS)
    for _ in range(2):
        x = uneven(TOKENS, INPUTS, seed=5).requires_grad_()
        g = uneven(TOKENS, OUTPUTS, seed=6, scale=1e-3)
        layer.weight.grad = None
        y = layer(x)
        y.backward(g)
        scope.finish_step(applied=True)
        _, statistics = scope.statistics()
    scales = statistics[:, 1].tolist() if config.recipe == "delayed" else [None] * 3
    assert scales[0] != 1.0

    def seen(role: str, contracts_over: str) -> np.ndarray:
        operand = {"input": x, "weight": layer.weight, "grad_output": g}[role]
        scale = scales[("input", "weight", "grad_output").index(role)]
        return rules.dequantized(numbers(operand), role, contracts_over, scale)

    products = {
        "output": (y, seen("input", "columns"), seen("weight", "columns").T),
        "grad_input": (x.grad, seen("grad_output", "columns"), seen("weight", "rows")),
        "grad_weight": (layer.weight.grad, seen("grad_output", "rows").T, seen("input", "rows")),
    }
    for name, (mine, a, b) in products.items():
        assert within_rounding(numbers(mine), a, b), name
        assert np.abs(numbers(mine)).max() > 0


@pytest.mark.parametrize("recipe", ["block", "mxfp8"])
def test_an_operand_quantized_along_the_other_dimension_would_be_noticed(recipe):
    rules = Rules(fp8_config(recipe))
    x, w = numbers(uneven(TOKENS, INPUTS, seed=5)), numbers(uneven(OUTPUTS, INPUTS, seed=7))
    along, across = (rules.dequantized(x, "input", over) for over in ("columns", "rows"))
    weight = rules.dequantized(w, "weight", "columns").T
    assert within_rounding(along @ weight, along, weight)
    assert not within_rounding(across @ weight, along, weight)


@both_ways
@every_variant
def test_an_empty_batch_has_an_empty_output_and_zero_gradients(compiled, recipe):
    scope = PrecisionScope("fp8", fp8_config(recipe), num_layers=1, compiled=compiled)
    layer = scope.linear(NAME, INPUTS, OUTPUTS)
    x = torch.zeros(2, 0, INPUTS, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert (y.shape, x.grad.shape) == ((2, 0, OUTPUTS), x.shape)
    assert layer.weight.grad.count_nonzero() == 0
    scope.finish_step(applied=True)
    _, statistics = scope.statistics()
    assert statistics[[0, 2]][:, [0, 2, 3, 4, 5]].count_nonzero() == 0
    assert statistics[1, 5] == INPUTS * OUTPUTS


@both_ways
@pytest.mark.parametrize("recipe", [name for name in VARIANTS if name != "mxfp8-HYBRID"])
def test_sqnr_is_the_energy_that_rounding_along_the_contraction_took(compiled, recipe):
    config = fp8_config(recipe, sqnr=True)
    scope = PrecisionScope("fp8", config, num_layers=1, compiled=compiled)
    layer = scope.linear(NAME, INPUTS, OUTPUTS)
    x = uneven(TOKENS, INPUTS, seed=5)
    for _ in range(2):
        layer(x)
        scope.finish_step(applied=True)
        _, statistics = scope.statistics()
    scale = statistics[0, 1].item() if config.recipe == "delayed" else None
    exact = numbers(x)
    rounded = Rules(config).dequantized(exact, "input", "columns", scale)
    signal, noise = statistics[0, 6:8].tolist()
    assert signal == pytest.approx(np.sum(exact**2), rel=1e-5)
    assert noise == pytest.approx(np.sum((exact - rounded) ** 2), rel=1e-3)
    assert 15 < 10 * np.log10(signal / noise) < 50
