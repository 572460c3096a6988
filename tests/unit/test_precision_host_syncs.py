"""A training step of FP8 layers never waits for the device to hand a value to the host.

Two proofs: every operation of a step is counted by name as it is dispatched, and the whole step
runs on PyTorch's ``meta`` device, which has no values to read (``tolist`` isn't dispatched).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.config import Precision
from parallel.precision.scope import PrecisionScope
from tests.unit.precision_recipes import both_ways, every_variant, fp8_config

NAMES = ("layers.0.attn.qkv", "layers.0.mlp")
TOKENS, WIDTH = 48, 64

WAITING = frozenset(
    f"aten::{name}"
    for name in (
        *("_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero"),
        *("masked_select", "unique_dim", "unique_consecutive", "_unique2", "bincount"),
        *("nonzero_static", "repeat_interleave.Tensor", "index.Tensor_bool"),
    )
)
"""Operations whose result the host needs before it can go on."""


class HostReads(TorchDispatchMode):
    """Notes operations that wait, and copies that leave a device for the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        waits = name in WAITING or f"{name}.{func._overloadname}" in WAITING
        tensors = [a for a in (*args, *(kwargs or {}).values()) if isinstance(a, Tensor)]
        if name == "aten::index":
            indices = [i for i in args[1] if i is not None]
            waits |= any(i.dtype in (torch.bool, torch.uint8) for i in indices)
        if isinstance(result, Tensor) and result.device.type == "cpu":
            waits |= any(t.device.type != "cpu" for t in tensors)
        if waits:
            self.reads.append(name)
        return result


def stage(recipe: str, *, compiled: bool, device: str = "cpu") -> tuple[PrecisionScope, nn.Module]:
    config = fp8_config(recipe, sqnr=True)
    scope = PrecisionScope("fp8", config, num_layers=1, compiled=compiled, device=device)
    linear = scope.norm_linear(NAMES[0], WIDTH, WIDTH, eps=1e-5)
    mlp = scope.norm_mlp(NAMES[1], WIDTH, 2 * WIDTH, eps=1e-5, smooth=True)
    return scope, nn.Sequential(linear, mlp)


def step(scope: PrecisionScope, layers: nn.Module, device: str = "cpu") -> None:
    for recompute in (False, True):
        x = torch.randn(TOKENS, WIDTH, device=device).bfloat16().requires_grad_()
        with scope.micro_batch():
            y = scope.checkpoint(layers, x) if recompute else layers(x)
        y.backward(torch.randn(TOKENS, WIDTH, device=device).bfloat16())
    scope.reduce_amax(None)
    scope.finish_step(applied=True)
    scope.collect(every_counter=True)
    scope.statistics()


@both_ways
@every_variant
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_a_whole_step_reads_nothing_back_to_the_host(compiled, recipe, precision: Precision):
    scope, layers = stage(recipe, compiled=compiled)
    step(scope, layers)
    scope.set_precision(dict.fromkeys(scope.layers, precision))
    with HostReads() as seen:
        step(scope, layers)
    assert seen.reads == []
    assert seen.operations > 50


@every_variant
def test_a_step_and_a_change_of_precision_run_on_a_device_without_values(recipe):
    scope, layers = stage(recipe, compiled=True, device="meta")
    step(scope, layers, "meta")
    for precision in ("bf16", "fp8"):
        scope.set_precision(dict.fromkeys(scope.layers, precision))
        step(scope, layers, "meta")


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.equal(x, x),
        lambda x: float(x.amax()),
    ],
)
def test_what_would_wait_is_seen(read):
    with HostReads() as seen:
        read(torch.ones(3))
    assert seen.reads
    for on_meta in (read, Tensor.tolist, Tensor.cpu):
        with pytest.raises((RuntimeError, NotImplementedError)):
            on_meta(torch.ones(3, device="meta"))
