"""The decoder-only transformer: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

The model is a list of layers, each taking the one tensor that the layer before it returned,
so that the same list makes a DeepSpeed ``PipelineModule`` (a stage builds only its own) and
a plain ``nn.Sequential``. Linears inside transformer layers come from the rank's
``PrecisionScope`` and may compute in FP8; embedding, norms, rotary, softmax, residual stream
and head stay in BF16, the loss is FP32.

Promises: a layer's initial weights are a function of (seed, layer index) alone, drawn on the
CPU, so every layout and device starts from the same bits. Nothing here is random afterwards.

Shape suffixes: B sequences of a micro-batch, T tokens a sequence, D hidden, H query heads,
K key and value heads, E features a head, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.config import ModelConfig
from parallel.precision.scope import PrecisionScope


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One layer, not yet built: a stage builds its own and leaves the others alone."""

    build: Callable[[], nn.Module]
    """Makes the module with its initial weights."""
    cost: float
    """Multiply-adds a token of the forward pass."""
    transformer: bool
    """Whether it is a transformer layer rather than embedding or head."""


def ffn_size(model: ModelConfig) -> int:
    """Inner width of the MLP: as configured, else 8/3 of hidden_size rounded up to 32."""
    return model.ffn_size or math.ceil(model.hidden_size * 8 / 3 / 32) * 32


def parameter_name(qualified: str, num_layers: int) -> str:
    """Name for people of a parameter of the layer list: ``2.mlp.down.weight`` is layer 1's."""
    index, _, rest = qualified.partition(".")
    if index == "0":
        return f"embedding.{rest}"
    if int(index) == num_layers + 1:
        return f"head.{rest}"
    return f"layers.{int(index) - 1}.{rest}"


def layer_plans(
    model: ModelConfig, *, seq_len: int, seed: int, scope: PrecisionScope
) -> list[LayerPlan]:
    """The whole model as plans: embedding, ``num_layers`` transformer layers, head.

    The first layer takes token ids int64 [B, T], the last returns logits bf16 [B, T, V],
    between them goes the residual stream bf16 [B, T, D]. Building transformer layer i
    registers its four linears with ``scope``.
    """
    hidden, kv_heads = model.hidden_size, model.num_kv_heads or model.num_heads
    qkv_width = hidden + 2 * kv_heads * (hidden // model.num_heads)
    matrices = hidden * (qkv_width + hidden) + 3 * hidden * ffn_size(model)
    attention = seq_len * hidden  # a causal query meets half the keys, twice: scores and values

    def seeded(index: int, make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            module = make()
            _initialize(module, model, seed=seed, index=index)
            return module

        return build

    plans = [LayerPlan(seeded(0, lambda: Embedding(model)), cost=0.0, transformer=False)]
    for i in range(model.num_layers):
        make = seeded(i + 1, lambda i=i: TransformerLayer(model, i, scope))  # type: ignore[misc]
        plans.append(LayerPlan(make, cost=float(matrices + attention), transformer=True))
    head = seeded(model.num_layers + 1, lambda: Head(model))
    plans.append(LayerPlan(head, cost=float(hidden * model.vocab_size), transformer=False))
    return plans


def loss_fn(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross-entropy in nats a token, FP32 scalar; targets are int64 [B, T]."""
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


class Embedding(nn.Module):
    """Token ids int64 [B, T] to the residual stream bf16 [B, T, D]."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(model.vocab_size, model.hidden_size, dtype=torch.bfloat16)
        )

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return F.embedding(tokens_BT, self.weight)


class RMSNorm(nn.Module):
    """Scales each vector to root mean square 1, then by a learned weight; FP32 inside."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.bfloat16))
        self.eps = eps

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.rms_norm(x_BTD, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions, softmax in high precision."""

    def __init__(self, model: ModelConfig, name: str, scope: PrecisionScope) -> None:
        super().__init__()
        self.num_heads = model.num_heads
        self.num_kv_heads = model.num_kv_heads or model.num_heads
        self.head_size = model.hidden_size // model.num_heads
        self.rope_theta = model.rope_theta
        qkv_width = (self.num_heads + 2 * self.num_kv_heads) * self.head_size
        self.qkv = scope.linear(f"{name}.qkv", model.hidden_size, qkv_width)
        self.out = scope.linear(f"{name}.out", model.hidden_size, model.hidden_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        heads = (self.num_heads + self.num_kv_heads, self.num_kv_heads)
        qkv_BTHE = self.qkv(x_BTD).unflatten(-1, (sum(heads), self.head_size))
        # Queries and keys turn together: they stand side by side in one tensor.
        qk_BTHE, v_BTKE = qkv_BTHE.split(heads, dim=2)
        qk_BTHE = rotate(qk_BTHE, *self._rotary_table(x_BTD))
        q_BTHE, k_BTKE = qk_BTHE.split((self.num_heads, self.num_kv_heads), dim=2)
        q_BHTE, k_BKTE, v_BKTE = (x.transpose(1, 2) for x in (q_BTHE, k_BTKE, v_BTKE))
        if x_BTD.device.type == "cpu":
            # The same BF16 values in FP32: its backward pass is more than twice as fast there.
            q_BHTE, k_BKTE, v_BKTE = q_BHTE.float(), k_BKTE.float(), v_BKTE.float()
        mixed_BHTE = F.scaled_dot_product_attention(
            q_BHTE,
            k_BKTE,
            v_BKTE,
            is_causal=True,
            enable_gqa=self.num_kv_heads != self.num_heads,
        )
        return self.out(mixed_BHTE.transpose(1, 2).flatten(2).to(x_BTD.dtype))

    def _rotary_table(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_table(x_BTD.shape[1], self.head_size, self.rope_theta, x_BTD.device)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)), gate and up in one matrix."""

    def __init__(self, model: ModelConfig, name: str, scope: PrecisionScope) -> None:
        super().__init__()
        width = ffn_size(model)
        self.gate_up = scope.linear(f"{name}.gate_up", model.hidden_size, 2 * width)
        self.down = scope.linear(f"{name}.down", width, model.hidden_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate, up = self.gate_up(x_BTD).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class TransformerLayer(nn.Module):
    """Attention and MLP, each on the normed residual stream, each added to it; bf16 [B, T, D]."""

    def __init__(self, model: ModelConfig, index: int, scope: PrecisionScope) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(model.hidden_size, model.norm_eps)
        self.attn = Attention(model, f"layers.{index}.attn", scope)
        self.mlp_norm = RMSNorm(model.hidden_size, model.norm_eps)
        self.mlp = MLP(model, f"layers.{index}.mlp", scope)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD))
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Head(nn.Module):
    """Final norm and the (untied) projection to logits, bf16 [B, T, V]."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(model.hidden_size, model.norm_eps)
        self.weight = nn.Parameter(
            torch.empty(model.vocab_size, model.hidden_size, dtype=torch.bfloat16)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.linear(self.norm(x_BTD), self.weight)


@lru_cache(maxsize=8)
def rotary_table(
    seq_len: int, head_size: int, theta: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, each FP32 [T, 1, E/2].

    Not a buffer of a module: DeepSpeed casts a model's buffers to BF16, in which the
    positions of long sequences run together.
    """
    frequencies = theta ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), frequencies).unsqueeze(1)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def rotate(x_BTHE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn feature pairs (e, e + E/2) of each head by their position's angle; FP32 inside."""
    first, second = x_BTHE.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x_BTHE.dtype)


@torch.no_grad()
def _initialize(module: nn.Module, model: ModelConfig, *, seed: int, index: int) -> None:
    """Normal weights; those that write to the residual stream smaller by sqrt(2 · layers)."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + index) % 2**63)
    for name, parameter in module.named_parameters():
        if parameter.dim() < 2:
            continue  # norm weights start at one
        into_residual = name in ("attn.out.weight", "mlp.down.weight")
        std = model.init_std / (math.sqrt(2 * model.num_layers) if into_residual else 1.0)
        parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
