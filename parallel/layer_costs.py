"""What the built-in model's layers cost to compute, by which pipeline stages are cut.

Promises: needs no torch, so that a plan made before there are ranks cuts stages as they will.
"""

from __future__ import annotations

import math

from parallel.config import ModelConfig


def ffn_size(model: ModelConfig) -> int:
    """Inner width of the MLP: as configured, else 8/3 of hidden_size rounded up to 32."""
    return model.ffn_size or math.ceil(model.hidden_size * 8 / 3 / 32) * 32


def layer_cost(model: ModelConfig, *, seq_len: int, shards: int) -> float:
    """Multiplications a token of one transformer layer, on each of ``shards`` tensor ranks."""
    hidden, kv_heads = model.hidden_size, model.num_kv_heads or model.num_heads
    qkv_width = hidden + 2 * kv_heads * (hidden // model.num_heads)
    matrices = hidden * (qkv_width + hidden) + 3 * hidden * ffn_size(model)
    attention = seq_len * hidden  # a causal query meets half the keys, twice: scores and values
    return (matrices + attention) / shards


def head_cost(model: ModelConfig) -> float:
    """Multiplications a token of the head, which every tensor rank computes whole."""
    return float(model.hidden_size * model.vocab_size)
