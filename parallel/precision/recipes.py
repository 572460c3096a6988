"""What a recipe's name means, and which linears it leaves in BF16.

Promises: a recipe is expanded once, from the spec's section to a frozen value with
nothing left implicit; no torch, so that a spec can be checked anywhere.
"""

from __future__ import annotations

import difflib
import fnmatch
from dataclasses import dataclass
from typing import Literal

from parallel.config import FP8Config, HighPrecisionLayers

Role = Literal["input", "weight", "grad_output"]
ROLES: tuple[Role, ...] = ("input", "weight", "grad_output")
"""Operands of a linear's three products, in the order of their rows in packed tensors."""

LINEARS = ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")
"""The linears of one transformer layer, named ``layers.{i}.{linear}``."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How operands are scaled and rounded."""

    scaling: Literal["delayed", "current"]
    forward_format: Literal["E4M3"]
    """Of input and weight."""
    backward_format: Literal["E4M3", "E5M2"]
    """Of the output gradient."""
    margin: int
    amax_history_len: int
    amax_compute_algo: Literal["max", "most_recent"]
    epsilon: float = 0.0
    """Least amax of current scaling."""
    power_of_two: bool = False
    """Current scaling rounds its scales down to powers of two."""

    def format_of(self, role: Role) -> str:
        """Name of the format of an operand."""
        return self.backward_format if role == "grad_output" else self.forward_format


def expand(config: FP8Config) -> Recipe:
    """The explicit recipe of a spec's ``fp8`` section.

    Raises ValueError for ``backend: transformer_engine``, which this package doesn't run.
    """
    if config.backend == "transformer_engine":
        raise ValueError(
            "fp8.backend 'transformer_engine': only the native backend is built; "
            "use backend: native or auto"
        )
    return Recipe(
        scaling=config.recipe,
        forward_format="E4M3",
        backward_format="E5M2" if config.format == "HYBRID" else "E4M3",
        margin=config.margin,
        amax_history_len=config.amax_history_len,
        amax_compute_algo=config.amax_compute_algo,
    )


def linear_names(num_layers: int) -> tuple[str, ...]:
    """Names of all linears of a model of ``num_layers`` layers."""
    return tuple(f"layers.{i}.{linear}" for i in range(num_layers) for linear in LINEARS)


def unmatched_patterns(config: HighPrecisionLayers, num_layers: int) -> list[str]:
    """A sentence for each pattern of ``names`` that matches no linear, with the nearest name."""
    names = linear_names(num_layers)
    problems = []
    for pattern in config.names:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            near = nearest(pattern, names)
            problems.append(f"high_precision_layers: {pattern!r} matches no linear{near}")
    return problems


def is_high_precision(name: str, config: HighPrecisionLayers, num_layers: int) -> bool:
    """Whether the linear ``name`` stays in BF16 throughout."""
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in config.names):
        return True
    head, _, rest = name.partition(".")
    index = rest.partition(".")[0]
    if head != "layers" or not index.isdigit():
        return False
    return int(index) < config.first or int(index) >= num_layers - config.last


def nearest(name: str, names: tuple[str, ...]) -> str:
    """``; did you mean 'x'?`` for the closest of ``names``, or nothing."""
    close = difflib.get_close_matches(name, names, 1, cutoff=0.0)
    return f"; did you mean {close[0]!r}?" if close else ""
