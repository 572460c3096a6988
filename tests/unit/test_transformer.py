"""The transformer against an independent implementation, and what its layers promise."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from parallel.config import FP8Config, ModelConfig
from parallel.model_plan import LayerPlan, parameter_name
from parallel.precision.recipes import linear_names
from parallel.precision.scope import PrecisionScope
from parallel.transformer import (
    ffn_size,
    layer_plans,
    loss_fn,
    rotary_table,
    rotate,
)

GROUPED = ModelConfig(
    vocab_size=48, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, init_std=0.1
)
FULL = GROUPED.model_copy(update={"num_kv_heads": None})


def plans(model: ModelConfig, seed: int = 0, precision: str = "bf16") -> list[LayerPlan]:
    scope = PrecisionScope(precision, FP8Config(), num_layers=model.num_layers)  # type: ignore[arg-type]
    return layer_plans(model, seq_len=16, seed=seed, scope=scope)


def build(model: ModelConfig, seed: int = 0) -> nn.Sequential:
    return nn.Sequential(*(plan.build() for plan in plans(model, seed)))


def test_the_default_dtype_changes_no_initial_weight():
    expected = build(FULL)
    torch.set_default_dtype(torch.bfloat16)
    try:
        mine = build(FULL)
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(mine.parameters(), expected.parameters(), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def tokens(model: ModelConfig, sequences: int = 3, length: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, model.vocab_size, (sequences, length), generator=generator)


def reference_logits(module: nn.Sequential, model: ModelConfig, ids: Tensor) -> Tensor:
    """Logits float64 [B, T, V], written per head and position without sharing any code."""
    w = {name: parameter.detach().double() for name, parameter in module.named_parameters()}
    kv_heads = model.num_kv_heads or model.num_heads
    size = model.hidden_size // model.num_heads
    length = ids.shape[1]

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + model.norm_eps).sqrt() * weight

    def turn(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        half = size // 2
        for t in range(length):
            for e in range(half):
                angle = t * model.rope_theta ** (-2 * e / size)
                a, b = x[:, t, e], x[:, t, e + half]
                out[:, t, e] = a * math.cos(angle) - b * math.sin(angle)
                out[:, t, e + half] = b * math.cos(angle) + a * math.sin(angle)
        return out

    x = w["0.weight"][ids]
    for i in range(1, model.num_layers + 1):
        normed = norm(x, w[f"{i}.attn.qkv.norm.weight"])
        heads = (normed @ w[f"{i}.attn.qkv.linear.weight"].T).split(size, dim=-1)
        outputs = []
        for h in range(model.num_heads):
            kv = model.num_heads + h * kv_heads // model.num_heads
            q, k, v = turn(heads[h]), turn(heads[kv]), heads[kv + kv_heads]
            scores = q @ k.transpose(1, 2) / math.sqrt(size)
            future = torch.ones(length, length).triu(1).bool()
            outputs.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v)
        x = x + torch.cat(outputs, -1) @ w[f"{i}.attn.out.weight"].T
        both = norm(x, w[f"{i}.mlp.norm.weight"]) @ w[f"{i}.mlp.gate_up.weight"].T
        gate, up = both.chunk(2, -1)
        x = x + (gate / (1 + (-gate).exp()) * up) @ w[f"{i}.mlp.down.weight"].T
    last = f"{model.num_layers + 1}"
    return norm(x, w[f"{last}.norm.weight"]) @ w[f"{last}.weight"].T


@pytest.mark.parametrize("model", [GROUPED, FULL], ids=["grouped", "full"])
class TestForward:
    def test_equals_an_independent_implementation_up_to_bf16(self, model: ModelConfig) -> None:
        module, ids = build(model), tokens(model)
        expected = reference_logits(module, model, ids)
        error = (module(ids).double() - expected).norm() / expected.norm()
        assert error < 0.02
        # What such an error must not hide: the same comparison without positions.
        flat = reference_logits(module, model.model_copy(update={"rope_theta": 1e30}), ids)
        assert (flat - expected).norm() / expected.norm() > 0.05

    def test_a_token_sees_nothing_that_comes_later(self, model: ModelConfig) -> None:
        module, ids = build(model), tokens(model)
        changed = ids.clone()
        changed[:, 9] = (changed[:, 9] + 1) % model.vocab_size
        before, after = module(ids), module(changed)
        assert torch.equal(before[:, :9], after[:, :9])
        assert not torch.equal(before[:, 9:], after[:, 9:])


class TestRotary:
    def test_products_depend_on_the_distance_alone(self) -> None:
        cos, sin = rotary_table(64, 16, 10_000.0, torch.device("cpu"))
        q, k = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
        turned_q = rotate(q.expand(1, 64, 1, 16), cos, sin)[0, :, 0]
        turned_k = rotate(k.expand(1, 64, 1, 16), cos, sin)[0, :, 0]
        products = turned_q @ turned_k.T
        for distance in (0, 5, 40):
            diagonal = products.diagonal(distance)
            torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
        assert products[0, 0] != products[0, 5]

    def test_far_positions_stay_apart(self) -> None:
        # In BF16 the angles of positions above 256 run together.
        cos, sin = rotary_table(4096, 16, 10_000.0, torch.device("cpu"))
        angles = torch.cat((cos, sin), -1).flatten(1)
        assert angles.dtype == torch.float32
        assert len(angles.unique(dim=0)) == 4096

    def test_survives_the_cast_that_deepspeed_gives_a_model(self) -> None:
        module, ids = build(GROUPED), tokens(GROUPED)
        before = module(ids)
        assert torch.equal(module.bfloat16()(ids), before)
        assert list(module.buffers()) == []


class TestInitialWeights:
    def test_are_the_same_whatever_is_built_before(self) -> None:
        whole = build(GROUPED)
        torch.rand(7)  # a global generator in another state
        alone = plans(GROUPED)[2].build()
        for name, parameter in alone.named_parameters():
            assert torch.equal(parameter, whole[2].get_parameter(name)), name

    def test_are_the_same_in_fp8_and_bf16_jobs(self) -> None:
        fp8, bf16 = plans(GROUPED, precision="fp8")[1].build(), plans(GROUPED)[1].build()
        for name, parameter in bf16.named_parameters():
            assert torch.equal(parameter, fp8.get_parameter(name)), name

    def test_differ_between_layers_and_between_seeds(self) -> None:
        module, other = build(GROUPED), build(GROUPED, seed=1)
        assert not torch.equal(module[1].attn.qkv.weight, module[2].attn.qkv.weight)
        for name, parameter in module.named_parameters():
            if parameter.dim() >= 2:
                assert not torch.equal(parameter, other.get_parameter(name)), name

    def test_have_the_configured_width_less_where_they_enter_the_residual_stream(self) -> None:
        module = build(GROUPED.model_copy(update={"hidden_size": 256}))
        assert module[1].mlp.gate_up.weight.float().std().item() == pytest.approx(0.1, rel=0.03)
        assert module[1].mlp.down.weight.float().std().item() == pytest.approx(0.05, rel=0.03)


def test_the_scope_registers_exactly_the_models_linears() -> None:
    scope = PrecisionScope("fp8", FP8Config(), num_layers=2)
    for plan in layer_plans(GROUPED, seq_len=16, seed=0, scope=scope):
        plan.build()
    assert scope.layers == linear_names(2)


def test_parameters_have_names_for_people() -> None:
    layers = plans(GROUPED)
    names = [parameter_name(name, layers) for name, _ in build(GROUPED).named_parameters()]
    assert names[0] == "embedding.weight"
    assert {"head.norm.weight", "head.weight"} < set(names)
    assert {"layers.0.attn.qkv.norm.weight", "layers.0.attn.qkv.weight"} < set(names)
    assert "layers.1.mlp.down.weight" in names
    assert len(set(names)) == len(names)


def test_the_mlp_is_eight_thirds_of_the_hidden_size_unless_configured() -> None:
    assert ffn_size(ModelConfig(hidden_size=128)) == 352
    assert ffn_size(ModelConfig(hidden_size=128, ffn_size=100)) == 100


def test_costs_count_every_matrix_once_a_token() -> None:
    for plan, module in zip(plans(GROUPED), build(GROUPED), strict=True):
        matrices = sum(p.numel() for p in module.parameters() if p.dim() >= 2)
        attention = 16 * GROUPED.hidden_size
        expected = matrices + attention if plan.transformer else plan.cost
        assert plan.cost == expected


def test_the_loss_is_the_mean_of_nats_a_token_in_fp32() -> None:
    logits = torch.randn(2, 5, 9, generator=torch.Generator().manual_seed(0)).bfloat16() * 8
    targets = torch.arange(10).view(2, 5) % 9
    expected = -logits.double().log_softmax(-1).gather(-1, targets.unsqueeze(-1)).mean()
    loss = loss_fn(logits, targets)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
