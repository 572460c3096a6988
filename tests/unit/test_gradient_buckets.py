"""How a gradient is cut into buckets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.config import GradientExchangeConfig
from parallel.gradients import bucket_share

DEFAULT = GradientExchangeConfig()
BLOCK, BUCKET = DEFAULT.block, DEFAULT.bucket


@given(st.integers(1, 10**9), st.integers(16, 4096), st.integers(1, 10**7))
def test_buckets_are_whole_blocks_few_and_as_equal_as_they_can_be(
    part: int, block: int, bucket: int
) -> None:
    config = GradientExchangeConfig(block=block, bucket=bucket)
    share = bucket_share(part, config)
    assert share % block == 0
    assert share <= max(block, bucket)
    buckets = -(-part // share)
    largest = max(1, bucket // block) * block
    assert buckets <= max(2, -(-part // largest))
    # Of blocks dealt out evenly the last bucket lacks less than one for each of the others.
    assert part - (buckets - 1) * share > share - buckets * block


@pytest.mark.parametrize(
    ("part", "buckets"),
    [
        (1, 1),
        (BUCKET // 2, 1),
        (BUCKET // 2 + 1, 2),
        (BUCKET, 2),
        (BUCKET + 1, 2),
        (2 * BUCKET, 2),
        (2 * BUCKET + 1, 3),
    ],
)
def test_a_single_bucket_is_halved_and_no_crumb_is_left(part: int, buckets: int) -> None:
    share = bucket_share(part, DEFAULT)
    assert -(-part // share) == buckets
    assert part - (buckets - 1) * share > share - buckets * BLOCK
