"""A layer on the Transformer Engine adapter, and steps of it, for the tests on its stand-in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from parallel.config import FP8Config
from parallel.precision.backend import LayerScope
from parallel.precision.transformer_engine_scope import TransformerEngineScope

HIDDEN, FFN, TOKENS = 128, 128, 128
STAGE: Any = object()
RECIPES = {
    "delayed": FP8Config(recipe="delayed", amax_history_len=4),
    "most_recent": FP8Config(
        recipe="delayed", amax_history_len=4, amax_compute_algo="most_recent", margin=1
    ),
    "ema": FP8Config(recipe="delayed", amax_history_len=4, amax_compute_algo="ema"),
    "current": FP8Config(recipe="current"),
    "block": FP8Config(recipe="block"),
    "mxfp8": FP8Config(recipe="mxfp8"),
}
LINEARS = ("layers.0.attn.qkv", "layers.0.attn.out", "layers.0.mlp.gate_up", "layers.0.mlp.down")


class Layer(nn.Module):
    """What a transformer layer asks of a scope, without attention in between."""

    def __init__(self, scope: LayerScope, seed: int = 0) -> None:
        super().__init__()
        self.qkv = scope.norm_linear(LINEARS[0], HIDDEN, HIDDEN, eps=1e-5)
        self.out = scope.linear(LINEARS[1], HIDDEN, HIDDEN)
        self.mlp = scope.norm_mlp(
            "layers.0.mlp", HIDDEN, FFN, eps=1e-5, smooth=False, sharded=False
        )
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() == 2:
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.qkv(x))
        return x + self.mlp(x)


def scope_of(config: FP8Config, **more: Any) -> TransformerEngineScope:
    return TransformerEngineScope("fp8", config, num_layers=1, device="cpu", stage=STAGE, **more)


def inputs(step: int, micro: int, size: float = 1.0) -> tuple[Tensor, Tensor]:
    """An input and an output gradient whose values have many magnitudes."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    shape = (2, TOKENS // 2, HIDDEN)
    uneven = torch.exp2(torch.randint(-6, 6, shape, generator=generator).float())
    x = size * torch.randn(shape, generator=generator) * uneven
    grad = torch.randn(shape, generator=generator) * uneven * 1e-3
    return x.bfloat16().requires_grad_(), grad.bfloat16()


def train_step(
    scope: LayerScope,
    layer: nn.Module,
    step: int,
    *,
    micro_batches: int = 1,
    applied: bool = True,
    size: float = 1.0,
    grad_size: float = 1.0,
    recompute: bool = False,
) -> list[Tensor]:
    """One step; the gradients of all parameters and inputs."""
    layer.zero_grad()
    grads: list[Tensor] = []
    for micro in range(micro_batches):
        x, grad = inputs(step, micro, size)
        with scope.micro_batch():
            y = scope.checkpoint(layer, x) if recompute else layer(x)
        y.backward(grad * grad_size)
        assert x.grad is not None
        grads.append(x.grad)
    scope.reduce_amax(None)
    scope.finish_step(applied)
    return grads + [p.grad.clone() for p in layer.parameters() if p.grad is not None]


def state_of(scope: LayerScope) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in scope.state_tensors().items()}


def assert_equal_states(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name
