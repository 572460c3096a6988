"""The native FP8 linear: quantized operands, exact products, one scaling at the end.

Shapes: x_TI, g_TO, w_OI with T tokens (all leading dimensions), I inputs, O outputs. A suffix
q marks quantized values, r or c whether they were quantized for a product that contracts over
their columns (along rows) or over their rows::

    output      y_TO  = (xqr_TI  @ wqr_OI.T) * (x_scale_inv * w_scale_inv)
    grad_input  dx_TI = (gqr_TO  @ wqc_OI)   * (g_scale_inv * w_scale_inv)
    grad_weight dw_OI = (gqc_TO.T @ xqc_TI)  * (g_scale_inv * x_scale_inv)

How an operand is quantized, and whether r and c differ, is its recipe's (``quantizers.py``).
Where scales are powers of two by block, values come dequantized and the factor behind the
product falls away.

Products of FP8 values are exact in FP32, and the sums are FP32's. On CUDA they leave the
product in FP32 and are rounded once, to BF16, after scaling. On CPU PyTorch has no BF16
product with an FP32 result, and an FP32 product takes 2.1 times as long (655 against 315 µs
at 512×128×512), so there they are rounded to BF16 before and after scaling: at most 2⁻⁷
relative together, an eighth of what rounding one operand to E4M3 may cost.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.config import Precision
from parallel.precision import kernels
from parallel.precision.layers import Observation
from parallel.precision.quantizers import Factor, Kept, Quantized, Quantizer
from parallel.precision.recipes import Role
from parallel.tensor import Shard, mark_sharded


def product(a: Factor, b: Factor, library: kernels.Library | None = None) -> Tensor:
    """``a @ b`` in BF16 with FP32 sums, and their scales applied in FP32 where they have any.

    Raises RuntimeError where the product on CPU isn't BF16, as under autocast.
    """
    if a.values.dtype == torch.float32 or b.values.dtype == torch.float32:
        return torch.mm(a.values.float(), b.values.float()).to(torch.bfloat16)
    if a.values.is_cuda:
        result = torch.mm(a.values, b.values, out_dtype=torch.float32)
        if a.scale_inv is not None and b.scale_inv is not None:
            result.mul_(a.scale_inv * b.scale_inv)
        return result.to(torch.bfloat16)
    result = torch.mm(a.values, b.values)
    if result.dtype is not torch.bfloat16:
        # What comes next, in C, reads BF16 whatever it is given.
        raise RuntimeError(f"a product of BF16 values came out in {result.dtype}")
    if a.scale_inv is None or b.scale_inv is None:
        return result
    if library is None:
        # A scalar tensor on CPU takes part at FP32 inside the kernel, not rounded to BF16.
        return result.mul_(a.scale_inv * b.scale_inv)
    library.octavo_rescale(
        result.data_ptr(), result.numel(), a.scale_inv.data_ptr(), b.scale_inv.data_ptr()
    )
    return result


def _transposed(factor: Factor) -> Factor:
    return Factor(factor.values.t(), factor.scale_inv)


def _bf16(x: Tensor) -> Tensor:
    return x if x.dtype is torch.bfloat16 else x.to(torch.bfloat16)


def _casts(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _uncast(x: Tensor) -> AbstractContextManager[object]:
    """No autocast inside: it would cast the operands of the products, of a backward's too."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if _casts(device) else nullcontext()


def _plain_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, undo: Tensor | None
) -> Tensor:
    """``F.linear`` that takes an input of another dtype than the weight's, and computes in it."""
    if input.dtype is not weight.dtype and not _casts(input.device.type):
        weight = weight.to(input.dtype)
        bias = None if bias is None else bias.to(input.dtype)
    return F.linear(input if undo is None else input * undo, weight, bias)


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
            return _plain_linear(x, self.weight, None, undo)

        return own(input) if self.shard is None else self.shard.run(own, input)


class _KeptWeight(NamedTuple):
    """Which weight was quantized. While it is held, no other can have its identity or memory."""

    tensor: Tensor
    memory: Tensor
    """An alias: ``tensor.data`` may be replaced."""
    version: int | None
    """None: an inference tensor's, whose changes nobody counts."""


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


class Float8Linear(nn.Linear):
    """A linear whose products are of FP8 operands while ``current`` is ``fp8``.

    While in BF16 it computes what ``nn.Linear`` does, to the bit, and goes on observing amax,
    so that its scales are fresh when it returns. Outside ``train()`` mode nothing is
    observed. The weight is quantized once and kept until ``forget_weight``, which the scope
    calls at every step boundary, until another tensor or other memory takes its place (a
    parameter replaced, ``functional_call``, ``.data = …``), or until autograd counts a change
    of it in place (one through ``.data`` it doesn't count, nor what a fused optimizer does:
    ``optimizer_steps`` forgets then; say other ones by ``forget_weight``).

    With a bias it is added in BF16 after the product, and its gradient is the sum of the
    gradient as it came, unquantized, as in Transformer Engine.
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        bind: Callable[[str], dict[Role, Quantizer]],
        bias: bool = False,
        shard: Shard | None = None,
        observation: Observation | None = None,
    ) -> None:
        """``bind`` gives a layer of this name its ``operands``; it is called at the first forward.

        With ``shard`` the features are those of this rank's part of the matrix. While
        ``observation`` is paused nothing is observed.
        """
        super().__init__(in_features, out_features, bias=bias, dtype=dtype, device=device)
        self.name = name
        self.current: Precision = "fp8"
        self.has_run = False
        """Whether there has been a forward."""
        self.operands: dict[Role, Quantizer] | None = None
        self.shard = shard
        if shard is not None:
            mark_sharded(self.weight)
        self._observation = observation or Observation()
        self._bind = bind
        self._weight_q: Quantized | None = None
        self._weight_seen = False
        self._kept: _KeptWeight | None = None
        self._input_seen = self._gradient_due = self._gradient_seen = False

    def forward(self, input: Tensor, undo: Tensor | None = None) -> Tensor:
        """``input @ weight.T``; [..., in_features] → [..., out_features], dtype of ``input``.

        ``undo``: powers of two [in_features] that the quantized input is multiplied by in the
        product, and the unquantized one in BF16 (Smooth SwiGLU's ``s^-1``).

        Raises ValueError for an input of other features, and for input or weight on another
        device than the scales; TypeError for an input that is no FP16, BF16 or wider.
        """
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError(
                f"FP8 linear {self.name!r} doesn't go through the transforms of torch.func (grad, "
                "vmap, …): use backward()"
            )
        if self.operands is None:
            self.operands = self._bind(self.name)
        self._refuse_unfit(input, self.operands["input"].row.scale.device)
        self.has_run = True
        if self.training:
            self._observation.note_forward(self.name)
        if self.shard is None:
            return self._own(input, undo)
        return self.shard.run(lambda x: self._own(x, undo), input)

    def _refuse_unfit(self, input: Tensor, device: torch.device) -> None:
        """What ``nn.Linear`` would refuse, and the casts would take for something else.

        Scales stay on the ``device`` that they were made on, and C on CPU is given addresses.
        """
        where = f"FP8 linear {self.name!r}"
        if not input.is_floating_point() or input.itemsize == 1:
            raise TypeError(f"{where}: the input is {input.dtype}; give it BF16, FP16 or FP32")
        if input.dim() == 0 or input.shape[-1] != self.in_features:
            shape = list(input.shape)
            raise ValueError(f"{where} takes [..., {self.in_features}], the input is {shape}")
        for what, found in (("input", input.device), ("weight", self.weight.device)):
            if found.type != device.type:
                raise ValueError(
                    f"{where}: the {what} is on {found} and its scales are on {device}; move the "
                    "model before its linears are converted, and the input to where it is"
                )

    def _own(self, input: Tensor, undo: Tensor | None) -> Tensor:
        """The product of this rank's shard alone."""
        if self.current == "fp8":
            output: Tensor = _Float8Product.apply(input, self.weight, self.bias, self, undo)
            device = input.device.type
            return output.to(torch.get_autocast_dtype(device)) if _casts(device) else output
        if self._observes:
            self._observe_operands(input)
            self._input_seen = True
        output = _plain_linear(input, self.weight, self.bias, undo)
        if self.training and output.requires_grad:
            self._gradient_due = True
            output = _ObserveGradient.apply(output, self, self.operand("grad_output"))
        return output

    @property
    def scope(self) -> object:
        """The scope that owns this layer's scaling state."""
        return getattr(self._bind, "__self__", None)

    def take_seen(self) -> bool:
        """Whether in BF16 all operands were observed since the last call; starts anew."""
        seen = self._input_seen and (self._gradient_seen or not self._gradient_due)
        self._input_seen = self._gradient_due = self._gradient_seen = False
        return seen

    @property
    def _observes(self) -> bool:
        return self.training and self._observation.active

    def operand(self, role: Role) -> Quantizer:
        """What quantizes the operand ``role`` now; outside training it leaves no trace."""
        assert self.operands is not None
        quantizer = self.operands[role]
        return quantizer if self._observes else quantizer.quiet()

    def quantized_weight(self, weight: Tensor, *, for_dgrad: bool) -> Quantized:
        """wq_OI of ``weight``, which is this layer's, or what stands for it in this call.

        Quantized at the first call after ``forget_weight``, and whenever it isn't the tensor
        that it was then, with the memory and at the version that it had.
        """
        if not self._is_kept(weight):
            self.forget_weight()
            self._kept = _KeptWeight(weight, weight.detach(), _version(weight))
        kept = self._weight_q
        # What evaluation quantized was not observed: training sees it once a step all the same.
        seen = self._weight_seen or not self._observes
        if kept is None or not seen or (for_dgrad and kept.columns is None):
            quantizer = self.operand("weight")
            if self._weight_seen:
                quantizer = quantizer.quiet()
            # What inference mode makes, no graph may hold, and training will ask for this.
            with torch.inference_mode(False), torch.no_grad():
                values = _bf16(weight.detach())
                kept = quantizer.quantize(values, "values" if for_dgrad else "none")
            self._weight_q = kept
            self._weight_seen = self._weight_seen or self._observes
        return kept

    def forget_weight(self) -> None:
        """The weight has changed or may have: quantize it again when next needed."""
        self._weight_q = None
        self._weight_seen = False
        self._kept = None

    def _is_kept(self, weight: Tensor) -> bool:
        kept = self._kept
        return (
            kept is not None
            and kept.tensor is weight
            and kept.version is not None
            and kept.version == _version(weight)
            and kept.memory.data_ptr() == weight.data_ptr()
            and kept.memory.stride() == weight.stride()
        )

    def _observe_operands(self, input: Tensor) -> None:
        self.operand("input").observe(_bf16(input.detach()))
        weight = self.weight
        if not self._is_kept(weight):
            self.forget_weight()
            self._kept = _KeptWeight(weight, weight.detach(), _version(weight))
        if not self._weight_seen:
            self.operand("weight").observe(_bf16(weight.detach()))
            self._weight_seen = True

    def __getstate__(self) -> dict[str, object]:
        """Without what has addresses in this process: a copy's first forward asks for its own.

        Raises TypeError for a shard, which belongs to its ranks.
        """
        if self.shard is not None:
            raise TypeError(
                f"linear {self.name!r} is a shard over tensor ranks, which can't be copied or "
                "pickled: make the model anew and load its state_dict"
            )
        unbound = {"operands": None, "_weight_q": None, "_weight_seen": False, "_kept": None}
        return {**self.__dict__, **unbound}

    def extra_repr(self) -> str:
        """Present precision, and each operand's format and scaling."""
        line = f"{self.in_features} → {self.out_features}, {self.name}, {self.current}"
        if self.current == "fp8" and self.operands is not None:
            operands = (
                f"{role} {quantizer.format.name} {quantizer.granularity}"
                for role, quantizer in self.operands.items()
            )
            line += ": " + ", ".join(operands)
        return line


class _Float8Product(torch.autograd.Function):
    """Three products of quantized operands; the input waits for its backward in FP8."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: Float8Linear,
        undo: Tensor | None,
    ) -> Tensor:
        with _uncast(input):
            return _Float8Product._forward(ctx, input, weight, bias, layer, undo)

    @staticmethod
    def _forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: Float8Linear,
        undo: Tensor | None,
    ) -> Tensor:
        x_TI = _bf16(input.reshape(-1, layer.in_features))
        quantizer = layer.operand("input")
        x = quantizer.quantize(x_TI, "kept" if ctx.needs_input_grad[1] else "none")
        w = layer.quantized_weight(weight, for_dgrad=ctx.needs_input_grad[0])
        wqr_OI = w.rows
        if undo is not None:
            # Of the two operands the weight is the smaller; by powers of two it stays exact.
            wqr_OI = Factor(wqr_OI.values * undo, wqr_OI.scale_inv)
        y_TO = product(x.rows, _transposed(wqr_OI), quantizer.library)
        if bias is not None:
            y_TO += _bf16(bias)
        # The weight's values are kept, not its FP8 payload: all micro-batches share them.
        ctx.save_for_backward(*(x.kept or (None, None)), *(w.columns or (None, None)), undo)
        ctx.layer = layer
        ctx.input_shape = input.shape
        ctx.dtypes = input.dtype, weight.dtype, None if bias is None else bias.dtype
        return y_TO.view(*input.shape[:-1], layer.out_features).to(input.dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("an FP8 linear has no second derivative (create_graph=True)")
        with _uncast(grad_output):
            return _Float8Product._backward(ctx, grad_output)

    @staticmethod
    def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        layer: Float8Linear = ctx.layer
        payload_TI, x_scale_inv, wqc_OI, w_scale_inv, undo = ctx.saved_tensors
        for_input, for_weight, for_bias = ctx.needs_input_grad[:3]
        input_dtype, weight_dtype, bias_dtype = ctx.dtypes
        g_TO = _bf16(grad_output.reshape(-1, layer.out_features))
        quantizer = layer.operand("grad_output")
        g = quantizer.quantize(g_TO, "values" if for_weight else "none")
        grad_input = grad_weight = grad_bias = None
        if for_input:
            dx_TI = product(g.rows, Factor(wqc_OI, w_scale_inv), quantizer.library)
            dx_TI = dx_TI if undo is None else dx_TI.mul_(undo)
            grad_input = dx_TI.view(ctx.input_shape).to(input_dtype)
        if for_weight:
            assert g.columns is not None
            xqc_TI = layer.operand("input").unpack(Kept(payload_TI, x_scale_inv))
            dw_OI = product(_transposed(g.columns), xqc_TI, quantizer.library)
            dw_OI = dw_OI if undo is None else dw_OI.mul_(undo)
            grad_weight = dw_OI.to(weight_dtype)
        if for_bias:
            # Of the gradient as it came: a sum over tokens needs no product, so no rounding.
            grad_bias = g_TO.sum(0, dtype=torch.float32).to(bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None


class _ObserveGradient(torch.autograd.Function):
    """The identity, which sees the gradient that passes backward through it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, layer: Float8Linear, quantizer: Quantizer) -> Tensor:
        ctx.layer, ctx.quantizer = layer, quantizer
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        ctx.quantizer.observe(_bf16(grad_output.detach()))
        ctx.layer._gradient_seen = True
        return grad_output, None, None
