"""A job on fewer nodes: the same batch and model ranks, fewer replicas."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.degrees import DegreesRefusedError, node_counts, on_nodes
from orchestrator.spec import JobSpec, parse_spec, spec_yaml
from orchestrator.spec_completion import complete


def job(**values: Any) -> JobSpec:
    defaults: dict[str, Any] = {
        "name": "a",
        "num_nodes": 4,
        "slots_per_node": 2,
        "parallelism": {"pipeline": 2},
        "training": {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2},
    }
    return complete(JobSpec.model_validate({**defaults, **values}))


def test_fewer_nodes_keep_batch_tensor_and_pipeline_and_accumulate_more() -> None:
    spec = on_nodes(job(), 2)
    assert (spec.num_nodes, spec.parallelism.pipeline, spec.parallelism.data) == (2, 2, 2)
    training = spec.training
    assert training.train_batch_size == 16
    assert training.train_micro_batch_size_per_gpu == 2
    assert training.gradient_accumulation_steps == 4
    assert on_nodes(spec, 4) == job()


def test_all_of_its_nodes_leave_a_spec_as_it_is() -> None:
    assert on_nodes(job(), 4) == job()


def test_a_batch_that_replicas_cannot_share_is_refused_with_its_numbers() -> None:
    with pytest.raises(DegreesRefusedError, match="train_batch_size 16 isn't divisible by 3 rep"):
        on_nodes(job(), 3)


def test_nodes_that_hold_no_whole_replica_are_refused_with_its_ranks() -> None:
    spec = job(parallelism={"pipeline": 4, "data": 2})
    with pytest.raises(DegreesRefusedError, match="= 4 ranks"):
        on_nodes(spec, 3)
    assert list(node_counts(spec, 1)) == [4, 2]


def test_a_raw_section_that_holds_the_accumulation_fast_is_told_by_its_key() -> None:
    spec = job(deepspeed={"gradient_accumulation_steps": 2})
    with pytest.raises(DegreesRefusedError, match=r"deepspeed.gradient_accumulation_steps"):
        on_nodes(spec, 2)


def test_counts_begin_with_all_nodes_and_end_with_the_least() -> None:
    assert list(node_counts(job(), 1)) == [4, 2, 1]
    assert list(node_counts(job(), 2)) == [4, 2]


@given(
    nodes=st.integers(1, 6),
    slots=st.integers(1, 4),
    batch=st.integers(1, 48),
    micro=st.integers(1, 4),
)
def test_what_is_offered_is_a_spec_that_passes_all_checks(
    nodes: int, slots: int, batch: int, micro: int
) -> None:
    data = nodes * slots
    spec = job(
        num_nodes=nodes,
        slots_per_node=slots,
        parallelism={"data": data},
        training={
            "train_batch_size": batch * data * micro,
            "train_micro_batch_size_per_gpu": micro,
        },
    )
    for count in node_counts(spec, 1):
        fitted = on_nodes(spec, count)
        assert parse_spec(spec_yaml(fitted), "fitted", check_data=False) == fitted
        assert fitted.training.train_batch_size == spec.training.train_batch_size
        assert (fitted.training.train_micro_batch_size_per_gpu or 0) <= micro
