"""The FP8 state of one rank's linears: who computes in what, statistics, scaling state.

One ``PrecisionScope`` a rank creates the linears of its pipeline stage, holds their
scaling state packed in a few tensors, and moves single layers between FP8 and BF16 at a
step boundary. Promises: no host synchronization between ``finish_step`` calls.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.config import FP8Config, Precision

STATISTICS_COLUMNS = ("amax", "scale", "saturated", "underflowed", "nonfinite", "count")
"""Columns of ``PrecisionScope.statistics``."""


class PrecisionScope:
    """Creates this rank's linears and owns their precision and scaling state."""

    def __init__(
        self,
        precision: Precision,
        config: FP8Config,
        *,
        num_layers: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config = config
        self.device = torch.device(device)
        self._job_precision: Precision = precision
        self._num_layers = num_layers
        self._precision: dict[str, Precision] = {}

    def linear(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
    ) -> nn.Module:
        """Create and register a bias-free linear; ``name`` as ``layers.3.mlp.down``."""
        return nn.Linear(in_features, out_features, bias=False, dtype=dtype, device=self.device)

    @property
    def layers(self) -> tuple[str, ...]:
        """The linears whose precision can change, in order of registration."""
        return tuple(self._precision)

    def precision(self) -> dict[str, Precision]:
        """What each switchable linear computes in now."""
        return dict(self._precision)

    def set_precision(self, precision: Mapping[str, Precision]) -> None:
        """Change linears' precision at a step boundary; unknown names raise KeyError."""
        for name in precision:
            if name not in self._precision:
                near = difflib.get_close_matches(name, self._precision, 1)
                raise KeyError(f"no switchable linear {name!r}{near}")
        self._precision.update(precision)

    def reduce_amax(self, group: dist.ProcessGroup | None) -> None:
        """Maximum of this step's amax over ``group``; once a step, after backward."""

    def finish_step(self, applied: bool) -> None:
        """Close the step: update scales, or discard the step's amax when not ``applied``."""

    def statistics(self) -> tuple[tuple[str, ...], Tensor]:
        """Names ``layer/role`` and a float32 [tensors, 6] copy; resets the counters."""
        return (), torch.zeros(0, len(STATISTICS_COLUMNS))

    def state_tensors(self) -> dict[str, Tensor]:
        """Live tensors that a snapshot copies out and back in place."""
        return {}

    def state_meta(self) -> dict[str, object]:
        """The rest of the state, for JSON."""
        return {"precision": self.precision()}

    def load_meta(self, meta: Mapping[str, object]) -> None:
        """Take back ``state_meta`` after the tensors were copied in place."""
