"""A job on fewer nodes: the same batch and model ranks, fewer replicas."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.spec.completion import complete
from orchestrator.spec.degrees import DegreesRefusedError, Word, as_asked, node_counts, on_nodes
from orchestrator.spec.errors import Source, SpecError
from orchestrator.spec.job import JobSpec, parse_spec, spec_of, spec_yaml


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


@settings(deadline=None, max_examples=30)
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


def asked(spec: JobSpec, **degrees: int) -> JobSpec:
    words: dict[Word, int] = degrees  # type: ignore[assignment]
    return spec_of(Source("resume", as_asked(spec, words), {}), check_data=False)


class TestAsked:
    def test_other_stages_make_replicas_of_the_same_slots(self) -> None:
        found = asked(job(), pipeline=4)
        assert (found.parallelism.pipeline, found.parallelism.data) == (4, 2)
        assert found.training.train_batch_size == 16
        assert found.training.gradient_accumulation_steps == 4

    def test_fewer_replicas_leave_slots_free(self) -> None:
        found = asked(job(), data=2)
        assert (found.num_nodes, found.slots_per_node) == (4, 1)
        assert asked(job(), data=2, num_nodes=1).slots_per_node == 4

    def test_gpus_are_counted_as_gpus(self) -> None:
        found = asked(job(slots_per_node=None, gpus_per_node=2), data=2, num_nodes=2)
        assert (found.gpus_per_node, found.slots_per_node) == (2, None)

    def test_nothing_asked_for_changes_nothing(self) -> None:
        assert asked(job()) == job()

    @pytest.mark.parametrize(
        ("degrees", "told"),
        [
            ({"tensor": 3}, "doesn't divide"),
            ({"pipeline": 8}, "leave a stage empty"),
            ({"data": 3, "num_nodes": 3}, "isn't divisible by 3 replicas"),
            ({"zero_stage": 3}, "make it 1, and raise"),
            ({"tensor": 0}, "greater than or equal to 1"),
        ],
    )
    def test_an_impossible_split_is_refused_in_the_specs_words(
        self, degrees: dict[str, int], told: str
    ) -> None:
        with pytest.raises(SpecError, match=told):
            asked(job(model={"num_layers": 4, "num_heads": 4}), **degrees)
