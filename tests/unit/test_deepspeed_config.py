"""What a user may add to DeepSpeed's configuration."""

from __future__ import annotations

import pytest

from parallel.deepspeed_config import (
    FIXED,
    REFUSED,
    BatchShape,
    accumulation_dtype,
    contradictions,
    merged_config,
    own_config,
)

OWN = own_config(
    BatchShape(micro_batch_size=2, accumulation_steps=3, data_size=4),
    zero_stage=1,
    max_norm=1.0,
    communication_data_type="fp8",
)


def test_the_batch_is_micro_batches_times_accumulation_times_replicas() -> None:
    assert OWN["train_batch_size"] == 24


def test_additions_are_merged_at_every_depth() -> None:
    user = {"zero_optimization": {"allgather_bucket_size": 1000}, "dump_state": False}
    merged = merged_config(OWN, user)
    assert merged["zero_optimization"] == {"stage": 1, "allgather_bucket_size": 1000}
    assert merged["dump_state"] is False
    assert merged["bf16"] == OWN["bf16"]


def test_neither_configuration_is_changed_by_merging() -> None:
    user = {"zero_optimization": {"allgather_bucket_size": 1000}}
    merged = merged_config(OWN, user)
    merged["zero_optimization"]["stage"] = 3
    assert OWN["zero_optimization"] == {"stage": 1}
    assert user == {"zero_optimization": {"allgather_bucket_size": 1000}}


def test_saying_what_octavo_says_is_no_contradiction() -> None:
    user = {"train_batch_size": 24, "zero_optimization": {"stage": 1}, "gradient_clipping": "auto"}
    assert contradictions(OWN, user) == []
    assert merged_config(OWN, user) == merged_config(OWN, {})


def test_what_deepspeed_prints_is_the_users_to_say() -> None:
    assert merged_config(OWN, {"steps_per_print": 5})["steps_per_print"] == 5
    assert merged_config(OWN, {})["steps_per_print"] is None
    # Its pipeline engine divides by it once it logs its timers.
    assert merged_config(OWN, {"wall_clock_breakdown": True})["steps_per_print"] == 10


def test_the_exchanges_type_may_be_repeated_but_is_not_deepspeeds_business() -> None:
    assert "communication_data_type" not in merged_config(OWN, {"communication_data_type": "fp8"})
    found = contradictions(OWN, {"communication_data_type": "bf16"})
    assert [problem.key for problem in found] == ["communication_data_type"]


def test_every_contradiction_is_found_with_its_path() -> None:
    user = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "scheduler": {"type": "WarmupLR"},
        "wall_clock_breakdown": False,
    }
    found = contradictions(OWN, user)
    assert [problem.key for problem in found] == [
        "train_batch_size",
        "zero_optimization.stage",
        "zero_optimization.offload_optimizer",
        "scheduler",
    ]
    assert "24" in found[0].reason
    with pytest.raises(ValueError, match=r"train_batch_size=8.*scheduler"):
        merged_config(OWN, user)


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_a_refused_key_is_refused_whatever_its_value(key: str) -> None:
    user: dict[str, object] = {}
    section = user
    *parents, last = key.split(".")
    for parent in parents:
        section = section.setdefault(parent, {})  # type: ignore[assignment]
    section[last] = {}
    assert [problem.key for problem in contradictions(OWN, user)] == [key]


@pytest.mark.parametrize(
    ("asked", "dtype"),
    [("fp32", "fp32"), ("float32", "fp32"), ("bfloat16", "bf16"), ("auto", "fp32"), (None, "fp32")],
)
def test_what_gradients_are_added_up_in_is_the_users_to_say(asked: object, dtype: str) -> None:
    user = {} if asked is None else {"data_types": {"grad_accum_dtype": asked}}
    assert accumulation_dtype(user) == dtype
    for stage in (0, 1, 2):
        own = own_config(
            BatchShape(1, 1, 1),
            zero_stage=stage,
            max_norm=1.0,
            communication_data_type="fp8",
            accumulation=accumulation_dtype(user),
        )
        assert contradictions(own, user) == []
        config = merged_config(own, user)
        assert config["data_types"] == {"grad_accum_dtype": dtype}
        # DeepSpeedZeroOptimizer's buckets must come whole to the exchange.
        bucketed = stage == 2 or (stage == 1 and dtype == "bf16")
        assert (config["zero_optimization"].get("reduce_scatter") is False) == bucketed
        assert config["bf16"].get("check_grad_overflow", False) == bucketed


@pytest.mark.parametrize("asked", ["fp16", "e4m3", 16, ["bf16"]])
def test_gradients_are_added_up_in_nothing_else(asked: object) -> None:
    (found,) = contradictions(OWN, {"data_types": {"grad_accum_dtype": asked}})
    assert (found.key, found.reason) == ("data_types.grad_accum_dtype", "it is fp32 or bf16")


@pytest.mark.parametrize("key", sorted(FIXED))
def test_a_switch_that_would_break_a_promise_has_one_value(key: str) -> None:
    section, name = key.split(".")
    right, reason = FIXED[key]
    assert contradictions(OWN, {section: {name: right}}) == []
    (found,) = contradictions(OWN, {section: {name: not right}})
    assert (found.key, found.reason) == (key, reason)
