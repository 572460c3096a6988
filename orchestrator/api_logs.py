"""Ranks' logs over the API: a file a rank and attempt, read in pieces from any byte on.

Promises: what is read is a piece of bounded size, wherever it lies in however large a file; it
never splits a UTF-8 character, and what is none is replaced.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, HTTPException, Query

from orchestrator.api_controls import Wait
from orchestrator.spec_completion import slots_per_node
from orchestrator.store import Store
from orchestrator.store_rows import JobRow, settled

LOG_CHUNK = 256 * 1024
"""Bytes of a log in one answer."""
LOOK_S = 0.2


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


def add_logs(app: FastAPI, store: Store, resolve: Callable[[str], JobRow]) -> None:
    """``GET /v1/jobs/{job}/logs``. ``resolve``: the job meant by a word, or an error."""

    @app.get("/v1/jobs/{job}/logs")
    def logs(
        job: str,
        rank: Annotated[int, Query(ge=0)] = 0,
        attempt: Annotated[int | None, Query(ge=1)] = None,
        offset: Annotated[int, Query(ge=0)] = 0,
        wait: Wait = 0,
    ) -> dict[str, Any]:
        row = resolve(job)
        place = log_place(row, rank, attempt, attempt or row.attempt, offset)
        deadline = time.monotonic() + wait
        while True:
            text, end = log_page(row, place)
            now = store.job(row.id)
            left = deadline - time.monotonic()
            # The next attempt's log is another file: a follower moves on to it.
            if text or left <= 0 or settled(now) or (place.follows and now.attempt > place.attempt):
                break
            time.sleep(min(LOOK_S, left))
        return {
            "text": text,
            "offset": end.offset,
            "attempt": place.attempt,
            "rank": rank,
            "exists": _file(row, place).exists(),
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
