"""A user's own model for ``model.factory``: no attention, a mixing of tokens, LayerNorms."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.model_plan import LayerPlan, ModelPlan
from parallel.precision.backend import LayerScope


class Block(nn.Module):
    """Each token sees the mean of those before it, then an MLP."""

    def __init__(self, index: int, width: int, scope: LayerScope) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = scope.linear(f"layers.{index}.mix", 2 * width, width)
        self.mlp = scope.norm_mlp(
            f"layers.{index}.mlp", width, 2 * width, eps=1e-5, smooth=False, sharded=True
        )
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(0, 0.05)

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype)[:, None]
        normed = self.norm(x)
        past = normed.float().cumsum(1).to(x.dtype) / counts
        x = x + self.mix(torch.cat((normed, past), -1))
        result: Tensor = x + self.mlp(x)
        return result


class Ends(nn.Module):
    """Embedding and head in one: the matrix that both ends share."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width).normal_(0, 0.05))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


def make(*, options: dict[str, Any], seq_len: int, seed: int, scope: LayerScope) -> ModelPlan:
    """``options``: width, depth, vocabulary."""
    width, depth = options["width"], options["depth"]
    ends = partial(Ends, options.get("vocabulary", 256), width)
    blocks = [LayerPlan(f"layers.{i}", partial(Block, i, width, scope)) for i in range(depth)]
    first = LayerPlan("ends", ends, transformer=False, tied="ends")
    last = LayerPlan("ends", ends, transformer=False, tied="ends", forward=_logits)
    return ModelPlan([first, *blocks, last], _loss)


def _logits(ends: nn.Module, x: Tensor) -> Tensor:
    return F.linear(x, ends.weight)  # type: ignore[arg-type]


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
