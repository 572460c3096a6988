"""Job files for the tests of plans, and any shapes of jobs for hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from orchestrator.spec.errors import Source, SpecError
from orchestrator.spec.job import JobSpec, spec_of

MODEL = {"hidden_size": 512, "num_layers": 8, "num_heads": 8, "num_kv_heads": 4}
MODEL |= {"ffn_size": 1536, "vocab_size": 4096}


def values(**given: Any) -> dict[str, Any]:
    """A job file on 2 nodes of 8 GPUs; sections given are added to its own."""
    base: dict[str, Any] = {
        "name": "planned",
        "num_nodes": 2,
        "gpus_per_node": 8,
        "model": MODEL,
        "data": {"source": "python-stdlib"},
        "training": {"steps": 1000, "seq_len": 256, "train_batch_size": 64},
    }
    for key, value in given.items():
        own = base.get(key)
        merge = isinstance(own, dict) and isinstance(value, dict) and "preset" not in value
        base[key] = {**own, **value} if merge else value
    return {key: value for key, value in base.items() if value is not None}


def job(**given: Any) -> JobSpec:
    """The completed spec of such a file."""
    return spec_of(Source("job.yaml", values(**given), {}), check_data=False)


def problems(**given: Any) -> list[str]:
    """What is wrong with such a file."""
    try:
        job(**given)
    except SpecError as error:
        return list(map(str, error.problems))
    return []


@st.composite
def jobs(draw: st.DrawFn) -> JobSpec:
    """Any job of small degrees, each of which the checks accept."""
    tensor = draw(st.sampled_from([1, 2, 4]))
    pipeline = draw(st.sampled_from([1, 2, 4]))
    plain = tensor == pipeline == 1
    return job(
        num_nodes=draw(st.sampled_from([2, 4])),
        parallelism={
            "tensor": tensor,
            "pipeline": pipeline,
            "zero_stage": draw(st.sampled_from([0, 1, 2] if plain else [0, 1])),
        },
        precision=draw(st.sampled_from(["fp8", "bf16"])),
        communication_data_type=draw(st.sampled_from(["fp8", "bf16", "fp32"])),
        gradient_exchange={"error_feedback": draw(st.booleans())},
        model={"tie_embeddings": False, "num_layers": draw(st.sampled_from([4, 8, 9]))},
        training={"recompute": draw(st.sampled_from(["none", "full"]))},
    )
