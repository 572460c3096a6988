"""A tiny run of the engine, for the tests that need several ranks.

``build`` makes the engine of one rank, ``batches`` its micro-batches of a step: text that a
tiny model learns in a few steps, the same sequences whatever the layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from parallel.config import (
    FP8Config,
    GradientExchangeConfig,
    ModelConfig,
    ParallelismConfig,
)
from parallel.engine import Engine, TrainingNumbers, build_engine

MODEL = ModelConfig(vocab_size=64, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2)
SEQ_LEN = 32
SEQUENCES = 8
"""Sequences a step over all replicas."""
MICRO = 2
LR = 3e-3


def build(world_size: int, **options: Any) -> Engine:
    """The engine of this rank; options replace the defaults below."""
    pipeline = options.pop("pipeline", 1)
    replicas = world_size // pipeline
    arguments: dict[str, Any] = {
        "parallelism": ParallelismConfig(
            pipeline=pipeline, data=replicas, zero_stage=options.pop("zero_stage", 1)
        ),
        "model": MODEL,
        "numbers": TrainingNumbers(
            micro_batch_size=MICRO,
            accumulation_steps=SEQUENCES // MICRO // replicas,
            seq_len=SEQ_LEN,
            max_norm=options.pop("max_norm", 1.0),
        ),
        "precision": "fp8",
        "fp8": FP8Config(recipe=options.pop("recipe", "delayed"), amax_history_len=4),
        "communication_data_type": "fp8",
        # Small enough that the tiny model's matrices are compressed.
        "gradient_exchange": GradientExchangeConfig(min_size=1024),
    }
    return build_engine(**(arguments | options))


def batches(
    engine: Engine, world_size: int, pipeline: int, step: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """This replica's micro-batches of ``step``: arithmetic sequences modulo the vocabulary."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, MODEL.vocab_size, (SEQUENCES, 1), generator=generator)
    stride = torch.randint(1, 4, (SEQUENCES, 1), generator=generator)
    text = (start + stride * torch.arange(SEQ_LEN + 1)) % MODEL.vocab_size
    replicas = world_size // pipeline
    mine = text.view(replicas, -1, MICRO, SEQ_LEN + 1)[engine.coordinate.data]
    return iter([(rows[:, :-1], rows[:, 1:]) for rows in mine])
