"""Ranks' logs over the API: a file a rank and attempt, read in pieces from any byte on.

Promises: what is read is a piece of bounded size, wherever it lies in however large a file; it
never splits a UTF-8 character, and what is none is replaced.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Query
from fastapi.concurrency import run_in_threadpool

from orchestrator.api_docs import told
from orchestrator.api_find import Found
from orchestrator.api_limits import LARGEST, After, Wait
from orchestrator.api_models import LogPiece
from orchestrator.spec_completion import slots_per_node
from orchestrator.store import Store
from orchestrator.store_rows import JobRow, settled

LOG_CHUNK = 256 * 1024
"""Bytes of a log in one answer."""
LOOK_S = 0.2

Rank = Annotated[int, Query(ge=0, le=10_000_000)]
AttemptNumber = Annotated[int | None, Query(ge=1, le=LARGEST)]


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

    def look(job: str, place: LogPlace) -> tuple[JobRow, str, LogPlace]:
        # The job first: once it is settled, what is read after that is all.
        now = store.job(job)
        return now, *log_page(now, place)

    @app.get("/v1/jobs/{job}/logs", **told("jobs", LogPiece, 404, 409))
    async def logs(
        row: JobRow = Depends(found.shown),
        rank: Rank = 0,
        attempt: AttemptNumber = None,
        offset: After = 0,
        wait: Wait = 0,
    ) -> dict[str, Any]:
        """A piece of a rank's log from a byte on; `wait` for what is to come."""
        place = log_place(row, rank, attempt, attempt or row.attempt, offset)
        deadline = time.monotonic() + wait
        while True:
            now, text, end = await run_in_threadpool(look, row.id, place)
            left = deadline - time.monotonic()
            # The next attempt's log is another file: a follower moves on to it.
            moved = place.follows and now.attempt > place.attempt
            if text or left <= 0 or settled(now) or moved:
                break
            await asyncio.sleep(min(LOOK_S, left))
        return {
            "text": text,
            "offset": end.offset,
            "attempt": place.attempt,
            "rank": rank,
            "exists": await run_in_threadpool(_file(row, place).exists),
            "state": now.state.word,
            "settled": settled(now),
        }


def log_place(row: JobRow, rank: int, attempt: int | None, at: int, offset: int) -> LogPlace:
    """Byte ``offset`` of attempt ``at``, of the one asked for where there is one, else of the
    newest where ``at`` is 0; HTTPException 422 for a rank that the job doesn't have."""
    ranks = row.spec.num_nodes * slots_per_node(row.spec)
    if rank >= ranks:
        raise HTTPException(422, f"{row.id} has no rank {rank}, only 0 to {ranks - 1}")
    if attempt is not None and at not in (0, attempt):
        raise HTTPException(422, f"this place is of attempt {at}, not {attempt}")
    return LogPlace(rank, attempt or at or row.attempt, offset, attempt is None)


def log_page(row: JobRow, place: LogPlace) -> tuple[str, LogPlace]:
    """The piece at a place, and where the next one begins."""
    text, end = read_log(_file(row, place), place.offset)
    return text, replace(place, offset=end)


def read_log(file: Path, offset: int) -> tuple[str, int]:
    """Text from byte ``offset`` on, a chunk at most, and where the next one begins."""
    try:
        with file.open("rb") as log:
            log.seek(offset)
            data = log.read(LOG_CHUNK)
    except OSError:
        return "", offset
    for cut in range(1, min(4, len(data)) + 1):
        lead = data[-cut]
        if lead >= 0xC0:
            # A character's first byte; how many follow is in its high bits.
            size = 2 + (lead >= 0xE0) + (lead >= 0xF0)
            data = data[:-cut] if size > cut else data
            break
        if lead < 0x80:
            break
    return data.decode("utf-8", "replace"), offset + len(data)


def _file(row: JobRow, place: LogPlace) -> Path:
    return Path(row.job_dir) / "logs" / f"attempt-{place.attempt}" / f"rank-{place.rank}.log"
