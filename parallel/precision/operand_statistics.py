"""What passes by operands that another library quantizes: amax and counters, where looked at.

The native layers count while they cast. Where Transformer Engine casts, Octavo looks at the
tensor before, in a pass of its own, on sampled steps only. Promises: the same definitions as
the native counters, packed in a few tensors, no wait for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel.config import FP8Config
from parallel.precision import scaling
from parallel.precision.formats import E4M3, E5M2, Float8Format, saturating_cast, upcast
from parallel.precision.recipes import ROLES, Role
from parallel.precision.scope import STATISTICS_COLUMNS


class OperandStatistics:
    """Rows of all operands of a scope: amax, the scale to report, counters."""

    def __init__(self, config: FP8Config, linears: int, device: torch.device) -> None:
        tensors = linears * len(ROLES)
        self.amax = torch.zeros(tensors, dtype=torch.float32, device=device)
        self.scale = torch.ones(tensors, dtype=torch.float32, device=device)
        self.calibrated = torch.ones(tensors, dtype=torch.bool, device=device)
        """Whether ``scale`` was made from data."""
        self.counters = torch.zeros(tensors, 4, dtype=torch.int64, device=device)
        self.seen = False
        """Whether anything was observed since the last ``take``."""
        self._config = config
        formats = [format_of(config, role) for role in ROLES] * linears
        self.fp8_max = torch.tensor([f.max for f in formats], dtype=torch.float32, device=device)

    def rows(self, start: int) -> dict[Role, OperandRow]:
        """The operands of the linear whose first row is ``start``."""
        return {role: OperandRow(self, start + i, role) for i, role in enumerate(ROLES)}

    def empty(self) -> Tensor:
        """Statistics of no tensor."""
        return self.amax.new_zeros(0, len(STATISTICS_COLUMNS))

    def take(self) -> Tensor:
        """float32 [tensors, columns] since the last call, and start anew.

        Without a scale of its own (any recipe but delayed) an operand reports the one that
        its amax gives: in blocks, that of the block with the largest value. What was not
        counted is NaN.
        """
        if self._config.recipe != "delayed":
            self.scale.copy_(_scale_of(self.amax, self.fp8_max, self._config))
        report = self.amax.new_zeros(len(self.amax), len(STATISTICS_COLUMNS))
        column = STATISTICS_COLUMNS.index
        report[:, column("amax")] = self.amax
        report[:, column("scale")] = self.scale
        report[:, column("uncalibrated")] = (~self.calibrated).float()
        report[:, column("saturated") : column("count") + 1] = self.counters
        uncounted = self.counters[:, 3] == 0
        for name in ("saturated", "underflowed"):
            report[:, column(name)].masked_fill_(uncounted, torch.nan)
        self.amax.zero_()
        self.counters.zero_()
        self.seen = False
        return report


class OperandRow:
    """One operand of one linear."""

    def __init__(self, statistics: OperandStatistics, row: int, role: Role) -> None:
        self._statistics = statistics
        self._row = row
        self._format = format_of(statistics._config, role)
        self._pending: Tensor | None = None
        self._scale: Tensor | None = None

    def feed(self, pending: Tensor, scale: Tensor, slot: int) -> None:
        """Delayed scaling: the history's row 0 and the scales, in which this one has ``slot``."""
        self._pending = pending[slot]
        self._scale = scale[slot]

    @torch.no_grad()
    def observe(self, x: Tensor, *, quantized: bool, counted: bool) -> None:
        """See ``x``. ``quantized``: Transformer Engine casts it, and notes its amax itself;
        otherwise the amax goes into the history here. ``counted``: counters too.
        """
        if x.numel() == 0:
            return
        statistics = self._statistics
        statistics.seen = True
        amax = scaling.tensor_to_amax(x)
        kept = statistics.amax[self._row]
        torch.maximum(kept, amax, out=kept)
        if not quantized and self._pending is not None:
            torch.maximum(self._pending, amax, out=self._pending)
        if counted:
            self._count(x, amax, quantized)

    def _count(self, x: Tensor, amax: Tensor, quantized: bool) -> None:
        counters = self._statistics.counters[self._row]
        finite = torch.isfinite(x)
        counters[2] += x.numel() - finite.sum()
        if self._statistics._config.recipe in ("block", "mxfp8"):
            return  # it would take every block's scale
        counters[3] += x.numel()
        if not quantized:
            return
        scale = self._scale
        if scale is None:
            scale = _scale_of(amax, self._format.max, self._statistics._config)
        scaled = x.float() * scale
        rounded = upcast(saturating_cast(scaled, self._format), self._format)
        counters[0] += (finite & (scaled.abs() >= self._format.overflow)).sum()
        counters[1] += ((rounded == 0) & (x != 0)).sum()


def format_of(config: FP8Config, role: Role) -> Float8Format:
    """The format of an operand."""
    return E5M2 if config.format == "HYBRID" and role == "grad_output" else E4M3


def _scale_of(amax: Tensor, fp8_max: Tensor | float, config: FP8Config) -> Tensor:
    power_of_two = {
        "current": bool(config.use_power_2_scales),
        "block": not config.use_f32_scales,
        "mxfp8": True,
    }[config.recipe]
    if isinstance(fp8_max, Tensor):
        # amax_to_scale takes one maximum for all; the quotient is linear in it, up to rounding.
        scales = [
            scaling.amax_to_scale(amax, format.max, power_of_two=power_of_two)
            for format in (E4M3, E5M2)
        ]
        return torch.where(fp8_max == E4M3.max, scales[0], scales[1])
    return scaling.amax_to_scale(amax, fp8_max, power_of_two=power_of_two)
