"""The decoder-only transformer: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

The model is a list of layers, each taking the one tensor that the layer before it returned,
so that the same list makes a DeepSpeed ``PipelineModule`` (a stage builds only its own) and
a plain ``nn.Sequential``. Linears inside transformer layers come from the rank's
``LayerScope`` and may compute in FP8; embedding, norms, rotary, softmax, residual stream
and head stay in BF16, the loss is FP32.

With tensor ranks a transformer layer is sharded by heads (queries, keys and values each) and
by MLP channels, with two sums forward and two backward. Embedding, norms, residual stream and
head are replicated over them: every tensor rank holds them whole and computes the same bits.

Promises: a layer's initial weights are a function of (seed, layer index) alone, drawn whole on
the CPU and then cut, so every layout and device starts from the same bits. Nothing here is
random afterwards.

Shape suffixes: B sequences of a micro-batch, T tokens a sequence, D hidden, H query heads,
K key and value heads, E features a head, V vocabulary. H and K are those of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.config import ModelConfig
from parallel.layer_costs import ffn_size, head_cost, layer_cost
from parallel.model_plan import LayerPlan
from parallel.precision.backend import LayerScope
from parallel.precision.layers import RMSNorm
from parallel.tensor import ShardKind, TensorGroup, slice_weight

TIED = "embedding"
"""Key of the matrix that embedding and head share with ``tie_embeddings``."""


def layer_plans(
    model: ModelConfig,
    *,
    seq_len: int,
    seed: int,
    scope: LayerScope,
    tensor: TensorGroup | None = None,
) -> list[LayerPlan]:
    """The whole model as plans: embedding, ``num_layers`` transformer layers, head.

    The first layer takes token ids int64 [B, T], the last returns logits bf16 [B, T, V],
    between them goes the residual stream bf16 [B, T, D]. Building transformer layer i
    registers its four linears with ``scope``. ``tensor`` is the ranks that share them, the
    same that ``scope`` was made with. Tied embeddings make the head two layers: the norm, and
    the product with the embedding's matrix.
    """
    cost = layer_cost(model, seq_len=seq_len, shards=tensor.size if tensor else 1)

    def seeded(index: int, make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            module = make()
            _initialize(module, model, tensor, seed=seed, index=index)
            return module

        return build

    tied = TIED if model.tie_embeddings else None
    embed = seeded(0, lambda: Embedding(model))
    plans = [LayerPlan("embedding", embed, cost=0.0, transformer=False, tied=tied)]
    for i in range(model.num_layers):

        def layer(i: int = i) -> nn.Module:
            return TransformerLayer(model, i, scope, tensor)

        plans.append(LayerPlan(f"layers.{i}", seeded(i + 1, layer), cost=cost))
    of_head = head_cost(model)
    if tied is None:
        head = seeded(model.num_layers + 1, lambda: Head(model))
        plans.append(LayerPlan("head", head, cost=of_head, transformer=False))
    else:
        plans += [
            LayerPlan("head", lambda: FinalNorm(model), cost=0.0, transformer=False),
            LayerPlan("head", embed, of_head, transformer=False, tied=tied, forward=_project),
        ]
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


class Attention(nn.Module):
    """Norm, then causal grouped-query attention with rotary positions; this rank's heads."""

    def __init__(
        self, model: ModelConfig, name: str, scope: LayerScope, tensor: TensorGroup | None
    ) -> None:
        super().__init__()
        kv_heads, shards = model.num_kv_heads or model.num_heads, tensor.size if tensor else 1
        if model.num_heads % shards or kv_heads % shards:
            raise ValueError(
                f"num_heads {model.num_heads} and num_kv_heads {kv_heads} must be divisible by "
                f"{shards} tensor ranks"
            )
        self.num_heads = model.num_heads // shards
        self.num_kv_heads = kv_heads // shards
        self.head_size = model.hidden_size // model.num_heads
        self.rope_theta = model.rope_theta
        hidden, kv_width = model.hidden_size, kv_heads * self.head_size
        sections = (hidden, kv_width, kv_width)
        self.qkv = scope.norm_linear(
            f"{name}.qkv",
            hidden,
            sum(sections),
            eps=model.norm_eps,
            shard="column",
            sections=sections,
        )
        self.out = scope.linear(f"{name}.out", hidden, hidden, shard="row")

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
        result: Tensor = self.out(mixed_BHTE.transpose(1, 2).flatten(2).to(x_BTD.dtype))
        return result

    def _rotary_table(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        return rotary_table(x_BTD.shape[1], self.head_size, self.rope_theta, x_BTD.device)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A weight of a transformer layer, as it is before it is cut into shards."""

    parameter: Tensor
    shape: tuple[int, int]
    shard: ShardKind
    sections: tuple[int, ...] = ()
    """Blocks of rows that are cut each by itself."""
    into_residual: bool = False


class TransformerLayer(nn.Module):
    """Attention and MLP, each on the normed residual stream, each added to it; bf16 [B, T, D]."""

    def __init__(
        self,
        model: ModelConfig,
        index: int,
        scope: LayerScope,
        tensor: TensorGroup | None = None,
    ) -> None:
        super().__init__()
        self.attn = Attention(model, f"layers.{index}.attn", scope, tensor)
        self.mlp = scope.norm_mlp(
            f"layers.{index}.mlp",
            model.hidden_size,
            ffn_size(model),
            eps=model.norm_eps,
            smooth=model.smooth_swiglu,
            sharded=True,
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attn(x_BTD)
        result: Tensor = x_BTD + self.mlp(x_BTD)
        return result

    def matrices(self, model: ModelConfig) -> Iterator[_Matrix]:
        """Its weights, in the order in which they are drawn."""
        hidden, inner = model.hidden_size, ffn_size(model)
        kv_width = (model.num_kv_heads or model.num_heads) * self.attn.head_size
        qkv, up = (hidden, kv_width, kv_width), (inner, inner)
        attn, mlp = self.attn, self.mlp
        yield _Matrix(attn.qkv.weight, (sum(qkv), hidden), "column", qkv)  # type: ignore[arg-type]
        yield _Matrix(attn.out.weight, (hidden, hidden), "row", into_residual=True)  # type: ignore[arg-type]
        yield _Matrix(mlp.gate_up.weight, (sum(up), hidden), "column", up)  # type: ignore[union-attr, arg-type]
        yield _Matrix(mlp.down.weight, (hidden, inner), "row", into_residual=True)  # type: ignore[union-attr, arg-type]


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


class FinalNorm(nn.Module):
    """Norm before a tied head; bf16 [B, T, D]."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(model.hidden_size, model.norm_eps)

    def forward(self, x_BTD: Tensor) -> Tensor:
        result: Tensor = self.norm(x_BTD)
        return result


def _project(embedding: nn.Module, x_BTD: Tensor) -> Tensor:
    """Logits bf16 [B, T, V] by the embedding's own matrix."""
    return F.linear(x_BTD, embedding.weight)  # type: ignore[arg-type]


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
def _initialize(
    module: nn.Module, model: ModelConfig, tensor: TensorGroup | None, *, seed: int, index: int
) -> None:
    """Normal weights; those that write to the residual stream smaller by sqrt(2 · layers)."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + index) % 2**63)

    def drawn(shape: tuple[int, ...], into_residual: bool) -> Tensor:
        std = model.init_std / (math.sqrt(2 * model.num_layers) if into_residual else 1.0)
        return torch.empty(shape, dtype=torch.float32).normal_(0.0, std, generator=generator)

    if isinstance(module, TransformerLayer):
        for matrix in module.matrices(model):
            whole = drawn(matrix.shape, matrix.into_residual)
            if tensor is not None:
                whole = slice_weight(
                    whole, matrix.shard, tensor.index, tensor.size, matrix.sections
                )
            matrix.parameter.copy_(whole)
        return
    for parameter in module.parameters():
        if parameter.dim() >= 2:  # norm weights start at one
            parameter.copy_(drawn(tuple(parameter.shape), into_residual=False))
