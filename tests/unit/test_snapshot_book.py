"""Which steps are restorable and which are certified."""

from __future__ import annotations

from typing import Literal

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.commands import SnapshotReport
from launch.config import SnapshotConfig
from launch.snapshot_ring import SnapshotRing
from launch.snapshots import SnapshotKey
from orchestrator.saved.snapshot_book import SnapshotBook


def report(
    rank: int,
    step: int,
    timeline: int = 0,
    attempt: int = 1,
    tier: Literal["ring", "memory", "disk"] = "ring",
) -> SnapshotReport:
    return SnapshotReport(attempt, timeline, rank, step, tier, 10, "d")


def book(certify_after: int = 3, keep: int = 4) -> SnapshotBook:
    return SnapshotBook(SnapshotConfig(every=5, keep=keep, certify_after=certify_after), 1, 2)


def held(of: SnapshotBook, *steps: int, timeline: int = 0) -> SnapshotBook:
    for step in steps:
        for rank in range(2):
            of.add(report(rank, step, timeline), timeline)
    return of


def told(of: SnapshotBook) -> list[tuple[int, bool]]:
    return [(r.step, r.certified) for r in of.restorable()]


def test_a_step_is_restorable_once_every_rank_holds_it() -> None:
    one = book()
    one.add(report(0, 5), 0)
    assert told(one) == []
    one.add(report(0, 5), 0)
    assert told(one) == [], "the same rank twice is not every rank"
    one.add(report(1, 5), 0)
    assert told(one) == [(5, False)]


def test_copies_outside_the_ranks_do_not_count_for_a_rollback_in_place() -> None:
    one = book()
    for rank in range(2):
        one.add(report(rank, 5, tier="memory"), 0)
    assert told(one) == []


def test_reports_of_another_timeline_or_attempt_are_refused() -> None:
    one = book()
    for rank in range(2):
        one.add(report(rank, 5, timeline=0), 1)
        one.add(report(rank, 5, timeline=1, attempt=2), 1)
    assert told(one) == []


def test_a_snapshot_is_certified_by_the_healthy_steps_after_it() -> None:
    one = held(book(certify_after=3), 5)
    one.healthy(5)
    one.healthy(6)
    assert told(one) == [(5, False)]
    one.healthy(7)
    assert told(one) == [(5, True)]


def test_an_incident_starts_the_count_again() -> None:
    one = held(book(certify_after=3), 5)
    one.healthy(5)
    one.unhealthy(6)
    one.healthy(7)
    one.healthy(8)
    assert told(one) == [(5, False)]
    one.healthy(9)
    assert told(one) == [(5, True)]


def test_certified_stays_certified_after_an_incident() -> None:
    one = held(book(certify_after=1), 5)
    one.healthy(5)
    one.unhealthy(6)
    assert told(one) == [(5, True)]


def test_a_rollback_drops_what_is_newer_and_counts_again() -> None:
    one = held(book(certify_after=2), 5, 10)
    one.healthy(10)
    one.rolled_back(5)
    assert told(one) == [(5, True)]
    held(one, 10, timeline=1)
    one.healthy(5)
    one.healthy(10)
    assert told(one) == [(5, True), (10, False)]
    one.healthy(11)
    assert told(one) == [(5, True), (10, True)]


def test_the_oldest_copy_of_a_full_ring_is_not_offered() -> None:
    assert told(held(book(keep=4), 0, 5, 10, 15)) == [(5, False), (10, False), (15, False)]


@settings(max_examples=100, deadline=None)
@given(
    keep=st.integers(2, 6),
    too_many=st.integers(0, 4),
    turns=st.lists(
        st.tuples(st.sampled_from(["take", "tell", "take", "tell", "back"]), st.integers(0, 1)),
        min_size=40,
        max_size=80,
    ),
)
def test_what_is_offered_is_in_the_ring_of_every_rank(
    keep: int, too_many: int, turns: list[tuple[str, int]]
) -> None:
    one = SnapshotBook(SnapshotConfig(every=1, keep=keep + too_many, certify_after=0), 1, 2)
    assert one.made_smaller(keep) is bool(too_many)
    rings = [SnapshotRing(keep, {"x": torch.zeros(1)}) for _ in range(2)]
    at, under_way, timeline = [0, 0], [list[int](), list[int]()], 0
    for turn, rank in turns:
        # A copy is told of before the next one is taken anywhere, at most.
        late = [step for steps in under_way for step in steps if step < at[rank]]
        if turn == "take" and at[rank] <= at[1 - rank] and not late:
            rings[rank].take(SnapshotKey("j", 1, timeline, rank, at[rank]), {})
            under_way[rank].append(at[rank])
            at[rank] += 1
        elif turn == "tell" and under_way[rank]:
            one.add(report(rank, under_way[rank].pop(), timeline), timeline)
        elif turn == "back" and at[0] == at[1] and told(one):
            step = told(one)[rank * (len(told(one)) - 1)][0]
            for back in range(2):
                rings[back].restore(step, back)
            # It is not taken again: the ranks are back to it.
            at, under_way, timeline = [step + 1] * 2, [[], []], timeline + 1
            one.rolled_back(step)
        for ring in rings:
            assert {step for step, _ in told(one)} <= set(ring.steps())


def test_the_smallest_ring_still_offers_a_step() -> None:
    assert told(held(book(keep=2), 0, 5, 10)) == [(10, False)]
