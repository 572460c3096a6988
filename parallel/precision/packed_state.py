"""The scaling state of one rank's linears, packed: one row an operand, in a few tensors.

Promises: the tensors keep their identity for life, so that views into them (the quantizers'
rows, the addresses in C) and snapshots copied back in place stay good; nothing here waits for
the device. They are the same whatever a program's default dtype and device are, and no
inference tensors, so that training may come after a first forward in inference mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from parallel.precision import kernels, recipes, scaling
from parallel.precision.formats import FORMATS
from parallel.precision.quantizers import COUNTERS, ENERGIES, StateRow
from parallel.precision.recipes import ROLES
from parallel.precision.registry import QUANTIZERS

STATISTICS_COLUMNS = ("amax", "scale", *COUNTERS, *ENERGIES, "uncalibrated")
"""Columns of a report of statistics; the last is 1 where a step was cast without a scale made from
data, else 0."""


_TENSORS = ("history", "scale", "calibrated", "counters", "energies", "report")


class PackedState:
    """Scaling state and counters of all operands, a row or column each."""

    def __init__(
        self,
        recipe: recipes.Recipe,
        num_linears: int,
        device: torch.device,
        library: kernels.Library | None,
    ) -> None:
        operands = [(role, FORMATS[recipe.format_of(role)]) for role in ROLES] * num_linears
        tensors = len(operands)
        self.recipe = recipe
        self._library = library
        self.kind = QUANTIZERS[recipe.scaling]
        self.history = torch.zeros(
            *(recipe.amax_history_len if recipe.has_state else 1, tensors),
            dtype=torch.float32,
            device=device,
        )
        # Row 0 is where this step's amax gathers, as in Transformer Engine.
        self.amax = self.history[0]
        self.scale = torch.ones(tensors, dtype=torch.float32, device=device)
        # Whether the scale was made from data: a 1 may be, or may be what it starts from.
        self.calibrated = torch.full_like(self.scale, not recipe.has_state, dtype=torch.bool)
        self.fp8_max = torch.tensor(
            [format.max for _, format in operands], dtype=torch.float32, device=device
        )
        self.counters = torch.zeros(tensors, len(COUNTERS), dtype=torch.int64, device=device)
        self.energies = torch.zeros(tensors, len(ENERGIES), dtype=torch.float64, device=device)
        self.report = torch.zeros(
            *(tensors, len(STATISTICS_COLUMNS)), dtype=torch.float32, device=device
        )
        self.quantizers = [
            self.kind(role, format, recipe, self._row(i), library)
            for i, (role, format) in enumerate(operands)
        ]

    def __getstate__(self) -> dict[str, object]:
        """The tensors; rows and addresses in C are made anew from them."""
        return {
            "recipe": self.recipe,
            "compiled": any(quantizer.library is not None for quantizer in self.quantizers),
            "collect": [quantizer.collect for quantizer in self.quantizers],
            "tensors": [getattr(self, name) for name in _TENSORS],
        }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Take back ``__getstate__``, with this process's casts."""
        history = state["tensors"][0]
        library = kernels.load() if state["compiled"] else None
        linears = len(state["collect"]) // len(ROLES)
        with torch.inference_mode(False), torch.no_grad():
            self.__init__(state["recipe"], linears, history.device, library)  # type: ignore[misc]
            for name, tensor in zip(_TENSORS, state["tensors"], strict=True):
                getattr(self, name).copy_(tensor)
        for quantizer, collect in zip(self.quantizers, state["collect"], strict=True):
            quantizer.collect = collect

    def _row(self, i: int) -> StateRow:
        energies = self.energies[i] if self.recipe.sqnr else None
        return StateRow(self.amax[i], self.scale[i], self.counters[i], energies)

    def forget_history(self, rows: Sequence[int]) -> None:
        """Operands that leave FP8: their scales stay, what they were made from goes."""
        self.history[:, list(rows)] = 0

    def make_room(self, rows: Sequence[int], amax: Tensor) -> None:
        """Scales of ``rows`` such that values up to ``amax``, float32 [rows], don't saturate."""
        at = torch.tensor(rows, dtype=torch.int64, device=self.scale.device)
        self.calibrated[at] |= torch.isfinite(amax) & (amax > 0)
        self.scale[at] = scaling.scale_with_room(
            self.scale[at],
            amax,
            self.fp8_max[at],
            margin=self.recipe.margin,
            warmed=(self.history[:, at] != 0).any(0),
        )

    def finish_step(self, applied: bool) -> None:
        """Add the step to the report; with ``applied``, make the scales of the next."""
        report = self.report
        torch.maximum(report[:, 0], self.amax, out=report[:, 0])
        report[:, 1] = self.scale
        report[:, 2 : 2 + len(COUNTERS)] += self.counters
        self.counters.zero_()
        if self.recipe.sqnr:
            report[:, 2 + len(COUNTERS) : -1] += self.energies
            self.energies.zero_()
        if self.recipe.has_state:
            report[:, -1] = torch.maximum(report[:, -1], (~self.calibrated).float())
            if applied:
                self.calibrated |= self.kind.update_(
                    self.recipe, self.history, self.scale, self.fp8_max
                )
        self.amax.zero_()

    def take_report(self) -> Tensor:
        """A copy of the report, which starts anew."""
        report = self.report.clone()
        rule = kernels.SCALE_RULES.get(self.recipe.scaling)
        in_c = self.recipe.power_of_two or self.recipe.scaling != "block"
        if self._library is not None and rule is not None and in_c:
            self._library.octavo_used_scales(
                report.data_ptr(),
                report.shape[1],
                self.fp8_max.data_ptr(),
                report.shape[0],
                rule,
                self.recipe.power_of_two,
                self.recipe.epsilon,
            )
        elif rule is not None:
            amax, scale = report[:, 0], report[:, 1]
            report[:, 1] = self.kind.used_scale(self.recipe, amax, scale, self.fp8_max)
        self.report.zero_()
        return report
