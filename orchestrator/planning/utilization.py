"""What a job's throughput is held against: MFU, as the planner reckons it.

MFU is the share of the devices' peak in BF16, whatever the job computes in, that goes into the
model's own operations (forward and backward, recompute not counted). It takes a device that is
named (``resources.device``) and a model whose size is known: else nothing is said of it.
"""

from __future__ import annotations

from orchestrator.planning.devices import device_named
from orchestrator.planning.shapes import shape_of
from orchestrator.spec.job import JobSpec


def rank_peak_tokens_per_s(spec: JobSpec) -> float | None:
    """Tokens a second of one rank at an MFU of 100 %; None where it isn't known."""
    if spec.resources.device is None or spec.model.factory is not None:
        return None
    flops = shape_of(spec.model).flops_per_token(spec.training.seq_len)
    return device_named(spec.resources.device).bf16 / flops
