"""Copies in keepers are counted by who holds what, however often they are told."""

from __future__ import annotations

from typing import Literal

from launch.commands import SnapshotReport
from orchestrator.saved.copy_book import CopyBook
from tests.unit.scripted_job import Make


def copy(
    rank: int, tier: Literal["memory", "partner"], step: int = 20, partner: int = 0
) -> SnapshotReport:
    return SnapshotReport(1, 0, rank, step, tier, 10, "d", partner=partner)


def test_a_step_is_held_once_every_rank_s_keeper_and_partner_have_it() -> None:
    book = CopyBook(world_size=2, replicas=1)
    reports = [copy(rank, tier) for rank in range(2) for tier in ("memory", "partner")]
    assert [book.add(report) for report in reports] == [False, False, False, True]
    assert book.complete == 20


def test_a_copy_that_is_told_twice_is_one() -> None:
    book = CopyBook(world_size=2, replicas=1)
    for report in (copy(0, "memory"), copy(1, "memory"), copy(0, "partner"), copy(0, "partner")):
        assert not book.add(report)
    assert book.complete is None
    assert book.add(copy(1, "partner"))


def test_two_partners_of_one_rank_are_two_copies() -> None:
    book = CopyBook(world_size=1, replicas=2)
    assert not book.add(copy(0, "memory"))
    assert not book.add(copy(0, "partner", partner=1))
    assert not book.add(copy(0, "partner", partner=1))
    assert book.add(copy(0, "partner", partner=0))


def test_what_is_told_late_of_an_older_step_makes_that_no_newer() -> None:
    book = CopyBook(world_size=1, replicas=0)
    assert book.add(copy(0, "memory", step=20))
    assert not book.add(copy(0, "memory", step=15)) and book.complete == 20


def test_keepers_are_not_told_to_forget_for_one_rank_s_copy_told_twice(bench: Make) -> None:
    job = bench()
    job.step()
    ranks = job.ranks
    report = SnapshotReport(ranks.attempt, ranks.timeline, 0, ranks.step, "memory", 10, "d")
    for _ in range(2):
        job.supervision.deliver([report])
        job.step()
    assert ranks.settled == [] and "copies_held" not in {e.kind for e in job.settled().events}
