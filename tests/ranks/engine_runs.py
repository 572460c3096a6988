"""A tiny run of the engine, for the tests that need several ranks.

``build`` makes the engine of one rank, ``batches`` its micro-batches of a step: text that a
tiny model learns in a few steps, the same sequences whatever the layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import torch
from torch import Tensor

from parallel.config import (
    FP8Config,
    GradientExchangeConfig,
    ModelConfig,
    ParallelismConfig,
    RecipeName,
)
from parallel.engine import Engine, TrainingNumbers
from parallel.engine_build import build_engine

MODEL = ModelConfig(vocab_size=64, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2)
WIDE = MODEL.model_copy(
    update={"hidden_size": 256, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 256}
)
"""Halves of its matrices are whole blocks of 128."""
SEQ_LEN = 32
SEQUENCES = 8
"""Sequences a step over all replicas."""
MICRO = 2
LR = 3e-3
RECIPES = list(get_args(RecipeName))
"""All that a spec can ask for."""


def fp8_config(recipe: str, **more: Any) -> FP8Config:
    """A recipe as the tests run it: delayed with a history that their few steps fill."""
    if recipe == "delayed":
        more.setdefault("amax_history_len", 4)
    return FP8Config.model_validate({"recipe": recipe, **more})


def model_for(recipe: str) -> ModelConfig:
    """The smallest model that two tensor ranks can share in this recipe."""
    return WIDE if recipe == "block" else MODEL


def build(world_size: int, **options: Any) -> Engine:
    """The engine of this rank; options replace the defaults below."""
    pipeline, tensor = options.pop("pipeline", 1), options.pop("tensor", 1)
    replicas = world_size // pipeline // tensor
    arguments: dict[str, Any] = {
        "parallelism": ParallelismConfig(
            tensor=tensor,
            pipeline=pipeline,
            data=replicas,
            zero_stage=options.pop("zero_stage", 1),
        ),
        "model": MODEL,
        "numbers": TrainingNumbers(
            micro_batch_size=MICRO,
            accumulation_steps=SEQUENCES // MICRO // replicas,
            seq_len=SEQ_LEN,
            max_norm=options.pop("max_norm", 1.0),
            recompute=options.pop("recompute", "none"),
        ),
        "precision": "fp8",
        "fp8": fp8_config(options.pop("recipe", "delayed")),
        "communication_data_type": "fp8",
        # Small enough that the tiny model's matrices are compressed.
        "gradient_exchange": GradientExchangeConfig(min_size=1024),
    }
    return build_engine(**(arguments | options))


def batches(
    engine: Engine, world_size: int, model_ranks: int, step: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """This replica's micro-batches of ``step``: arithmetic sequences modulo the vocabulary.

    ``model_ranks``: pipeline × tensor, the ranks of one replica.
    """
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, MODEL.vocab_size, (SEQUENCES, 1), generator=generator)
    stride = torch.randint(1, 4, (SEQUENCES, 1), generator=generator)
    text = (start + stride * torch.arange(SEQ_LEN + 1)) % MODEL.vocab_size
    replicas = world_size // model_ranks
    mine = text.view(replicas, -1, MICRO, SEQ_LEN + 1)[engine.coordinate.data]
    return iter([(rows[:, :-1], rows[:, 1:]) for rows in mine])
