"""The native FP8 linear: quantized operands, exact products, one scaling at the end.

Shapes: x_TI, g_TO, w_OI with T tokens (all leading dimensions), I inputs, O outputs.
A suffix q marks BF16 values that are exactly FP8 values::

    output      y_TO  = (xq_TI  @ wq_OI.T) * (x_scale_inv * w_scale_inv)
    grad_input  dx_TI = (gq_TO  @ wq_OI)   * (g_scale_inv * w_scale_inv)
    grad_weight dw_OI = (gq_TO.T @ xq_TI)  * (g_scale_inv * x_scale_inv)

Products of FP8 values are exact in FP32, and the sums are FP32's. On CUDA they leave the
product in FP32 and are rounded once, to BF16, after scaling. On CPU PyTorch has no BF16
product with an FP32 result, and an FP32 product takes 2.1 times as long (655 against 315 µs
at 512×128×512), so there they are rounded to BF16 before and after scaling: at most 2⁻⁷
relative together, an eighth of what rounding one operand to E4M3 may cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.config import Precision
from parallel.precision import kernels
from parallel.precision.layers import Observation
from parallel.precision.quantize import Quantized, TensorSlot
from parallel.precision.recipes import Role
from parallel.tensor import Shard, mark_sharded


def scaled_product(
    a: Tensor,
    b: Tensor,
    a_scale_inv: Tensor,
    b_scale_inv: Tensor,
    library: kernels.Library | None = None,
) -> Tensor:
    """``a @ b * (a_scale_inv * b_scale_inv)`` in BF16, with FP32 sums and FP32 scales."""
    if a.is_cuda:
        product = torch.mm(a, b, out_dtype=torch.float32)
        return product.mul_(a_scale_inv * b_scale_inv).to(torch.bfloat16)
    product = torch.mm(a, b)
    if library is None:
        # A scalar tensor on CPU takes part at FP32 inside the kernel, not rounded to BF16.
        return product.mul_(a_scale_inv * b_scale_inv)
    library.octavo_rescale(
        product.data_ptr(), product.numel(), a_scale_inv.data_ptr(), b_scale_inv.data_ptr()
    )
    return product


def _bf16(x: Tensor) -> Tensor:
    return x if x.dtype is torch.bfloat16 else x.to(torch.bfloat16)


class BF16Linear(nn.Linear):
    """A linear that stays in BF16 throughout; features are those of this rank's shard."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=False, dtype=dtype, device=device)
        self.shard = shard
        if shard is not None:
            mark_sharded(self.weight)

    def forward(self, input: Tensor, undo: Tensor | None = None) -> Tensor:
        """As ``nn.Linear``; with a shard, the whole matrix's outputs or this rank's of them.

        ``undo`` as in ``Float8Linear``.
        """

        def own(x: Tensor) -> Tensor:
            return F.linear(x if undo is None else x * undo, self.weight)

        return own(input) if self.shard is None else self.shard.run(own, input)


class Float8Linear(nn.Linear):
    """A linear whose products are of FP8 operands while ``current`` is ``fp8``.

    While in BF16 it computes what ``nn.Linear`` does, to the bit, and goes on observing amax,
    so that its scales are fresh when it returns. Outside ``train()`` mode nothing is
    observed. The weight is quantized once and kept until ``forget_weight``; whoever changes
    the weight calls that, which the scope does at every step boundary.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        bind: Callable[[], object],
        shard: Shard | None = None,
        observation: Observation | None = None,
    ) -> None:
        """``bind`` has this layer's ``slots`` set; it is called at the first forward.

        With ``shard`` the features are those of this rank's part of the matrix. While
        ``observation`` is paused nothing is observed.
        """
        super().__init__(in_features, out_features, bias=False, dtype=dtype, device=device)
        self.name = name
        self.current: Precision = "fp8"
        self.slots: dict[Role, TensorSlot] | None = None
        self.shard = shard
        if shard is not None:
            mark_sharded(self.weight)
        self._observation = observation or Observation()
        self._bind = bind
        self._weight_q: Quantized | None = None
        self._weight_seen = False

    def forward(self, input: Tensor, undo: Tensor | None = None) -> Tensor:
        """``input @ weight.T``; [..., in_features] → [..., out_features], dtype of ``input``.

        ``undo``: powers of two [in_features] that the quantized input is multiplied by in the
        product, and the unquantized one in BF16 (Smooth SwiGLU's ``s^-1``).
        """
        if self.slots is None:
            self._bind()
        if self.shard is None:
            return self._own(input, undo)
        return self.shard.run(lambda x: self._own(x, undo), input)

    def _own(self, input: Tensor, undo: Tensor | None) -> Tensor:
        """The product of this rank's shard alone."""
        if self.current == "fp8":
            return _Float8Product.apply(input, self.weight, self, undo)
        if self._observes:
            self._observe_operands(input)
        output = F.linear(input if undo is None else input * undo, self.weight)
        if self.training and output.requires_grad:
            output = _ObserveGradient.apply(output, self.slot("grad_output"))
        return output

    @property
    def _observes(self) -> bool:
        return self.training and self._observation.active

    def slot(self, role: Role) -> TensorSlot:
        """Where the operand ``role`` gets its scale and leaves its statistics now."""
        assert self.slots is not None
        slot = self.slots[role]
        return slot if self._observes else slot.without_observation()

    def quantized_weight(self) -> Quantized:
        """wq_OI, quantized at the first call after ``forget_weight``."""
        # What evaluation quantized was not observed: training sees it once a step all the same.
        if self._weight_q is None or (self._observes and not self._weight_seen):
            weight = _bf16(self.weight.detach())
            self._weight_q = self.slot("weight").quantize(weight, keep_payload=False)
            self._weight_seen = self._observes
        return self._weight_q

    def forget_weight(self) -> None:
        """The weight has changed or may have: quantize it again when next needed."""
        self._weight_q = None
        self._weight_seen = False

    def _observe_operands(self, input: Tensor) -> None:
        self.slot("input").observe(_bf16(input.detach()))
        if not self._weight_seen:
            self.slot("weight").observe(_bf16(self.weight.detach()))
            self._weight_seen = True

    def extra_repr(self) -> str:
        """Present precision, and each operand's format and scaling."""
        line = f"{self.in_features} → {self.out_features}, {self.name}, {self.current}"
        if self.current == "fp8" and self.slots is not None:
            operands = (
                f"{role} {slot.format.name} {slot.recipe.scaling}"
                for role, slot in self.slots.items()
            )
            line += ": " + ", ".join(operands)
        return line


class _Float8Product(torch.autograd.Function):
    """Three products of quantized operands; the input waits for its backward in FP8."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, layer: Float8Linear, undo: Tensor | None
    ) -> Tensor:
        slot = layer.slot("input")
        x_TI = _bf16(input.reshape(-1, layer.in_features))
        x = slot.quantize(x_TI, keep_payload=weight.requires_grad)
        w = layer.quantized_weight()
        # Of the two operands the weight is the smaller; by powers of two it stays exact.
        wq_OI = w.values if undo is None else w.values * undo
        y_TO = scaled_product(x.values, wq_OI.t(), x.scale_inv, w.scale_inv, slot.library)
        # The weight's BF16 values are kept, not its FP8 payload: all micro-batches share them.
        ctx.save_for_backward(x.payload, x.scale_inv, w.values, w.scale_inv, undo)
        ctx.layer = layer
        ctx.input_shape = input.shape
        ctx.dtypes = input.dtype, weight.dtype
        return y_TO.view(*input.shape[:-1], layer.out_features).to(input.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError("an FP8 linear has no second derivative (create_graph=True)")
        layer: Float8Linear = ctx.layer
        payload_TI, x_scale_inv, wq_OI, w_scale_inv, undo = ctx.saved_tensors
        input_dtype, weight_dtype = ctx.dtypes
        slot = layer.slot("grad_output")
        library = slot.library
        g_TO = _bf16(grad_output.reshape(-1, layer.out_features))
        g = slot.quantize(g_TO, keep_payload=False)
        grad_input = grad_weight = None
        if ctx.needs_input_grad[0]:
            dx_TI = scaled_product(g.values, wq_OI, g.scale_inv, w_scale_inv, library)
            dx_TI = dx_TI if undo is None else dx_TI.mul_(undo)
            grad_input = dx_TI.view(ctx.input_shape).to(input_dtype)
        if ctx.needs_input_grad[1]:
            xq_TI = layer.slot("input").upcast(payload_TI)
            dw_OI = scaled_product(g.values.t(), xq_TI, g.scale_inv, x_scale_inv, library)
            dw_OI = dw_OI if undo is None else dw_OI.mul_(undo)
            grad_weight = dw_OI.to(weight_dtype)
        return grad_input, grad_weight, None, None


class _ObserveGradient(torch.autograd.Function):
    """The identity, which sees the gradient that passes backward through it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, slot: TensorSlot) -> Tensor:
        ctx.slot = slot
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        ctx.slot.observe(_bf16(grad_output.detach()))
        return grad_output, None
