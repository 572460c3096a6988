"""Copies that ranks could not make, or not start from: told as one event, however many they are."""

from __future__ import annotations

import pytest

from launch.commands import CopyFailed, CopyRefused, RestorePoint
from orchestrator.supervision import notices
from orchestrator.supervision.copy_troubles import GATHER_S, CopyTroubles
from tests.unit.scripted_job import Bench, Make

DIED = "the partner's keeper has died"


def failed(rank: int, error: str = DIED, step: int = 20, tier: str = "partner") -> CopyFailed:
    return CopyFailed(1, 0, rank, step, tier, error)  # type: ignore[arg-type]


def refused(rank: int, point: RestorePoint | None = None) -> CopyRefused:
    return CopyRefused(1, 0, rank, 20, "partner", "the keeper doesn't hold it", point)


def told(troubles: CopyTroubles, now: float, world: int = 2048) -> list[str]:
    return [notices.copy_trouble(trouble).message for trouble in troubles.due(now, world)]


def test_a_thousand_ranks_without_a_copy_are_one_event_that_names_them() -> None:
    troubles = CopyTroubles()
    for rank in range(1024):
        troubles.add(failed(rank), rank / 1024)
    assert told(troubles, 0.99) == []
    (trouble,) = troubles.due(GATHER_S, 2048)
    notice = notices.copy_trouble(trouble)
    assert notice.message == f"Ranks 0-1023 have no partner copy of step 20: {DIED}."
    assert notice.detail == {"ranks": list(range(1024)), "step": 20, "tier": "partner"}
    assert told(troubles, 99.0) == [], "once"


def test_nobody_is_waited_for_once_all_ranks_have_told_it() -> None:
    troubles = CopyTroubles()
    for rank in (1, 0, 1):
        troubles.add(failed(rank), 5.0)
        assert len(told(troubles, 5.0, 2)) == (rank == 0)


def test_one_rank_is_told_as_one() -> None:
    troubles = CopyTroubles()
    troubles.add(failed(3), 0.0)
    troubles.add(refused(4), 0.0)
    assert told(troubles, GATHER_S) == [
        f"Rank 3 has no partner copy of step 20: {DIED}.",
        "Rank 4 leaves out the copy of step 20 in a partner's keeper, and takes another one: "
        "the keeper doesn't hold it.",
    ]


def test_steps_places_and_what_is_taken_instead_are_told_apart() -> None:
    troubles = CopyTroubles()
    for report in (failed(0), failed(0, step=25), failed(0, tier="disk"), refused(0)):
        troubles.add(report, 0.0)
    troubles.add(refused(1, RestorePoint(20, "memory", 1, 0)), 0.0)
    assert len(told(troubles, GATHER_S)) == 5


def test_errors_that_differ_in_numbers_alone_are_told_once_and_others_with_their_ranks() -> None:
    troubles = CopyTroubles()
    for rank in range(8):
        full = f"OSError: [Errno 28] No space left on device: 'step-20/rank-{rank}.bin'"
        troubles.add(failed(rank, full, tier="disk"), 0.0)
    assert told(troubles, GATHER_S) == [
        "Ranks 0-7 have no disk copy of step 20: OSError: [Errno 28] No space left on device: "
        "'step-20/rank-0.bin'."
    ]
    for rank, error in enumerate(["a", "b", "b", "c", "d", "e"]):
        troubles.add(failed(rank, error), 0.0)
    assert told(troubles, GATHER_S) == [
        "Ranks 0-5 have no partner copy of step 20: ranks 1-2: b; rank 0: a; rank 3: c; "
        "2 other errors."
    ]


def kinds(job: Bench) -> list[str]:
    return [event.kind for event in job.settled().events]


def test_a_supervisor_tells_it_when_its_time_has_come(bench: Make) -> None:
    job = bench()
    job.train(3)
    job.ranks.deliver([failed(1, step=0)])
    job.step()
    assert "copy_failed" not in kinds(job)
    heard = job.now
    job.step(GATHER_S)
    event = job.settled().event("copy_failed")
    assert event.time == heard and event.detail["ranks"] == [1]


@pytest.mark.parametrize("how", ["the attempt ends", "the job ends"])
def test_what_is_not_told_yet_is_told_before_what_it_belongs_to_is_over(
    bench: Make, how: str
) -> None:
    job = bench()
    job.train(3)
    job.ranks.deliver([failed(1, step=0)])
    job.step()
    if how == "the attempt ends":
        job.ranks.lose(0)
        after = "attempt_started"
    else:
        job.supervision.ask_stop("enough")
        job.step(0.0)
        job.train(1)
        after = "ended"
    job.step(0.1)
    job.step(0.1)
    assert kinds(job).count("copy_failed") == 1
    assert "copy_failed" in kinds(job)[: len(kinds(job)) - kinds(job)[::-1].index(after)]
