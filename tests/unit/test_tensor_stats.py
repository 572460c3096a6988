"""All tensors of a step as columns: a mapping to look at, arrays to compute with, JSON to store."""

import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitoring.amax import encode, headroom_octaves, headrooms, worst_by_headroom
from monitoring.tensor_stats import TensorColumns, TensorStats
from monitoring.tensor_sums import merge

NUMBERS = st.one_of(
    st.floats(0.0, 1e6), st.sampled_from([0.0, math.inf, 5e-324, 448.0, 57344.0, 3.4e38])
)
STATS = st.builds(
    TensorStats,
    NUMBERS,
    NUMBERS,
    st.floats(0.0, 100.0),
    st.floats(0.0, 100.0),
    st.integers(0, 2**40),
    st.none() | st.floats(-50, 200) | st.just(math.inf),
    st.booleans(),
)
NAMES = st.builds(
    "layers.{}.mlp.down/{}".format,
    st.integers(0, 9),
    st.sampled_from(["input", "weight", "grad_output"]),
)
TENSORS = st.dictionaries(NAMES, STATS, max_size=12)


@given(TENSORS)
def test_columns_read_as_the_mapping_that_they_were_made_of(tensors):
    columns = TensorColumns.of(tensors)
    assert dict(columns) == tensors and len(columns) == len(tensors)
    assert list(columns) == list(tensors) and columns == tensors
    assert TensorColumns.of(columns) is columns
    with pytest.raises(KeyError):
        columns["none/such"]


@given(TENSORS)
def test_columns_go_through_strict_json_and_between_processes_without_loss(tensors):
    columns = TensorColumns.of(tensors)
    row = json.loads(json.dumps(columns.to_json(), allow_nan=False))
    assert dict(TensorColumns.from_json(row)) == tensors
    assert dict(pickle.loads(pickle.dumps(columns))) == tensors


def test_what_is_not_measured_is_stored_as_such():
    stats = TensorStats(math.nan, 1.0, math.nan, math.nan, 0)
    row = TensorColumns.of({"a/input": stats}).to_json()
    assert row == {"a/input": ["nan", 1.0, "nan", "nan", 0.0]}
    (again,) = TensorColumns.from_json(row).values()
    assert math.isnan(again.amax) and math.isnan(again.underflow_pct) and again.sqnr_db is None


@given(TENSORS, st.sampled_from(["HYBRID", "E4M3"]), st.integers(0, 13))
def test_headroom_of_all_is_that_of_each(tensors, fp8_format, count):
    each = {n: headroom_octaves(n, s, fp8_format) for n, s in tensors.items()}
    columns = TensorColumns.of(tensors)
    at_once = headrooms(columns, fp8_format).tolist()
    # The vector's logarithm may differ in the last bit.
    assert at_once == pytest.approx(list(each.values()), rel=1e-14)

    left_out = ("layers.3.mlp.down",)
    worst = worst_by_headroom(tensors, count, fp8_format, left_out)
    counted = [
        room
        for (name, room), stats in zip(each.items(), tensors.values(), strict=True)
        if stats.calibrated and not name.startswith(left_out)
    ]
    assert [room for _, room in worst] == pytest.approx(sorted(counted)[:count], rel=1e-14)
    assert all(each[name] == pytest.approx(room, rel=1e-14) for name, room in worst)


def test_two_steps_of_the_same_ranks_have_one_tuple_of_names():
    stats = np.zeros((2, 9), dtype=np.float32)
    first = merge([(["a/input", "b/input"], encode(stats))])
    second = merge([(["a/input", "b/input"], encode(stats))])
    assert first.names is second.names
