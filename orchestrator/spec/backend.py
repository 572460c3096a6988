"""What can be said of a spec's FP8 backend before any node is known: findings, and a forecast.

Promises: pure but for asking whether Transformer Engine is installed here; needs no torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from orchestrator.spec.completion import ffn_size
from orchestrator.spec.errors import Finding, KeyPath
from orchestrator.spec.job import JobSpec
from parallel.precision.choice import BackendChoice, Workload, forecast, misfit, workload_of

_BACKEND: KeyPath = ("fp8", "backend")


def check_backend(spec: JobSpec) -> Iterator[Finding]:
    """Transformer Engine asked for where it can't be."""
    if not _asked_for(spec):
        return
    if not spec.gpus_per_node:
        message = "Transformer Engine needs GPUs, and this is a CPU job"
        yield Finding(_BACKEND, message, "set gpus_per_node, or backend: auto")
    elif importlib.util.find_spec("transformer_engine") is None:
        message = "Transformer Engine is not installed here"
        yield Finding(_BACKEND, message, "pip install 'octavo[te]', or backend: auto")


def check_backend_model(spec: JobSpec) -> Iterator[Finding]:
    """Layers that Transformer Engine can't run, where it is asked for.

    Widths are checked with the model's.
    """
    if not _asked_for(spec):
        return
    workload = _workload(spec)
    parts: tuple[tuple[KeyPath, Workload], ...] = (
        (("model", "smooth_swiglu"), Workload(smooth=workload.smooth)),
        (("training", "recompute"), Workload(recompute=workload.recompute)),
        (("training", "seq_len"), Workload(tokens=workload.tokens)),
    )
    for key, part in parts:
        if wrong := misfit(spec.fp8, part):
            yield Finding(key, wrong, "change it, or use fp8.backend: auto")


def backend_of(spec: JobSpec) -> BackendChoice:
    """What a completed spec's linears will run on, as far as that can be known, and why.

    Raises BackendRefusedError for what the checks above refuse.
    """
    on_gpu = bool(spec.gpus_per_node)
    return forecast(spec.precision, spec.fp8, _workload(spec), on_gpu=on_gpu)


def _asked_for(spec: JobSpec) -> bool:
    return spec.fp8.backend == "transformer_engine" and spec.precision == "fp8"


def _workload(spec: JobSpec) -> Workload:
    micro = spec.training.train_micro_batch_size_per_gpu
    return workload_of(
        spec.model,
        ffn=ffn_size(spec.model),
        shards=spec.parallelism.tensor,
        tokens=micro * spec.training.seq_len if micro else None,
        recompute=spec.training.recompute == "full",
    )
