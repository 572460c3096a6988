"""One operand of a linear under one recipe: what each recipe implements, and nothing else.

A linear's three products contract over different dimensions, and an operand takes part in two
of them::

    output      = input       @ weight.T    contracts over columns of input and of weight
    grad_input  = grad_output @ weight      over columns of grad_output, rows of weight
    grad_weight = grad_output.T @ input     over rows of both

A recipe that scales blocks quantizes the operand for each, along the dimension that the
product contracts over (``Quantized.rows``: along its rows, for a product that contracts over
its columns; ``Quantized.columns``: the other); one that scales whole tensors has the same
values for both. A new recipe is a subclass of ``Quantizer`` in a file of its own, registered in
``registry.py``.

Promises of every quantizer: C on CPU and plain PyTorch anywhere give the same bits, the plain
one being the reference; neither synchronizes with the host; amax and counters are those of the
tensor, once, however many ways it is quantized.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from parallel.precision import kernels, scaling
from parallel.precision.formats import Float8Format
from parallel.precision.recipes import Recipe, Role

COUNTERS = ("saturated", "underflowed", "nonfinite", "count")
"""Finite values that rounding alone would have left beyond the format's maximum; values other
than 0 that became 0 or -0; Inf and NaN; all values."""

ENERGIES = ("signal", "noise")
"""Sums of squares of the values, and of what quantization took from them; where asked for."""

Columns = Literal["none", "values", "kept"]
"""Whether ``columns`` is needed: not at all, now, or later (and until then in eight bits)."""


@dataclass(slots=True)
class StateRow:
    """Live views into the scope's packed tensors: one operand's row."""

    amax: Tensor
    """float32 scalar, the largest magnitude since the last update."""
    scale: Tensor
    """float32 scalar; recipes that scale blocks leave it alone."""
    counters: Tensor
    """int64 [4], COUNTERS."""
    energies: Tensor | None = None
    """float64 [2], ENERGIES; None where not asked for."""

    def twin(self) -> StateRow:
        """Same scale, everything else of its own and kept nowhere."""
        return StateRow(
            torch.zeros_like(self.amax), self.scale, torch.zeros_like(self.counters), None
        )


class Factor(NamedTuple):
    """A matrix ready for a product: ``values`` times ``scale_inv`` where there is one."""

    values: Tensor
    """[rows, columns]; BF16, or FP32 where scales aren't powers of two and differ by block."""
    scale_inv: Tensor | None
    """float32 scalar, applied after the product; None: ``values`` are dequantized."""


class Kept(NamedTuple):
    """A factor in eight bits."""

    payload: Tensor
    """FP8 [rows, columns]."""
    scale_inv: Tensor
    """float32 scalar; or of blocks: uint8 E8M0 exponents, or float32."""


class Quantized(NamedTuple):
    """A quantized operand."""

    rows: Factor
    columns: Factor | None
    kept: Kept | None
    """What ``unpack`` makes ``columns`` of."""


class Quantizer(ABC):
    """Quantizes one operand of one linear and keeps its statistics."""

    granularity: str
    """How its scales come about, in a word or two, for the layer's repr."""

    def __init__(
        self,
        role: Role,
        format: Float8Format,
        recipe: Recipe,
        row: StateRow,
        library: kernels.Library | None,
    ) -> None:
        self.role = role
        self.format = format
        self.recipe = recipe
        self.row = row
        self.library = library
        self._quiet: Quantizer | None = None
        # Addresses stay good for the quantizer's life: packed tensors change in place only.
        self._native = kernels.Slot(
            scale=row.scale.data_ptr(),
            amax=row.amax.data_ptr(),
            counters=row.counters.data_ptr(),
            energies=None if row.energies is None else row.energies.data_ptr(),
            e5m2=format.code,
            current=recipe.scaling == "current",
            power_of_two=recipe.power_of_two,
            counting=True,
            epsilon=recipe.epsilon,
        )
        self._address = ctypes.addressof(self._native)

    @property
    def collect(self) -> bool:
        """Whether counters and energies are kept; amax always is."""
        return bool(self._native.counting)

    @collect.setter
    def collect(self, wanted: bool) -> None:
        self._native.counting = wanted

    @abstractmethod
    def quantize(self, x: Tensor, columns: Columns) -> Quantized:
        """Round a BF16 matrix [rows, columns]; ``rows`` always, ``columns`` as asked."""

    @abstractmethod
    def unpack(self, kept: Kept) -> Factor:
        """The ``columns`` that a call with ``columns="kept"`` left in eight bits."""

    @classmethod
    def update_(cls, recipe: Recipe, history: Tensor, scale: Tensor, fp8_max: Tensor) -> Tensor:
        """New scales at the end of an applied step, of a recipe with state: all tensors' at once.

        ``history`` float32 [H, tensors], of which row 0 is the step's amax; ``scale`` and
        ``fp8_max`` float32 [tensors]. Returns which scales were made, bool [tensors].
        """
        raise NotImplementedError(f"{cls.granularity} scaling makes no scales between steps")

    @classmethod
    def used_scale(cls, recipe: Recipe, amax: Tensor, scale: Tensor, fp8_max: Tensor) -> Tensor:
        """The scale to report of a step, float32 [tensors]: that of the largest amax."""
        return scale

    def quiet(self) -> Quantizer:
        """One that computes the same and keeps neither amax nor counters."""
        if self._quiet is None:
            # Its row changes in place, which tensors made in inference mode may not outside.
            with torch.inference_mode(False):
                self._quiet = self._make_quiet()
            self._quiet.collect = False
        return self._quiet

    def _make_quiet(self) -> Quantizer:
        return type(self)(self.role, self.format, self.recipe, self.row.twin(), self.library)

    def observe(self, x: Tensor) -> None:
        """See a BF16 tensor that is not quantized: amax, non-finite values, count."""
        if self.library is not None:
            x = x.contiguous()
            self.library.octavo_observe(self._address, x.data_ptr(), x.numel())
            return
        if x.numel() == 0:
            return
        torch.maximum(self.row.amax, scaling.tensor_to_amax(x), out=self.row.amax)
        if self.collect:
            self.row.counters[2] += x.numel() - torch.isfinite(x).sum()
            self.row.counters[3] += x.numel()

    def _count_plain(self, x: Tensor, scaled: Tensor, values: Tensor) -> None:
        """Counters and energies: ``x`` and its dequantized ``values``, and what was rounded."""
        if not self.collect:
            return
        finite = torch.isfinite(x)
        beyond = finite & (scaled.abs() >= self.format.overflow)
        vanished = (values == 0) & (x != 0)
        self.row.counters[:3] += torch.stack([beyond.sum(), vanished.sum(), (~finite).sum()])
        self.row.counters[3] += x.numel()
        if self.row.energies is not None:
            exact = torch.where(finite, x, 0.0).double()
            noise = exact - torch.where(finite, values, 0.0).double()
            self.row.energies += torch.stack([exact.square().sum(), noise.square().sum()])
