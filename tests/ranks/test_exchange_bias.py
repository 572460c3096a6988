"""Error feedback makes up in later steps for what rounding took; plain rounding never does."""

from __future__ import annotations

from functools import cache

import pytest

from tests.ranks.exchange_errors import Errors, Way, errors
from tests.ranks.launch_ranks import run_ranks

REPEATS = 20
WAYS = [
    Way("fp8", format, scattered, feedback)
    for format in ("e4m3", "e5m2")
    for scattered in (True, False)
    for feedback in (False, True)
]


@cache
def measured(kind: str) -> dict[Way, Errors]:
    told = run_ranks(errors, 2, kind, 32_768, WAYS, REPEATS)
    assert told[0] == told[1]
    return dict(zip(WAYS, told[0], strict=True))


by_kind = pytest.mark.parametrize("kind", ["normal", "heavy"])
by_format = pytest.mark.parametrize("format", ["e4m3", "e5m2"])


@by_kind
@by_format
def test_without_feedback_the_long_run_is_as_far_off_as_one_step(kind: str, format: str) -> None:
    for scattered in (True, False):
        error = measured(kind)[Way("fp8", format, scattered, False)]
        assert error.lasting == pytest.approx(error.one, rel=1e-6)
        assert 0.01 < error.one < 0.1


@by_kind
@by_format
def test_with_feedback_the_long_run_mean_of_a_sharded_optimizer_nears_the_exact_one(
    kind: str, format: str
) -> None:
    plain, fed = (measured(kind)[Way("fp8", format, True, f)] for f in (False, True))
    assert fed.one == plain.one, "the first step has nothing to make up for"
    assert fed.lasting < 2 * plain.lasting / REPEATS


@by_kind
@by_format
def test_the_whole_mean_keeps_the_bias_of_its_second_rounding(kind: str, format: str) -> None:
    plain, fed = (measured(kind)[Way("fp8", format, False, f)] for f in (False, True))
    assert fed.lasting < 0.7 * plain.lasting
    assert fed.lasting > 0.2 * plain.lasting, "then the documentation is wrong"
