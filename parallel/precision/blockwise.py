"""What recipes that scale blocks have in common; ``block.py`` and ``mxfp8.py`` are the recipes.

Where scales are powers of two, values are dequantized in BF16 before the product, exactly: a
value rounded to three or two mantissa bits has its bits to spare, and its grid is x's own or
coarser. So the product is one BF16 matrix product with FP32 sums and nothing after it. The
exponents reach as far as BF16's own, with two limits at the ends: a value that rounds up to
2^128 becomes Inf, and matrix units may take BF16 numbers below 2^-126 as 0.

A matrix whose dimensions are no multiples of the block has broken blocks at its ends, as if
padded with zeros.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from parallel.precision import scaling
from parallel.precision.formats import saturating_cast
from parallel.precision.quantizers import Columns, Factor, Kept, Quantized, Quantizer
from parallel.precision.recipes import Recipe


class Blockwise(Quantizer):
    """Blocks of ``block`` elements along the dimension that a product contracts over."""

    block: int
    mx: bool
    """Which of the C rules for exponents."""

    @classmethod
    @abstractmethod
    def scale_of(cls, recipe: Recipe, amax: Tensor, fp8_max: float | Tensor) -> Tensor:
        """Scales of blocks with the largest magnitudes ``amax``, float32 of its shape."""

    @classmethod
    @abstractmethod
    def scales(cls, recipe: Recipe, amax: Tensor, fp8_max: float) -> tuple[Tensor, Tensor]:
        """The same, and scale_inv."""

    @classmethod
    def used_scale(cls, recipe: Recipe, amax: Tensor, scale: Tensor, fp8_max: Tensor) -> Tensor:
        """The scale of the block that holds the largest magnitude: the smallest of all."""
        return torch.where(amax > 0, cls.scale_of(recipe, amax, fp8_max), 1.0)

    def quantize(self, x: Tensor, columns: Columns) -> Quantized:
        if self._fuses:
            return self._fused(x.contiguous(), columns)
        self._see_plain(x)
        rows, _ = self._plain(x, (1, self.block), count=True)
        if columns == "none":
            return Quantized(rows, None, None)
        factor, kept = self._plain(x, (self.block, 1), count=False)
        return Quantized(rows, factor, None) if columns == "values" else Quantized(rows, None, kept)

    def unpack(self, kept: Kept) -> Factor:
        if not self._fuses:
            scale_inv = kept.scale_inv
            if scale_inv.dtype == torch.uint8:
                scale_inv = scaling.exponent_to_scale_inv(scale_inv)
            return self._dequantized(kept.payload, scale_inv, (self.block, 1))
        assert self.library is not None
        payload, exponents = kept
        values = torch.empty_like(payload, dtype=torch.bfloat16)
        self.library.octavo_unpack_columns(
            payload.data_ptr(),
            exponents.data_ptr(),
            *payload.shape,
            self.block,
            self.format.code,
            values.data_ptr(),
        )
        return Factor(values, None)

    @property
    def _power_of_two(self) -> bool:
        return self.mx or self.recipe.power_of_two

    @property
    def _fuses(self) -> bool:
        """FP32 scales are an option for experiments: plain PyTorch alone has them."""
        return self.library is not None and self._power_of_two

    def _fused(self, x: Tensor, columns: Columns) -> Quantized:
        assert self.library is not None
        rows = torch.empty_like(x)
        values = torch.empty_like(x) if columns == "values" else None
        payload = exponents = None
        if columns == "kept":
            payload = torch.empty_like(x, dtype=self.format.dtype)
            blocks = -(-x.shape[0] // self.block)
            exponents = torch.empty(blocks, x.shape[1], dtype=torch.uint8, device=x.device)
        self.library.octavo_quantize_blocks(
            self._address,
            x.data_ptr(),
            *x.shape,
            self.mx,
            rows.data_ptr(),
            *(None if t is None else t.data_ptr() for t in (values, payload, exponents)),
        )
        return Quantized(
            Factor(rows, None),
            None if values is None else Factor(values, None),
            None if payload is None or exponents is None else Kept(payload, exponents),
        )

    def _see_plain(self, x: Tensor) -> None:
        if x.numel():
            torch.maximum(self.row.amax, scaling.tensor_to_amax(x), out=self.row.amax)

    def _plain(self, x: Tensor, shape: tuple[int, int], *, count: bool) -> tuple[Factor, Kept]:
        """Blocks of ``shape``, in any of the two directions or square: the reference."""
        x = x.float()
        amax = _blocks(x, shape).abs().amax((1, 3)) if x.numel() else _no_blocks(x, shape)
        scale, scale_inv = self.scales(self.recipe, amax, self.format.max)
        scaled = x * _spread(scale, shape, x)
        payload = saturating_cast(scaled, self.format)
        factor = self._dequantized(payload, scale_inv, shape)
        if count:
            self._count_plain(x, scaled, factor.values.float())
        if self._power_of_two:
            scale_inv = scaling.scale_inv_to_exponent(scale_inv)
        return factor, Kept(payload, scale_inv)

    def _dequantized(self, payload: Tensor, scale_inv: Tensor, shape: tuple[int, int]) -> Factor:
        values = payload.float() * _spread(scale_inv, shape, payload)
        return Factor(values.to(torch.bfloat16) if self._power_of_two else values, None)


def _blocks(x: Tensor, shape: tuple[int, int]) -> Tensor:
    """[R, C] → [R / r, r, C / c, c], zeros at the ends where it doesn't divide."""
    (rows, columns), (r, c) = x.shape, shape
    padded = torch.nn.functional.pad(x, (0, -columns % c, 0, -rows % r))
    return padded.unflatten(0, (-1, r)).unflatten(2, (-1, c))


def _no_blocks(x: Tensor, shape: tuple[int, int]) -> Tensor:
    return x.new_zeros(-(-x.shape[0] // shape[0]), -(-x.shape[1] // shape[1]))


def _spread(by_block: Tensor, shape: tuple[int, int], like: Tensor) -> Tensor:
    """[R / r, C / c] → [R, C]: to each element its block's value."""
    spread = by_block.repeat_interleave(shape[0], 0).repeat_interleave(shape[1], 1)
    return spread[: like.shape[0], : like.shape[1]]
