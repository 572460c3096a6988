"""Norm + linear, norm + MLP, Smooth SwiGLU, recompute and accumulation, on the native scope."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from parallel.precision.layers import NormMLP, RMSNorm, channel_scales
from parallel.precision.scope import PrecisionScope
from tests.ranks.engine_runs import RECIPES, fp8_config

HIDDEN, FFN, TOKENS = 128, 256, 128
RUNS = [*RECIPES, "bf16"]


def scope_of(recipe: str) -> PrecisionScope:
    if recipe == "bf16":
        return PrecisionScope("bf16", fp8_config("delayed"), num_layers=1)
    return PrecisionScope("fp8", fp8_config(recipe), num_layers=1)


def mlp_of(scope: PrecisionScope, *, smooth: bool, name: str = "layers.0.mlp") -> NormMLP:
    mlp = scope.norm_mlp(name, HIDDEN, FFN, eps=1e-5, smooth=smooth)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in mlp.parameters():
            if parameter.dim() == 2:
                parameter.copy_(torch.empty(parameter.shape).normal_(0, 0.1, generator=generator))
    return mlp


def tokens(seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Rows of uneven size: quantization errors must not average out.
    rows = torch.linspace(-3, 3, TOKENS).exp2()[:, None]
    return (torch.randn(TOKENS, HIDDEN, generator=generator) * rows * scale).bfloat16()


def pass_through(
    mlp: nn.Module, x: Tensor, run: Callable[..., Any] | None = None
) -> tuple[Tensor, Tensor]:
    """Output and input gradient; gradients of parameters accumulate."""
    x = x.clone().requires_grad_()
    output: Tensor = mlp(x) if run is None else run(mlp, x)
    output.backward(tokens(99)[:, : output.shape[1]] * 1e-2)
    assert x.grad is not None
    return output.detach(), x.grad


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def relative(left: Tensor, right: Tensor) -> float:
    return float((left.double() - right.double()).norm() / right.double().norm())


@pytest.mark.parametrize("recipe", RUNS)
class TestNormLinear:
    def test_is_the_linear_of_the_normed_input_to_the_bit(self, recipe: str) -> None:
        scope, plain = scope_of(recipe), scope_of(recipe)
        both = scope.norm_linear("layers.0.attn.qkv", HIDDEN, 64, eps=1e-5)
        linear = plain.linear("layers.0.attn.qkv", HIDDEN, 64)
        norm = RMSNorm(HIDDEN, 1e-5)
        with torch.no_grad():
            both.norm.weight.uniform_(0.5, 2)
            norm.weight.copy_(both.norm.weight)
            linear.weight.copy_(both.weight)  # type: ignore[union-attr, arg-type]
        x = tokens(0)
        assert torch.equal(both(x), linear(norm(x)))
        assert scope.layers == plain.layers
        assert both.weight is both.linear.weight


class TestChannelScales:
    @given(
        st.lists(
            st.just(0.0) | st.floats(2**-20, 100) | st.floats(-100, -(2**-20)),
            min_size=1,
            max_size=8,
        ),
        st.integers(-60, 60),
    )
    def test_are_powers_of_two_that_bring_a_channel_to_one_and_its_inverse(
        self, values: list[float], exponent: int
    ) -> None:
        x = (torch.tensor(values) * 2.0**exponent).bfloat16()[:, None]
        scale, undo = channel_scales(x)
        assert torch.equal(x * scale * undo, x)
        assert float(scale * undo) == 1.0
        assert float(scale.frexp()[0]) == 0.5
        if x.abs().max() >= 2.0**-100:
            assert 1 <= float((x * scale).abs().max()) < 2

    def test_leave_zeros_nonfinite_values_and_no_tokens_alone(self) -> None:
        x = torch.tensor([[0.0, torch.inf, torch.nan, -4.0]]).bfloat16()
        scale, undo = channel_scales(x)
        assert scale.tolist() == [1, 1, 1, 0.25]
        assert undo.tolist() == [1, 1, 1, 4]
        scale, undo = channel_scales(x[:0])
        assert scale.tolist() == undo.tolist() == [1, 1, 1, 1]


class TestSmoothSwiGLU:
    def test_changes_no_bit_in_bf16(self) -> None:
        results = []
        for smooth in (False, True):
            mlp = mlp_of(scope_of("bf16"), smooth=smooth)
            results.append((*pass_through(mlp, tokens(0)), *gradients(mlp).values()))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    def test_changes_no_bit_of_a_layer_that_is_in_bf16_by_command(self) -> None:
        results = []
        for smooth in (False, True):
            scope = scope_of("delayed")
            mlp = mlp_of(scope, smooth=smooth)
            scope.set_precision({"layers.0.mlp.down": "bf16"})
            results.append((*pass_through(mlp, tokens(0)), *gradients(mlp).values()))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    @pytest.mark.parametrize("recipe", [r for r in RECIPES if r in ("delayed", "current")])
    def test_takes_the_error_of_an_outlier_channel_from_the_others(self, recipe: str) -> None:
        errors = {}
        for smooth in (False, True):
            scope = scope_of(recipe)
            mlp, exact = mlp_of(scope, smooth=smooth), mlp_of(scope_of("bf16"), smooth=False)
            scope.set_precision({"layers.0.mlp.gate_up": "bf16"})  # it is about ``down``'s input
            with torch.no_grad():
                for which in (mlp, exact):
                    # One channel ten thousands of times the others, and its weight as small.
                    which.gate_up.weight[FFN] *= 3e4  # type: ignore[index, operator, union-attr]
                    which.down.weight[:, 0] *= 1e-5  # type: ignore[index, operator, union-attr]
            pass_through(mlp, tokens(0))
            scope.finish_step(True)  # delayed scales are calibrated now
            errors[smooth] = relative(mlp(tokens(0)).detach(), exact(tokens(0)).detach())
        assert errors[True] < 0.1
        assert errors[False] > 2 * errors[True]

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_gradients_are_those_of_the_function_up_to_rounding(self, recipe: str) -> None:
        found = {}
        for run in (recipe, "bf16"):
            scope = scope_of(run)
            mlp = mlp_of(scope, smooth=run != "bf16")
            pass_through(mlp, tokens(0))
            scope.finish_step(True)
            mlp.zero_grad()
            _, into_input = pass_through(mlp, tokens(0))
            found[run] = {**gradients(mlp), "input": into_input}
        for name, expected in found["bf16"].items():
            assert relative(found[recipe][name], expected) < 0.12, name


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("recipe", RUNS)
class TestRecompute:
    def test_gives_the_same_bits_and_counts_once(self, recipe: str, smooth: bool) -> None:
        results = []
        for recompute in (False, True):
            scope = scope_of(recipe)
            mlp = mlp_of(scope, smooth=smooth)
            seen: list[Tensor] = []
            for step in range(3):
                if step == 2 and recipe != "bf16":
                    scope.set_precision({"layers.0.mlp.down": "bf16"})
                for micro in range(2):
                    x = tokens(10 * step + micro, scale=1 + micro)
                    run = scope.checkpoint if recompute else None
                    seen += pass_through(mlp, x, run)
                seen += gradients(mlp).values()
                scope.finish_step(True)
                seen.append(scope.statistics()[1])
                seen += [tensor.clone() for tensor in scope.state_tensors().values()]
            results.append(seen)
        for plain, again in zip(*results, strict=True):
            assert torch.equal(plain.nan_to_num(-1.0), again.nan_to_num(-1.0))

    def test_drops_what_lies_between(self, recipe: str, smooth: bool) -> None:
        kept = {}
        for recompute in (False, True):
            scope = scope_of(recipe)
            mlp = mlp_of(scope, smooth=smooth)
            sizes: list[int] = []

            def pack(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
                sizes.append(tensor.numel() * tensor.element_size())
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                x = tokens(0).requires_grad_()
                output = scope.checkpoint(mlp, x) if recompute else mlp(x)
            assert output.requires_grad
            kept[recompute] = sum(sizes)
        assert kept[True] < kept[False] / 4


@pytest.mark.parametrize("recipe", RECIPES)
class TestAccumulation:
    def test_weights_are_quantized_once_a_step(self, recipe: str) -> None:
        scope = scope_of(recipe)
        mlp = mlp_of(scope, smooth=True)
        for _ in range(2):
            for micro in range(3):
                pass_through(mlp, tokens(micro))
            scope.finish_step(True)
            names, statistics = scope.statistics()
            count = dict(zip(names, statistics[:, 5].tolist(), strict=True))
            assert count["layers.0.mlp.down/weight"] == HIDDEN * FFN
            assert count["layers.0.mlp.down/input"] == 3 * TOKENS * FFN
            assert count["layers.0.mlp.down/grad_output"] == 3 * TOKENS * HIDDEN

    def test_amax_is_the_largest_of_the_micro_batches(self, recipe: str) -> None:
        def amax(*micro_batches: int) -> dict[str, float]:
            scope = scope_of(recipe)
            linear = scope.linear("layers.0.attn.out", HIDDEN, HIDDEN)
            with torch.no_grad():
                linear.weight.copy_(0.02 * torch.eye(HIDDEN))  # type: ignore[union-attr, operator]
            for micro in micro_batches:
                pass_through(linear, tokens(micro, scale=1.0 + micro))
            scope.finish_step(True)
            names, statistics = scope.statistics()
            return dict(zip(names, statistics[:, 0].tolist(), strict=True))

        together, apart = amax(0, 3, 1), [amax(micro) for micro in (0, 3, 1)]
        assert len({row["layers.0.attn.out/input"] for row in apart}) == 3
        for name, value in together.items():
            assert value == max(row[name] for row in apart)


def test_a_delayed_scale_is_made_from_the_largest_micro_batch() -> None:
    scope = scope_of("delayed")
    linear = scope.linear("layers.0.attn.out", HIDDEN, HIDDEN)
    largest = 0.0
    for micro in range(3):
        x = tokens(micro, scale=3.0 - micro)
        largest = max(largest, float(x.abs().max()))
        pass_through(linear, x)
    scope.finish_step(True)
    assert float(scope.state_tensors()["scale"][0]) == pytest.approx(448 / largest, rel=1e-6)
