"""Ranks' logs over the API: read in pieces from any place on, from the end, or from a time on.

Promises: what is read is bounded, wherever it lies in however large a log (``launch.log_files``); a
place stays valid while the log grows and is rotated; a log is there as long as the job's directory;
no secret of the controller's environment, nor what looks like one, is in a line that is told.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Query
from fastapi.concurrency import run_in_threadpool

from launch.log_files import RankLogFiles, start_of_last, start_since
from launch.log_lines import OUTPUT, LogLine
from monitoring.secrets import secrets_of, without
from orchestrator.api.docs import told
from orchestrator.api.find import Found
from orchestrator.api.limits import LARGEST, After, Wait
from orchestrator.api.models.logs import LogPiece
from orchestrator.spec.completion import slots_per_node
from orchestrator.store.database import Store
from orchestrator.store.rows import JobRow, settled

PAGE_LINES = 2000
"""Lines of a log in one answer."""
LOOK_S = 0.2

Rank = Annotated[int, Query(ge=0, le=10_000_000)]
AttemptNumber = Annotated[int | None, Query(ge=1, le=LARGEST)]
Since = Annotated[
    float | None,
    Query(ge=0, le=LARGEST, allow_inf_nan=False, description="Lines from this time on."),
]
Tail = Annotated[int | None, Query(ge=1, le=100_000, description="The last lines alone.")]


@dataclass(frozen=True, slots=True)
class LogStart:
    """From where a reader wants a log, as it was asked."""

    attempt: int | None = None
    """Of this attempt alone; else the log is followed from one to the next."""
    at: int = 0
    """Attempt that ``offset`` is of; 0: of the newest."""
    offset: int = 0
    since: float | None = None
    tail: int | None = None


@dataclass(frozen=True, slots=True)
class LogPlace:
    """Where a reader of a rank's log is."""

    rank: int
    attempt: int
    offset: int
    follows: bool
    """It goes on with the next attempt's log."""

    def next(self) -> LogPlace:
        """The beginning of the next attempt's log."""
        return replace(self, attempt=self.attempt + 1, offset=0)


def add_logs(app: FastAPI, store: Store, found: Found) -> None:
    """``GET /v1/jobs/{job}/logs``."""

    def look(job: str, place: LogPlace) -> tuple[JobRow, tuple[LogLine, ...], LogPlace]:
        # The job first: once it is settled, what is read after that is all.
        now = store.job(job)
        return now, *log_page(now, place)

    @app.get("/v1/jobs/{job}/logs", **told("jobs", LogPiece, 404, 409))
    async def logs(
        row: JobRow = Depends(found.shown),
        rank: Rank = 0,
        attempt: AttemptNumber = None,
        offset: After = 0,
        since: Since = None,
        tail: Tail = None,
        wait: Wait = 0,
    ) -> dict[str, Any]:
        """Lines of a rank's log from a place on; `wait` for what is to come."""
        at = attempt or (row.attempt if offset else 0)
        start = LogStart(attempt, at, offset, since, tail)
        place = await run_in_threadpool(log_place, row, rank, start)
        deadline = time.monotonic() + wait
        while True:
            now, lines, end = await run_in_threadpool(look, row.id, place)
            left = deadline - time.monotonic()
            # The next attempt's log is another file: a follower moves on to it.
            moved = place.follows and now.attempt > place.attempt
            if lines or left <= 0 or settled(now) or moved:
                break
            await asyncio.sleep(min(LOOK_S, left))
        return {
            **log_piece(lines),
            "offset": end.offset,
            "attempt": place.attempt,
            "rank": rank,
            "exists": await run_in_threadpool(_files(row, place).exists),
            "state": now.state.word,
            "settled": settled(now),
        }


def log_place(row: JobRow, rank: int, start: LogStart) -> LogPlace:
    """Where to begin to read; HTTPException 422 for a rank that the job doesn't have, and for two
    answers at once."""
    ranks = row.spec.num_nodes * slots_per_node(row.spec)
    if rank >= ranks:
        raise HTTPException(422, f"{row.id} has no rank {rank}, only 0 to {ranks - 1}")
    if start.attempt is not None and start.at not in (0, start.attempt):
        raise HTTPException(422, f"this place is of attempt {start.at}, not {start.attempt}")
    resumed = bool(start.offset)
    if resumed and (start.since is not None or start.tail is not None):
        told = "`offset` is a place already: `since` and `tail` are for who has none"
        raise HTTPException(422, told)
    place = LogPlace(
        rank, start.attempt or start.at or row.attempt, start.offset, not start.attempt
    )
    if start.at and not start.attempt:
        return place
    return _sought(row, place, start)


def _sought(row: JobRow, place: LogPlace, start: LogStart) -> LogPlace:
    """The place that ``since`` or ``tail`` means, with both the later one: in the attempt asked
    for, else in any."""
    files, logs = _files(row, place), Path(row.job_dir) / "logs"
    found: list[tuple[int, int]] = []
    if start.since is not None:
        here = (place.attempt, files.since(start.since)) if start.attempt else None
        found.append(here or start_since(logs, place.rank, start.since))
    if start.tail is not None:
        here = (place.attempt, files.last(start.tail)) if start.attempt else None
        found.append(here or start_of_last(logs, place.rank, start.tail))
    if not found:
        return place
    attempt, offset = max(found)
    return replace(place, attempt=attempt or place.attempt, offset=offset)


def log_page(row: JobRow, place: LogPlace) -> tuple[tuple[LogLine, ...], LogPlace]:
    """Lines from a place on, and where the next one begins; ``row``: the job as it is now."""
    over = settled(row) or place.attempt < row.attempt
    read = _files(row, place).read(place.offset, PAGE_LINES, ended=over)
    return tuple(map(_told, read.lines)), replace(place, offset=read.place)


def _told(line: LogLine) -> LogLine:
    """A line without what looks like a secret: what was written past Python still has it."""
    if line.level != OUTPUT:
        return line
    return replace(line, message=without(line.message, secrets_of(os.environ)))


def log_piece(lines: Sequence[LogLine]) -> dict[str, Any]:
    """Lines as an answer has them: for programs, and for a terminal."""
    return {
        "lines": [line.to_json() for line in lines],
        "text": "".join(f"{line.text()}\n" for line in lines),
    }


def _files(row: JobRow, place: LogPlace) -> RankLogFiles:
    folder = Path(row.job_dir) / "logs" / f"attempt-{place.attempt}"
    return RankLogFiles(folder, place.attempt, place.rank)
