"""What happens to a job as server-sent events, for pages and programs that listen.

    GET /v1/jobs/{job}/stream       ?steps=&tensors=      events and steps; id ``<event>.<step>``
    GET /v1/jobs/{job}/logs/stream  ?rank=&tail=&since=   a rank's log; id ``<attempt>.<place>``

Promises: who connects again with the id that it saw last (``Last-Event-ID``, or ``?after=``) gets
what followed, each once, in order; nothing is dropped however slow the reader, for everything is
read from the store when it can be sent. The stream ends with an event ``settled``, after which
nothing more will happen by itself. A listener takes no thread while it waits, and reads at most
every ``READ_S``.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, HTTPException, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.sse import EventSourceResponse, ServerSentEvent

from launch.log_lines import LogLine
from orchestrator.api.docs import told
from orchestrator.api.find import Found
from orchestrator.api.logs import (
    AttemptNumber,
    LogPlace,
    LogStart,
    Rank,
    Since,
    Tail,
    log_page,
    log_piece,
    log_place,
)
from orchestrator.api.wait import LOOK_S, Bell
from orchestrator.controller.controller import Controller
from orchestrator.store.rows import JobRow, settled

READ_S = 0.25
"""Seconds between two reads of one listener at least: steps may come by the dozen a second."""
LOG_LOOK_S = 0.5
"""Seconds after which a listener looks at a log, which ranks write without telling anybody."""
PAGE = 500

_PLACE = re.compile(r"^([0-9]{1,18})\.([0-9]{1,18})$")

_SHOWN = """id: 12.0
event: event
data: {"id": 12, "job": "toy-1a2b3c", "kind": "training", "message": "Attempt 1 trains."}

id: 12.0
event: settled
data: {"state": "succeeded"}

"""

Place = Annotated[str | None, Query(pattern=_PLACE.pattern, max_length=40)]
LastId = Annotated[
    str,
    # Only told: what is wrong with one is said below, in other words. Empty is as good as none.
    Header(alias="Last-Event-ID", json_schema_extra={"pattern": f"{_PLACE.pattern}|^$"}),
]


def add_streams(app: FastAPI, controller: Controller, found: Found, bell: Bell) -> None:
    """The two routes. What they need comes by dependencies, so that an unknown job is an answer
    and no stream that breaks off."""
    store = controller.store
    shown = ("text/event-stream", _SHOWN)
    sent_events = told("streams", None, 404, 409, example=shown)

    @app.get("/v1/jobs/{job}/stream", response_class=EventSourceResponse, **sent_events)
    async def stream(
        row: JobRow = Depends(found.shown),
        place: tuple[int, int] = Depends(_place),
        steps: bool = True,
        tensors: bool = False,
    ) -> AsyncIterator[ServerSentEvent]:
        """Events and steps as they come, each with the id to go on from."""
        event, step = place

        def read() -> tuple[JobRow, list[dict[str, Any]], list[dict[str, Any]]]:
            # The job first: once it is settled, what is read after that is all.
            now = store.job(row.id)
            rows = store.past.steps(row.id, step, PAGE) if steps else []
            return now, store.past.events(row.id, event, PAGE), rows

        while True:
            seen = controller.changes.count()
            now, news, done = await run_in_threadpool(read)
            for one in news:
                event = one["id"]
                yield _sent("event", one, f"{event}.{step}")
            for one in done:
                step = one["id"]
                yield _sent("step", one if tensors else {**one, "tensors": {}}, f"{event}.{step}")
            if not news and not done:
                if settled(now):
                    yield _sent("settled", {"state": now.state.word}, f"{event}.{step}")
                    return
                await bell.wait(seen, LOOK_S)
            await asyncio.sleep(READ_S)

    def log_start(
        row: JobRow = Depends(found.shown),
        place: tuple[int, int] = Depends(_place),
        rank: Rank = 0,
        attempt: AttemptNumber = None,
        since: Since = None,
        tail: Tail = None,
    ) -> LogPlace:
        # Who connects again asks as before, and with a place.
        asked = (None, None) if any(place) else (since, tail)
        return log_place(row, rank, LogStart(attempt, *place, *asked))

    @app.get("/v1/jobs/{job}/logs/stream", response_class=EventSourceResponse, **sent_events)
    async def stream_logs(
        row: JobRow = Depends(found.shown), place: LogPlace = Depends(log_start)
    ) -> AsyncIterator[ServerSentEvent]:
        """A rank's log as it is written, through the attempts."""

        def read(at: LogPlace) -> tuple[JobRow, tuple[LogLine, ...], LogPlace]:
            now = store.job(row.id)
            return now, *log_page(now, at)

        while True:
            now, lines, after = await run_in_threadpool(read, place)
            if lines:
                place = after
                piece = {"attempt": place.attempt, "rank": place.rank, **log_piece(lines)}
                yield _sent("log", piece, f"{place.attempt}.{place.offset}")
            elif place.follows and place.attempt < now.attempt:
                place = place.next()
            elif settled(now) or (not place.follows and place.attempt < now.attempt):
                yield _sent("settled", {"state": now.state.word}, f"{place.attempt}.{place.offset}")
                return
            else:
                await asyncio.sleep(LOG_LOOK_S)


def _place(after: Place = None, last: LastId = "") -> tuple[int, int]:
    """Where to go on; a browser that connects again sends the header beside the old query."""
    asked = last or after
    if asked is None:
        return 0, 0
    found = _PLACE.fullmatch(asked)
    if found is None:
        raise HTTPException(422, f"Last-Event-ID {asked!r} is no id of this stream, as 12.340")
    return int(found[1]), int(found[2])


def _sent(kind: str, data: dict[str, Any], place: str) -> ServerSentEvent:
    return ServerSentEvent(raw_data=json.dumps(data), event=kind, id=place)
