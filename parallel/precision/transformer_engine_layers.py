"""The modules of the Transformer Engine scope: which precision a forward runs in, who looks on.

A module here holds parameters under the native layers' names and calls a Transformer Engine
module that it keeps out of the module tree (see ``transformer_engine_scope``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.config import FP8Config, Precision
from parallel.precision.choice import Workload, misfit
from parallel.precision.operand_statistics import OperandRow
from parallel.precision.recipes import Role
from parallel.tensor import mark_sharded


class Forward:
    """Where in a step the linears of a scope are; shared by all of them."""

    def __init__(self, disabled: Callable[[], AbstractContextManager[Any]]) -> None:
        """``disabled`` makes the context of one BF16 forward inside an FP8 one."""
        self.disabled = disabled
        self.active = False
        """Inside ``micro_batch``, or in a second pass of it."""
        self.recomputing = False

    @contextmanager
    def within(self, context: AbstractContextManager[Any]) -> Iterator[None]:
        """The forward of a micro-batch inside ``context``."""
        if self.active:
            raise RuntimeError("micro_batch() inside micro_batch(): amax would be reduced once")
        self.active = True
        try:
            with context:
                yield
        finally:
            self.active = False

    def recomputed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, of whose calls the first is the forward and others are second passes."""
        if not self.active:
            raise RuntimeError("checkpoint() outside micro_batch(): it would run in BF16")
        calls = 0

        def run(*args: Any) -> Any:
            nonlocal calls
            before = self.active, self.recomputing
            self.active, self.recomputing = True, calls > 0
            calls += 1
            try:
                return function(*args)
            finally:
                self.active, self.recomputing = before

        return run


class LinearHandle:
    """One linear: its Transformer Engine module, its precision, and what is seen of it."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        *,
        eps: float | None,
        config: FP8Config,
        forward: Forward,
    ) -> None:
        """``eps`` is that of the norm in ``module``, None where there is none."""
        self.name = name
        self.module = module
        self.current: Precision = "fp8"
        self.sampling = False
        self.weight_seen = False
        self._input_seen = self._gradient_due = self._gradient_seen = False
        self.observed: dict[Role, OperandRow] = {}
        """Empty for a linear that stays in BF16."""
        self._eps = eps
        self._config = config
        self._forward = forward

    @property
    def weight(self) -> nn.Parameter:
        """The weight of this rank's shard."""
        weight: nn.Parameter = self.module.weight  # type: ignore[assignment]
        return weight

    @property
    def norm_weight(self) -> nn.Parameter:
        """The norm's weight, of a norm and linear."""
        weight: nn.Parameter = self.module.layer_norm_weight  # type: ignore[assignment]
        return weight

    def mark_sharded(self) -> None:
        """Tell DeepSpeed that the weight is a part; the norm's is whole on every rank."""
        mark_sharded(self.weight)

    def __call__(self, x: Tensor) -> Tensor:
        if not self._forward.active:
            raise RuntimeError(f"linear {self.name!r} outside micro_batch(): it would run in BF16")
        quantized = self.current == "fp8"
        if quantized and (wrong := self._wrong_tokens(x)):
            raise ValueError(f"linear {self.name!r}: {wrong}")
        looking = self._looks_on(quantized)
        if looking and not self._forward.recomputing:
            self._see_operands(x.detach(), quantized)
        y: Tensor
        if quantized:
            y = self.module(x)
        else:
            with self._forward.disabled():
                y = self.module(x)
        if looking and y.requires_grad:
            self._gradient_due = True
            y = _SeeGradient.apply(y, self, quantized)
        return y

    def take_seen(self) -> bool:
        """Whether all operands were observed since the last call; starts anew."""
        seen = self._input_seen and (self._gradient_seen or not self._gradient_due)
        self._input_seen = self._gradient_due = self._gradient_seen = False
        return seen

    def see_gradient(self, grad_output: Tensor, quantized: bool) -> None:
        """What comes back through the linear's output."""
        self._gradient_seen = True
        row = self.observed["grad_output"]
        row.observe(grad_output, quantized=quantized, counted=self.sampling)

    def _looks_on(self, quantized: bool) -> bool:
        if not self.observed or not self.module.training:
            return False
        return self.sampling or (not quantized and self._config.recipe == "delayed")

    def _see_operands(self, x: Tensor, quantized: bool) -> None:
        if self._eps is not None:
            norm_weight = self.norm_weight.detach()
            x = F.rms_norm(x, norm_weight.shape, norm_weight, self._eps)
        self._input_seen = True
        self.observed["input"].observe(x, quantized=quantized, counted=self.sampling)
        if not self.weight_seen:
            weight = self.weight.detach()
            self.observed["weight"].observe(weight, quantized=quantized, counted=self.sampling)
            self.weight_seen = True

    def _wrong_tokens(self, x: Tensor) -> str:
        return misfit(self._config, Workload(tokens=x.numel() // max(x.shape[-1], 1)))

    def __repr__(self) -> str:
        weight = self.weight
        what = f"{self._config.recipe} {self._config.format}" if self.current == "fp8" else "bf16"
        return f"{weight.shape[1]} → {weight.shape[0]}, {self.name}, {what}, Transformer Engine"


class _SeeGradient(torch.autograd.Function):
    """The identity, which looks at the gradient that passes backward through it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, handle: LinearHandle, quantized: bool) -> Tensor:
        ctx.handle, ctx.quantized = handle, quantized
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        ctx.handle.see_gradient(grad_output.detach(), ctx.quantized)
        return grad_output, None, None


class _Held(nn.Module):
    """A parameter under the name that the native layers give it."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class _Switched(nn.Module):
    """A module of handles, whose Transformer Engine modules follow its ``train`` mode."""

    def __init__(self, *handles: LinearHandle) -> None:
        super().__init__()
        self._handles = handles

    def train(self, mode: bool = True) -> _Switched:
        """As ``nn.Module.train``."""
        for handle in self._handles:
            handle.module.train(mode)
        super().train(mode)
        return self

    def extra_repr(self) -> str:
        """Each linear's present precision."""
        return "; ".join(map(repr, self._handles))


class SwitchedLinear(_Switched):
    """A linear; [..., in_features] → [..., out_features], bf16."""

    def __init__(self, handle: LinearHandle) -> None:
        super().__init__(handle)
        self.weight = handle.weight

    def forward(self, x: Tensor) -> Tensor:
        return self._handles[0](x)


class SwitchedNormLinear(_Switched):
    """RMSNorm and a linear; [..., in_features] → [..., out_features], bf16."""

    def __init__(self, handle: LinearHandle) -> None:
        super().__init__(handle)
        self.norm = _Held(handle.norm_weight)
        self.linear = _Held(handle.weight)

    @property
    def weight(self) -> Tensor:
        """The linear's weight, of this rank's shard."""
        return self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return self._handles[0](x)


class SwitchedMLP(_Switched):
    """RMSNorm and SwiGLU: down(silu(gate(x)) · up(x)); [..., hidden] → [..., hidden], bf16."""

    def __init__(self, gate_up: LinearHandle, down: LinearHandle) -> None:
        super().__init__(gate_up, down)
        self.norm = _Held(gate_up.norm_weight)
        self.gate_up = _Held(gate_up.weight)
        self.down = _Held(down.weight)

    def forward(self, x: Tensor) -> Tensor:
        gate_up, down = self._handles
        gate, up = gate_up(x).chunk(2, dim=-1)
        return down(F.silu(gate) * up)
