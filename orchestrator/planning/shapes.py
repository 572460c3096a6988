"""How many parameters a model has, and which of them a rank holds.

The built-in model's alone: what a factory makes is known to its ranks. Counts are those of
``parallel.transformer`` and of DeepSpeed's flat groups (``parallel.parameter_groups``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from parallel.config import ModelConfig
from parallel.layer_costs import ffn_size, head_cost, layer_cost
from parallel.topology import stage_boundaries


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of a model that everything else follows from."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    tied: bool = False
    """Embedding and head share one matrix."""

    @property
    def kv_width(self) -> int:
        """Outputs of the keys, and as many of the values."""
        return self.kv_heads * (self.hidden // self.heads)

    @property
    def layer_linears(self) -> int:
        """Weights of the four linears of one transformer layer."""
        attention = self.hidden * (2 * self.hidden + 2 * self.kv_width)
        return attention + 3 * self.hidden * self.ffn

    @property
    def layer_vectors(self) -> int:
        """Weights of its two norms."""
        return 2 * self.hidden

    @property
    def table(self) -> int:
        """Weights of the embedding, and as many of the head."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        tables = self.table * (1 if self.tied else 2)
        return self.layers * (self.layer_linears + self.layer_vectors) + tables + self.hidden

    def flops_per_token(self, seq_len: int) -> float:
        """Of forward and backward, without what recompute does again.

        Six a weight that multiplies (the embedding looks up), and of attention only the half that
        the causal mask leaves.
        """
        matrices = self.layers * self.layer_linears + self.table
        return 6.0 * matrices + 6.0 * self.layers * seq_len * self.hidden


def shape_of(model: ModelConfig) -> Shape:
    """Of the built-in model; unset widths as they will be completed."""
    return Shape(
        vocab=model.vocab_size,
        hidden=model.hidden_size,
        layers=model.num_layers,
        heads=model.num_heads,
        kv_heads=model.num_kv_heads or model.num_heads,
        ffn=ffn_size(model),
        tied=model.tie_embeddings,
    )


@dataclass(frozen=True, slots=True)
class Stage:
    """What one pipeline stage holds of the model."""

    layers: int
    """Transformer layers."""
    embedding: bool
    head: bool
    """The final norm, the product with the vocabulary and the loss."""


@dataclass(frozen=True, slots=True)
class Held:
    """Parameters that one rank of a stage holds."""

    linears: int
    """Of this rank's shards; those that may compute in FP8."""
    tables: int
    """Embedding and head: whole on every tensor rank."""
    vectors: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.linears + self.tables + self.vectors


def stages(model: ModelConfig, seq_len: int, pipeline: int, tensor: int) -> tuple[Stage, ...]:
    """The stages as ``StagedModule`` cuts them; ValueError for more stages than layers."""
    return _stages(
        layer_cost(model, seq_len=seq_len, shards=tensor),
        head_cost(model),
        model.num_layers,
        model.tie_embeddings,
        pipeline,
    )


@lru_cache(maxsize=512)
def _stages(cost: float, head: float, layers: int, tied: bool, pipeline: int) -> tuple[Stage, ...]:
    ends = [0.0, head] if tied else [head]
    costs = [0.0, *[cost] * layers, *ends]
    required = [False, *[True] * layers, *[False] * len(ends)]
    cuts = [0, len(costs)] if pipeline == 1 else stage_boundaries(costs, required, pipeline)
    return tuple(
        Stage(sum(required[begin:end]), begin == 0, end == len(costs))
        for begin, end in pairwise(cuts)
    )


def held(shape: Shape, stage: Stage, tensor: int) -> Held:
    """What each tensor rank of a stage holds."""
    tables = stage.embedding + stage.head
    if shape.tied and tables == 2:
        tables = 1
    vectors = stage.layers * shape.layer_vectors + stage.head * shape.hidden
    return Held(stage.layers * shape.layer_linears // tensor, tables * shape.table, vectors)
