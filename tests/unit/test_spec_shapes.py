"""Specs whose matrices can't be shared by tensor ranks, or multiplied in FP8, are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.spec.completion import ffn_size
from orchestrator.spec.errors import Source, SpecError
from parallel.config import ModelConfig
from tests.unit.test_spec import problems_of, spec_of, spec_with

WIDE: dict[str, Any] = {
    "parallelism": {"tensor": 2, "pipeline": 2},
    "model": {"hidden_size": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2},
}


def wide(**changes: Any) -> dict[str, Any]:
    return spec_with(
        **{key: {**WIDE[key], **changes.pop(key, {})} for key in WIDE},
        **changes,
    )


def test_tensor_ranks_are_accepted_where_everything_divides() -> None:
    spec = spec_of(Source("job.yaml", wide(), {}), check_data=False)
    assert (spec.parallelism.tensor, spec.parallelism.data) == (2, 1)


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"model": {"num_kv_heads": 1}}, "model.num_kv_heads", "1 can't be divided over 2"),
        (
            {"model": {"hidden_size": 96, "num_heads": 3, "num_kv_heads": None}},
            "model.num_heads",
            "can't be divided over 2 tensor ranks",
        ),
        ({"model": {"ffn_size": 177}}, "model.ffn_size", "177 can't be divided over 2"),
        ({"model": {"ffn_size": 176}}, "model.ffn_size", "88 on each of 2 tensor ranks"),
        (
            {"slots_per_node": 6, "parallelism": {"tensor": 4, "pipeline": 1, "data": None}},
            "parallelism.tensor",
            "4 don't divide its 6 slots",
        ),
        (
            {"model": {"hidden_size": 16, "num_heads": 2}, "parallelism": {"pipeline": 1}},
            "parallelism.tensor",
            "leaves each tensor rank queries 8 wide",
        ),
    ],
)
def test_what_tensor_ranks_can_not_share_is_refused_with_key_and_value(
    changes: dict[str, Any], key: str, words: str
) -> None:
    problem = problems_of(wide(**changes))[key]
    assert words in problem.message
    assert problem.remedy


def test_mxfp8_needs_whole_blocks_of_32_and_says_so() -> None:
    data = wide(model={"ffn_size": 176}, parallelism={"tensor": 1}, slots_per_node=2)
    spec_of(Source("job.yaml", {**data, "fp8": {"recipe": "block"}}, {}), check_data=False)
    problem = problems_of({**data, "fp8": {"recipe": "mxfp8"}})["model.ffn_size"]
    assert problem.message == "FP8 products need multiples of 32 under recipe mxfp8"
    assert problem.remedy == "make it 160 or 192"


def test_in_bf16_widths_need_no_multiple() -> None:
    data = wide(model={"ffn_size": 176}, precision="bf16")
    spec_of(Source("job.yaml", data, {}), check_data=False)


@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([16, 32, 64, 96, 128]),
    st.integers(1, 12),
    st.integers(1, 12),
    st.sampled_from([None, 64, 96, 100, 104, 256]),
    st.sampled_from(["delayed", "block", "mxfp8"]),
)
def test_what_is_accepted_cuts_into_aligned_shards(
    tensor: int, hidden: int, heads: int, kv_heads: int, ffn: int | None, recipe: str
) -> None:
    model: dict[str, Any] = {"hidden_size": hidden, "num_heads": heads, "num_kv_heads": kv_heads}
    if ffn is not None:
        model["ffn_size"] = ffn
    data = spec_with(
        slots_per_node=8, parallelism={"tensor": tensor}, model=model, fp8={"recipe": recipe}
    )
    try:
        spec = spec_of(Source("job.yaml", data, {}), check_data=False)
    except SpecError:
        return
    size, inner = hidden // heads, ffn_size(ModelConfig.model_validate(model))
    assert heads % tensor == kv_heads % tensor == inner % tensor == 0
    for width in (heads // tensor * size, (heads + 2 * kv_heads) // tensor * size, inner // tensor):
        assert width % (32 if recipe == "mxfp8" else 16) == 0
    assert spec.parallelism.data == 8 // tensor
