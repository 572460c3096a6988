"""The engine of a run: what its sections say, handed to ``parallel.engine``."""

from __future__ import annotations

from launch.config import RunConfig
from parallel.engine import Engine, TrainingNumbers
from parallel.engine_build import build_engine


def engine_of(run: RunConfig) -> Engine:
    """This rank's engine; every rank calls it. ``run`` is complete. Raises as ``build_engine``."""
    training = run.training
    assert training.train_micro_batch_size_per_gpu is not None
    assert training.gradient_accumulation_steps is not None
    numbers = TrainingNumbers(
        micro_batch_size=training.train_micro_batch_size_per_gpu,
        accumulation_steps=training.gradient_accumulation_steps,
        seq_len=training.seq_len,
        betas=training.betas,
        eps=training.eps,
        weight_decay=training.weight_decay,
        max_norm=training.max_norm,
        seed=training.seed,
        recompute=training.recompute,
    )
    asked = run.communication_data_type
    return build_engine(
        parallelism=run.parallelism,
        model=run.model,
        numbers=numbers,
        precision=run.precision,
        fp8=run.fp8,
        # What is to be measured needs FP8's buffers; the loop sets what came of it.
        communication_data_type="fp8" if asked == "auto" else asked,
        gradient_exchange=run.gradient_exchange,
        deepspeed=run.deepspeed,
    )
