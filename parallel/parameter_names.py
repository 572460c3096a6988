"""Names of a model's parameters, and the patterns by which a spec means some of them.

    embedding.weight   layers.3.attn.qkv.weight   layers.3.mlp.norm.weight   head.weight

Promises: needs no torch, so that patterns are checked before any node is taken.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from parallel.config import ModelConfig

_LAYER = (
    "attn.qkv.weight",
    "attn.qkv.norm.weight",
    "attn.out.weight",
    "mlp.gate_up.weight",
    "mlp.norm.weight",
    "mlp.down.weight",
)
"""Of one transformer layer of the built-in model."""


@dataclass(frozen=True, slots=True)
class UnmatchedPattern:
    """A pattern that means none of the model's parameters."""

    index: int
    """In the list of patterns."""
    pattern: str
    nearest: str | None
    """The name that is most like it."""


def built_in_names(model: ModelConfig) -> tuple[str, ...]:
    """Every parameter of the built-in model, in the order of its layers."""
    layers = (f"layers.{i}.{name}" for i in range(model.num_layers) for name in _LAYER)
    head = ("head.norm.weight",) if model.tie_embeddings else ("head.norm.weight", "head.weight")
    return ("embedding.weight", *layers, *head)


def is_matched(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of ``patterns`` (``*``, ``?`` and ``[…]``, dots are like letters) means it."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def unmatched(patterns: Sequence[str], names: Sequence[str]) -> list[UnmatchedPattern]:
    """The patterns that match none of ``names``."""
    return [
        UnmatchedPattern(
            i, pattern, next(iter(difflib.get_close_matches(pattern, names, 1, 0)), None)
        )
        for i, pattern in enumerate(patterns)
        if not any(is_matched(name, [pattern]) for name in names)
    ]
