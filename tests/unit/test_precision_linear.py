"""The native FP8 linear: its three products, what it keeps, what it never does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parallel.config import Precision
from parallel.precision.linear import Float8Linear
from parallel.precision.scope import PrecisionScope
from tests.unit.precision_recipes import (
    both_ways,
    every_recipe,
    every_variant,
    fp8_config,
)

NAME = "layers.0.mlp.down"
TOKENS, INPUTS, OUTPUTS = 48, 160, 96
"""No multiples of the larger blocks: each has broken ones."""


def make(
    compiled: bool = True, recipe: str = "delayed", **options: object
) -> tuple[PrecisionScope, Float8Linear]:
    torch.manual_seed(1)
    config = fp8_config(recipe, **options)
    scope = PrecisionScope("fp8", config, num_layers=1, compiled=compiled)
    layer = scope.linear(NAME, INPUTS, OUTPUTS)
    assert isinstance(layer, Float8Linear)
    return scope, layer


def uneven(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    """Normal values whose columns differ over four orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    columns = 10 ** (4 * torch.rand(shape[-1], generator=generator) - 3)
    return (torch.randn(*shape, generator=generator) * columns * scale).bfloat16()


def run(layer: nn.Module, seed: int = 0, grad_scale: float = 1e-3) -> tuple[Tensor, Tensor, Tensor]:
    """Output, input gradient and weight gradient of one forward and backward."""
    x = uneven(3, TOKENS // 3, INPUTS, seed=seed).requires_grad_()
    y = layer(x)
    layer.weight.grad = None
    y.backward(uneven(*y.shape, seed=seed + 100, scale=grad_scale))
    return y.detach(), x.grad, layer.weight.grad


def warmed(compiled: bool = True, **config: object) -> tuple[PrecisionScope, Float8Linear]:
    scope, layer = make(compiled, **config)
    for seed in (5, 6):
        run(layer, seed)
        scope.finish_step(applied=True)
    scope.statistics()
    layer.weight.grad = None
    return scope, layer


@every_variant
def test_both_ways_of_casting_give_the_same_bits(recipe):
    results = []
    for compiled in (True, False):
        scope, layer = warmed(compiled, recipe=recipe)
        tensors = run(layer)
        scope.finish_step(applied=True)
        results.append((*tensors, scope.statistics()[1], *scope.state_tensors().values()))
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


@every_variant
def test_quantization_error_is_what_two_or_three_mantissa_bits_cost(recipe):
    _, layer = warmed(recipe=recipe)
    plain = nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=torch.bfloat16)
    plain.load_state_dict(layer.state_dict())
    for mine, exact in zip(run(layer), run(plain), strict=True):
        error = ((mine - exact).float().norm() / exact.float().norm()).item()
        assert 0.005 < error < 0.12


class TestInBF16:
    def test_it_computes_what_a_plain_linear_does_to_the_bit(self):
        scope, layer = warmed()
        plain = nn.Linear(INPUTS, OUTPUTS, bias=False, dtype=torch.bfloat16)
        plain.load_state_dict(layer.state_dict())
        scope.set_precision({NAME: "bf16"})
        for mine, exact in zip(run(layer), run(plain), strict=True):
            assert torch.equal(mine, exact)

    @both_ways
    def test_it_goes_on_observing_what_fp8_would_see(self, compiled):
        (in_fp8, fp8), (in_bf16, bf16) = warmed(compiled), warmed(compiled)
        in_bf16.set_precision({NAME: "bf16"})
        run(fp8), run(bf16)
        in_fp8.finish_step(applied=True), in_bf16.finish_step(applied=True)
        newest = [scope.state_tensors()["amax_history"][-1] for scope in (in_fp8, in_bf16)]
        assert torch.equal(*newest)
        _, statistics = in_bf16.statistics()
        assert statistics[:, 2:5].count_nonzero() == 0


class TestMemory:
    def test_the_input_waits_for_its_backward_in_eight_bits(self):
        _, layer = warmed()
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            layer(uneven(TOKENS, INPUTS, seed=0).requires_grad_())
        by_tokens = [t for t in saved if t.shape[:1] == (TOKENS,)]
        assert [t.dtype for t in by_tokens] == [torch.float8_e4m3fn]

    def test_a_weight_that_needs_no_gradient_keeps_no_input(self):
        _, layer = warmed()
        layer.weight.requires_grad_(False)
        x = uneven(TOKENS, INPUTS, seed=0).requires_grad_()
        layer(x).backward(uneven(TOKENS, OUTPUTS, seed=1))
        assert x.grad is not None
        assert layer.weight.grad is None

    def test_the_weight_is_quantized_once_a_step(self, monkeypatch):
        scope, layer = warmed()
        slot = layer.operand("weight")
        calls = []
        quantize = slot.quantize
        monkeypatch.setattr(slot, "quantize", lambda *a, **k: calls.append(1) or quantize(*a, **k))
        for _ in range(3):
            run(layer)
        assert len(calls) == 1
        scope.finish_step(applied=True)
        run(layer)
        assert len(calls) == 2

    def test_a_weight_changed_between_steps_takes_effect(self):
        scope, layer = warmed()
        y, _, _ = run(layer)
        with torch.no_grad():
            layer.weight.mul_(-1)
        scope.forget_weights()
        assert torch.equal(run(layer)[0], -y)


class TestModes:
    def test_an_input_that_needs_no_gradient_gets_none(self):
        _, layer = warmed()
        expected = run(layer)[2]
        layer.weight.grad = None
        x = uneven(3, TOKENS // 3, INPUTS, seed=0)
        y = layer(x)
        y.backward(uneven(*y.shape, seed=100, scale=1e-3))
        assert torch.equal(layer.weight.grad, expected)
        assert x.grad is None

    def test_without_grad_the_output_is_the_same_and_holds_no_graph(self):
        _, layer = warmed()
        expected = run(layer)[0]
        with torch.no_grad():
            y = layer(uneven(3, TOKENS // 3, INPUTS, seed=0))
        assert torch.equal(y, expected)
        assert not y.requires_grad

    @both_ways
    @every_recipe
    @pytest.mark.parametrize("precision", ["fp8", "bf16"])
    def test_eval_observes_nothing_and_computes_the_same(self, compiled, recipe, precision):
        scope, layer = warmed(compiled, recipe=recipe)
        scope.set_precision({NAME: precision})
        layer.eval()
        y, _, _ = run(layer, seed=3)
        scope.finish_step(applied=False)
        _, statistics = scope.statistics()
        assert statistics[:, 0].tolist() == [0, 0, 0]
        assert statistics[:, 2:].count_nonzero() == 0
        layer.train()
        assert torch.equal(run(layer, seed=3)[0], y)

    def test_a_step_after_an_evaluation_still_observes_the_weight(self):
        scope, layer = warmed()
        layer.eval()
        layer(uneven(TOKENS, INPUTS, seed=0))
        layer.train()
        run(layer)
        scope.finish_step(applied=True)
        _, statistics = scope.statistics()
        assert statistics[1, 0] == layer.weight.detach().abs().max()

    @every_recipe
    @pytest.mark.parametrize("reentrant", [True, False])
    def test_recomputed_activations_change_nothing(self, recipe, reentrant):
        _, layer = warmed(recipe=recipe)
        expected = run(layer)
        x = uneven(3, TOKENS // 3, INPUTS, seed=0).requires_grad_()
        y = checkpoint(layer, x, use_reentrant=reentrant)
        layer.weight.grad = None
        y.backward(uneven(*y.shape, seed=100, scale=1e-3))
        for mine, plain in zip((y.detach(), x.grad, layer.weight.grad), expected, strict=True):
            assert torch.equal(mine, plain)

    def test_a_float32_input_gets_a_float32_output_and_gradient(self):
        _, layer = warmed()
        x = uneven(TOKENS, INPUTS, seed=0).float().requires_grad_()
        y = layer(x)
        y.backward(uneven(TOKENS, OUTPUTS, seed=1).float())
        assert (y.dtype, x.grad.dtype) == (torch.float32, torch.float32)
        assert layer.weight.grad.dtype == torch.bfloat16

    def test_a_second_derivative_is_refused(self):
        _, layer = warmed()
        x = uneven(TOKENS, INPUTS, seed=0).requires_grad_()
        with pytest.raises(RuntimeError, match="second derivative"):
            torch.autograd.grad(layer(x).float().square().sum(), x, create_graph=True)

    def test_a_nan_in_one_token_reaches_its_output_and_the_weight_gradient(self):
        _, layer = warmed()
        x = uneven(TOKENS, INPUTS, seed=0)
        x[3, 7] = torch.nan
        x.requires_grad_()
        y = layer(x)
        y.backward(uneven(TOKENS, OUTPUTS, seed=1))
        assert torch.equal(y.isnan().any(1), torch.arange(TOKENS) == 3)
        assert torch.equal(layer.weight.grad.isnan().any(0), torch.arange(INPUTS) == 7)


def test_its_repr_shows_the_present_precision_of_each_operand():
    scope, layer = warmed()
    assert "input E4M3 delayed, weight E4M3 delayed, grad_output E5M2 delayed" in repr(layer)
    scope.set_precision({NAME: "bf16"})
    assert "bf16" in repr(layer)
    assert "E5M2" not in repr(layer)


@both_ways
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
class TestAnInputThatDoesNotFit:
    """Casts in C get addresses and lengths: of what isn't theirs they would read what is there."""

    def linear(self, compiled: bool, precision: Precision) -> Float8Linear:
        scope, layer = make(compiled)
        scope.set_precision({NAME: precision})
        return layer

    @pytest.mark.parametrize("shape", [(TOKENS, INPUTS - 1), (0, INPUTS - 1), (INPUTS, TOKENS), ()])
    def test_of_other_features_is_refused(self, compiled, precision, shape):
        layer = self.linear(compiled, precision)
        with pytest.raises(ValueError, match=rf"{NAME}.* takes \[\.\.\., {INPUTS}\]"):
            layer(torch.zeros(shape, dtype=torch.bfloat16))

    @pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.cfloat, torch.float8_e4m3fn])
    def test_of_another_kind_of_numbers_is_refused(self, compiled, precision, dtype):
        layer = self.linear(compiled, precision)
        with pytest.raises(TypeError, match=f"{dtype}; give it BF16"):
            layer(torch.ones(TOKENS, INPUTS).to(dtype))

    def test_on_another_device_is_refused(self, compiled, precision):
        layer = self.linear(compiled, precision)
        with pytest.raises(ValueError, match="the input is on meta and its scales are on cpu"):
            layer(torch.ones(TOKENS, INPUTS, device="meta", dtype=torch.bfloat16))

    def test_or_weights_that_moved_away_from_their_scales(self, compiled, precision):
        layer = self.linear(compiled, precision)
        run(layer)
        layer.to("meta")
        for device in ("cpu", "meta"):
            with pytest.raises(ValueError, match="on meta and its scales are on cpu; move the"):
                layer(torch.ones(TOKENS, INPUTS, device=device, dtype=torch.bfloat16))
