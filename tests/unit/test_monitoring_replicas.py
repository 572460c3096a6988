"""Checksums of data-parallel ranks, compared."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from monitoring.records import ReplicaComparison
from monitoring.replicas import RankSums, compare

NAMES = ("embed.weight", "layers.0.mlp.down.weight")


def sums(
    rank: int, *values: int, replicas: tuple[int, ...] = (0, 1, 2), names: tuple[str, ...] = NAMES
) -> RankSums:
    table = np.array([[value, -value] for value in values], dtype="<i8")
    return RankSums(rank, replicas, names, table.tobytes())


def test_replicas_that_are_the_same_differ_in_nothing() -> None:
    assert compare([sums(0, 5, 7), sums(1, 5, 7), sums(2, 5, 7)]) == ReplicaComparison()


def test_the_one_that_differs_from_two_is_named_whatever_the_order() -> None:
    reports = [sums(0, 5, 7), sums(1, 5, 8), sums(2, 5, 7)]
    expected = ReplicaComparison(("layers.0.mlp.down.weight",), (1,), outvoted=True)
    assert all(compare(order) == expected for order in itertools.permutations(reports))


def test_of_two_neither_is_outvoted() -> None:
    found = compare([sums(0, 5, 7, replicas=(0, 1)), sums(1, 6, 7, replicas=(0, 1))])
    assert found == ReplicaComparison(("embed.weight",), (0, 1))


def test_ranks_of_other_stages_are_no_replicas() -> None:
    stages = [
        sums(rank, 5 + stage, 7, replicas=(2 * stage, 2 * stage + 1))
        for stage in (0, 1)
        for rank in (2 * stage, 2 * stage + 1)
    ]
    assert compare(stages) == ReplicaComparison()


@pytest.mark.parametrize(
    "reports", [[], [sums(0, 1, 2, replicas=(0,))], [RankSums(0, (), (), b"")]]
)
def test_without_two_of_a_kind_nothing_is_compared(reports: list[RankSums]) -> None:
    assert compare(reports) is None


def test_sums_that_do_not_fit_are_an_error_that_names_the_rank() -> None:
    with pytest.raises(ValueError, match="rank 1 sent 32 bytes of sums for 2 parameters"):
        compare([sums(0, 5, 7, 9, names=(*NAMES, "head.weight")), sums(1, 5, 7)])
