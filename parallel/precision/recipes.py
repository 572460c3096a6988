"""What a recipe's name means, and which linears it leaves in BF16.

Promises: a recipe is expanded once, from the spec's section to a frozen value with
nothing left implicit; no torch, so that a spec can be checked anywhere.
"""

from __future__ import annotations

import difflib
import fnmatch
from dataclasses import dataclass
from typing import Literal

from parallel.config import RECIPE_FIELDS, FP8Config, HighPrecisionLayers, RecipeName

Role = Literal["input", "weight", "grad_output"]
ROLES: tuple[Role, ...] = ("input", "weight", "grad_output")
"""Operands of a linear's three products, in the order of their rows in packed tensors."""

LINEARS = ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")
"""The linears of one transformer layer, named ``layers.{i}.{linear}``."""


MULTIPLE = 16
"""What a linear's features are multiples of: FP8 matrix units take no other, and Transformer
Engine refuses others. The native backend keeps to it, so that a job moves between both."""

MX_BLOCK, BLOCK = 32, 128
"""Elements that share a scale under mxfp8, and under block (squared for weights)."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How operands are scaled and rounded; of the fields, those of other recipes don't matter."""

    scaling: RecipeName
    forward_format: Literal["E4M3"]
    """Of input and weight."""
    backward_format: Literal["E4M3", "E5M2"]
    """Of the output gradient."""
    margin: int = 0
    amax_history_len: int = 1
    amax_compute_algo: Literal["max", "most_recent", "ema"] = "max"
    amax_ema_factor: float = 0.9
    epsilon: float = 0.0
    """Least amax of current and block scaling; Transformer Engine's default."""
    power_of_two: bool = False
    """Current and block scaling round their scales down to powers of two."""
    sqnr: bool = False
    """Measure the energies of the values and of what rounding them took away."""

    def format_of(self, role: Role) -> str:
        """Name of the format of an operand."""
        return self.backward_format if role == "grad_output" else self.forward_format

    @property
    def has_state(self) -> bool:
        """Whether scales are made from earlier steps, so that a snapshot must hold them."""
        return self.scaling == "delayed"


def expand(config: FP8Config) -> Recipe:
    """The explicit recipe of a spec's ``fp8`` section."""
    own = RECIPE_FIELDS[config.recipe]
    given = {name: getattr(config, name) for name in own if getattr(config, name) is not None}
    if config.recipe == "current":
        given = {"power_of_two": config.use_power_2_scales}
    elif config.recipe == "block":
        given = {"power_of_two": not config.use_f32_scales}
    return Recipe(
        scaling=config.recipe,
        forward_format="E4M3",
        backward_format="E5M2" if config.format == "HYBRID" else "E4M3",
        sqnr=config.sqnr,
        **given,
    )


class UnfitLinearError(ValueError):
    """A linear whose features its recipe, or its tensor ranks, can't divide, on any machine."""

    def __init__(self, linear: str, message: str, remedy: str) -> None:
        super().__init__(f"linear {linear!r}: {message} ({remedy})")
        self.linear, self.message, self.remedy = linear, message, remedy

    def __reduce__(self) -> tuple[type[UnfitLinearError], tuple[str, str, str]]:
        return (type(self), (self.linear, self.message, self.remedy))


def multiple_of(recipe: RecipeName) -> int:
    """What the features of a linear, or of a rank's shard of it, are multiples of."""
    return MX_BLOCK if recipe == "mxfp8" else MULTIPLE


def dimension_problems(
    recipe: RecipeName, in_features: int, out_features: int
) -> list[tuple[str, str]]:
    """(what is wrong, what to do) for the features of one linear, or of a rank's shard of it.

    All recipes want multiples of 16, as FP8 matrix units do; mxfp8 multiples of 32, since
    Transformer Engine pads none of its blocks. Blocks of 128 may be cut short at the end,
    where they are padded with zeros. Tokens are padded by every recipe, so they may be any.
    """
    multiple = multiple_of(recipe)
    problems = []
    for side, features in (("inputs", in_features), ("outputs", out_features)):
        if features % multiple:
            message = f"{features} {side} are no multiple of {multiple}, which {recipe} needs"
            below = features // multiple * multiple
            near = f"{below} or {below + multiple}" if below else str(multiple)
            problems.append((message, f"make them {near}, or keep the linear in BF16"))
    return problems


def linear_names(num_layers: int) -> tuple[str, ...]:
    """Names of all linears of a model of ``num_layers`` layers."""
    return tuple(f"layers.{i}.{linear}" for i in range(num_layers) for linear in LINEARS)


def unmatched_patterns(config: HighPrecisionLayers, names: tuple[str, ...]) -> list[str]:
    """A sentence for each pattern that matches none of the linears ``names``, with the nearest."""
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
    from_last = num_layers - int(index)
    # A model of which nobody counts the layers (``convert``) has names like these too.
    return int(index) < config.first or (config.last > 0 and from_last <= config.last)


def nearest(name: str, names: tuple[str, ...]) -> str:
    """``; did you mean 'x'?`` for the closest of ``names``, or nothing."""
    close = difflib.get_close_matches(name, names, 1, cutoff=0.0)
    return f"; did you mean {close[0]!r}?" if close else ""
