import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monitoring.amax import (
    COLUMNS,
    decode,
    encode,
    headroom_octaves,
    worst_by_headroom,
)
from monitoring.tensor_stats import TensorStats
from monitoring.tensor_sums import ScaleMismatchError, merge

NAMES = ("layers.0.mlp.down/input", "layers.0.mlp.down/weight")


def table(*rows):
    """Rows of COLUMNS; where energies are left out they were not measured."""
    whole = [[*row, *[0] * (len(COLUMNS) - len(row))] for row in rows]
    return np.array(whole, dtype=np.float32)


def test_statistics_travel_as_bytes_without_loss():
    stats = table([1.5, 2, 3, 4, 0, 100], [math.inf, 1, 0, 0, 7, 50])
    np.testing.assert_array_equal(decode(encode(stats), NAMES), stats)


def test_bytes_that_do_not_fit_the_names_are_refused():
    with pytest.raises(ValueError, match=r"20 bytes of statistics for 2 tensors"):
        decode(b"\0" * 20, NAMES)


class TestMerge:
    def test_takes_the_largest_amax_and_sums_the_counters(self):
        merged = merge(
            [
                (NAMES, encode(table([1, 8, 5, 10, 0, 100], [3, 4, 0, 0, 0, 50]))),
                (NAMES, encode(table([2, 8, 15, 0, 2, 100], [1, 4, 50, 0, 0, 50]))),
            ],
            same_scale=True,
        )
        assert list(merged) == list(NAMES)
        assert merged[NAMES[0]] == TensorStats(2.0, 8.0, 10.0, 5.0, 2)
        assert merged[NAMES[1]] == TensorStats(3.0, 4.0, 50.0, 0.0, 0)

    def test_a_tensor_is_calibrated_where_it_is_on_every_rank_and_in_every_step(self):
        made, not_made = [1, 1, 0, 0, 0, 9, 0, 0, 0], [1, 1, 0, 0, 0, 9, 0, 0, 1]
        ranks = [(NAMES, encode(table(made, made))), (NAMES, encode(table(made, not_made)))]
        for order in (ranks, ranks[::-1]):
            merged = merge(order, same_scale=True)
            assert [merged[name].calibrated for name in NAMES] == [True, False]

    def test_sqnr_is_of_the_energies_of_all_ranks_and_none_where_not_measured(self):
        first = table([1, 1, 0, 0, 0, 9, 3000, 2], [1, 1, 0, 0, 0, 9, 0, 0])
        second = table([1, 1, 0, 0, 0, 9, 1000, 2], [1, 1, 0, 0, 0, 9, math.inf, 1])
        merged = merge([(NAMES, encode(first)), (NAMES, encode(second))])
        assert merged[NAMES[0]].sqnr_db == pytest.approx(30.0)
        assert merged[NAMES[1]].sqnr_db is None
        exact = merge([(NAMES[:1], encode(table([1, 1, 0, 0, 0, 9, 5, 0])))])
        assert exact[NAMES[0]].sqnr_db == math.inf

    def test_what_a_backend_does_not_measure_stays_unknown_and_breaks_nothing(self):
        unknown = table([1, 2, math.nan, math.nan, math.nan, 0, math.nan, math.nan])
        (stats,) = merge([(NAMES[:1], encode(unknown))]).values()
        assert (stats.amax, stats.scale, stats.nonfinite, stats.sqnr_db) == (1, 2, 0, None)
        assert math.isnan(stats.saturated_pct) and math.isnan(stats.underflow_pct)

    def test_stages_with_different_tensors_lie_beside_each_other(self):
        merged = merge(
            [
                ((NAMES[0],), encode(table([1, 8, 0, 0, 0, 4]))),
                ((NAMES[1],), encode(table([2, 4, 1, 0, 0, 4]))),
            ]
        )
        assert [merged[n].amax for n in NAMES] == [1.0, 2.0]
        assert merged[NAMES[1]].saturated_pct == 25.0

    def test_a_scale_that_differs_under_a_shared_one_is_an_error_that_names_the_tensor(self):
        ranks = [
            (NAMES, encode(table([1, 8, 0, 0, 0, 1], [1, 4, 0, 0, 0, 1]))),
            (NAMES, encode(table([1, 8, 0, 0, 0, 1], [1, 2, 0, 0, 0, 1]))),
        ]
        with pytest.raises(ScaleMismatchError, match="weight: ranks used scales from 2 to 4") as e:
            merge(ranks, same_scale=True)
        assert str(pickle.loads(pickle.dumps(e.value))) == str(e.value)
        assert merge(ranks)[NAMES[1]].scale == 2.0

    def test_a_nan_amax_of_any_rank_stays_visible(self):
        ranks = [
            (NAMES[:1], encode(table([math.nan, 8, 0, 0, 1, 1]))),
            (NAMES[:1], encode(table([1, 8, 0, 0, 0, 1]))),
        ]
        for order in (ranks, ranks[::-1]):
            merged = merge(order)[NAMES[0]]
            assert math.isnan(merged.amax)
            assert merged.nonfinite == 1

    def test_nothing_counted_is_no_percentage_of_anything(self):
        assert merge([(NAMES[:1], encode(table([0, 1, 0, 0, 0, 0])))])[NAMES[0]] == TensorStats(
            0.0, 1.0, 0.0, 0.0, 0
        )
        assert merge([]) == {}

    @given(st.permutations(range(4)))
    def test_does_not_depend_on_the_order_of_the_ranks(self, order):
        rng = np.random.default_rng(1)
        ranks = [
            (NAMES, encode(rng.integers(1, 100, (2, len(COLUMNS))).astype(np.float32)))
            for _ in range(4)
        ]
        assert merge(ranks[i] for i in order) == merge(ranks)

    def test_counts_of_many_ranks_keep_their_units(self):
        big = float(2**24)
        ranks = [(NAMES[:1], encode(table([1, 8, 1, 0, 0, big])))] * 64
        assert merge(ranks)[NAMES[0]].saturated_pct == pytest.approx(100 / big, rel=1e-9)


class TestHeadroom:
    @pytest.mark.parametrize(
        ("name", "fp8_format", "amax", "scale", "octaves"),
        [
            ("l/input", "HYBRID", 112.0, 1.0, 2.0),
            ("l/weight", "HYBRID", 448.0, 2.0, -1.0),
            ("l/grad_output", "HYBRID", 57344.0, 1.0, 0.0),
            ("l/grad_output", "E4M3", 57344.0, 1.0, -7.0),
            ("l/input", "HYBRID", 0.0, 4.0, math.inf),
            ("l/input", "HYBRID", math.inf, 4.0, -math.inf),
            ("l/input", "HYBRID", math.nan, 4.0, -math.inf),
        ],
    )
    def test_is_how_often_the_amax_can_double(self, name, fp8_format, amax, scale, octaves):
        assert headroom_octaves(name, TensorStats(amax, scale, 0, 0, 0), fp8_format) == octaves

    def test_the_worst_come_first_without_bf16_layers_and_uncalibrated_tensors(self):
        tensors = {
            "a/input": TensorStats(100.0, 2.0, 0, 0, 0),
            "b/input": TensorStats(400.0, 2.0, 0, 0, 0),
            "c/input": TensorStats(9000.0, 1.0, 0, 0, 0, calibrated=False),
            "d/input": TensorStats(8000.0, 2.0, 0, 0, 0),
        }
        worst = worst_by_headroom(tensors, 2, without_layers=("d",))
        assert [name for name, _ in worst] == ["b/input", "a/input"]
        assert worst[0][1] < 0 < worst[1][1]

    def test_a_scale_of_one_is_a_scale_like_any_other_and_an_infinite_amax_is_the_worst(self):
        # The scale of an amax of 448, and current scaling's where the amax is infinite.
        tensors = {
            "a/input": TensorStats(448.0, 1.0, 0, 0, 0),
            "b/input": TensorStats(math.inf, 1.0, 0, 0, 1),
            "c/input": TensorStats(100.0, 2.0, 0, 0, 0),
        }
        worst = worst_by_headroom(tensors, 2)
        assert worst == [("b/input", -math.inf), ("a/input", 0.0)]
