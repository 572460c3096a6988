"""What ``communication_data_type: auto`` makes of the times that were measured."""

from __future__ import annotations

import pytest

from parallel.exchange_choice import ExchangeTimes, choice_of


@pytest.mark.parametrize(
    ("fp8_s", "dtype"), [(0.5, "fp8"), (0.94, "fp8"), (0.96, "bf16"), (1.0, "bf16"), (2.0, "bf16")]
)
def test_fp8_is_taken_only_where_it_gains_enough(fp8_s: float, dtype: str) -> None:
    choice = choice_of(
        ExchangeTimes(replicas=4, numel=4_194_304, bf16_s=1.0, fp8_s=fp8_s, casts="c")
    )
    assert choice.dtype == dtype
    assert "4,194,304 elements between 4 replicas" in choice.reason
    assert f"{1000 * fp8_s:.1f} ms in FP8 (casts: c) and 1000.0 ms in BF16" in choice.reason


def test_one_replica_exchanges_nothing() -> None:
    choice = choice_of(ExchangeTimes(replicas=1, numel=100, bf16_s=0.0, fp8_s=0.0))
    assert choice.dtype == "bf16" and "one replica" in choice.reason


def test_nothing_is_left_for_fp8_where_every_matrix_is_kept_out() -> None:
    choice = choice_of(ExchangeTimes(replicas=1, numel=0, bf16_s=0.0, fp8_s=0.0))
    assert choice.dtype == "bf16" and "high_precision_parameters" in choice.reason
