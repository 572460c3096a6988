"""What a checkpoint's manifest says of the job that wrote it, and what must be the same to go on.

Pure. Promises: a job that passes trains on the tokens that the other one would have, with a model
that its state fits; degrees, length, learning rate and everything about recovery may differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator.spec.errors import Finding, KeyPath
from orchestrator.spec.job import JobSpec


def facts_of(spec: JobSpec) -> dict[str, Any]:
    """Of a completed spec, for a manifest; plain values."""
    fp8 = spec.fp8
    return {
        "parallelism": spec.parallelism.model_dump(mode="json"),
        "same": {
            **{f"model.{key}": value for key, value in spec.model.model_dump(mode="json").items()},
            "data.source": spec.data.source,
            "data.pattern": spec.data.pattern,
            "data.shuffle": spec.data.shuffle,
            "data.shuffle_seed": spec.data.shuffle_seed,
            "training.seq_len": spec.training.seq_len,
            "training.train_batch_size": spec.training.train_batch_size,
            "precision": spec.precision,
            "fp8.recipe": fp8.recipe,
            "fp8.amax_history_len": fp8.amax_history_len,
            "fp8.high_precision_layers": fp8.high_precision_layers.model_dump(mode="json"),
        },
    }


def differences(spec: JobSpec, facts: Mapping[str, Any]) -> Iterator[Finding]:
    """What of the completed ``spec`` doesn't go with a checkpoint of ``facts``."""
    here = facts_of(spec)["same"]
    for key, was in facts.get("same", {}).items():
        if key not in here or here[key] == was:
            continue
        path: KeyPath = tuple(key.split("."))
        if key == "data.source":
            # The same files may lie elsewhere: the ranks compare names and sizes.
            continue
        why = (
            "a step would train on other tokens than it would have"
            if path[0] in ("data", "training")
            else "its state wouldn't fit"
        )
        yield Finding(path, f"was {was!r} in the job of that checkpoint: {why}", f"make it {was!r}")
