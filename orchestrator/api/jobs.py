"""The part of the HTTP API by which jobs are submitted, ended, resumed and looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Query
from pydantic import BaseModel, Field

from monitoring.utilization import RANK_PEAK
from orchestrator.api.docs import Reader, Submitter, takes, told
from orchestrator.api.find import Found
from orchestrator.api.limits import PAGE, After, Key, Limit, Line, Wait, on_one_line
from orchestrator.api.models.fields import State
from orchestrator.api.models.jobs import CompletedSpec, Job, JobDetail, JobPage
from orchestrator.api.models.records import EventPage, IncidentPage, RecordPage, StepPage
from orchestrator.api.wait import Bell
from orchestrator.controller.controller import Controller
from orchestrator.lifecycle import TransitionRefused, nothing_to_do, state_named
from orchestrator.planning.utilization import rank_peak_tokens_per_s
from orchestrator.spec.backend import backend_of
from orchestrator.spec.degrees import Word
from orchestrator.spec.job import spec_data
from orchestrator.store.database import Store
from orchestrator.store.rows import JobRow, settled
from orchestrator.supervision.notices import backend_detail

_PLACES = r"^[0-9]{1,15}\.[0-9]{1,15}\.[0-9]{1,15}$"
"""How far a reader of records is: ids of an incident, an action and a context."""

_EXAMPLE_SPEC: dict[str, Any] = {
    "name": "toy",
    "slots_per_node": 4,
    "parallelism": {"pipeline": 2},
    "data": {"source": "python-stdlib"},
    "training": {"steps": 240},
}


class Submission(BaseModel):
    """A job as a client sends it."""

    model_config = takes(spec=_EXAMPLE_SPEC, file="job.yaml", key="c0ffee", by="alice")

    spec: dict[str, Any] = Field(description="The job file's contents.")
    file: Line = Field("request", max_length=4096)
    """The job file as the user named it, for messages."""
    key: Key = ""
    """The client's, so that a submission that is sent twice is one job; empty: none."""
    by: Line = Field("", max_length=200)
    """Whose turn in the queue it takes, where an admin submits it; else it is the token's name."""


class Ask(BaseModel):
    """Why something is asked for."""

    model_config = takes(reason="the data were wrong")

    reason: Line = Field("asked over the API", max_length=1000)


class AskToResume(Ask):
    """Why, and with which degrees from now on."""

    model_config = takes(reason="a node is back", parallelism={"data": 2, "pipeline": 1})

    parallelism: dict[Word, Annotated[int, Field(ge=-(2**31), lt=2**31)]] = {}


def job_json(row: JobRow, reason: str | None = None) -> dict[str, Any]:
    """A job as the API shows it in a list; ``reason``: in place of the stored one."""
    return {
        "id": row.id,
        "name": row.name,
        "state": row.state.word,
        "reason": row.reason if reason is None else reason,
        "settled": settled(row),
        "step": row.stands_at,
        "steps": row.planned_steps,
        # Of a step that was given up it says nothing.
        "loss": row.loss if row.stands_at == row.step else None,
        "attempt": row.attempt,
        "timeline": row.timeline,
        "priority": row.priority,
        "submitted_by": row.submitted_by,
        "file": row.file,
        "job_dir": row.job_dir,
        "submitted_at": row.submitted_at,
        "started_at": row.started_at,
        "ended_at": row.ended_at,
        "nodes": [asdict(n) for n in row.nodes],
    }


def add_jobs(app: FastAPI, controller: Controller, found: Found, bell: Bell) -> None:
    """The routes."""
    _add_commands(app, controller, found)
    _add_lists(app, controller, found)
    _add_growing(app, controller.store, found, bell)


def _add_commands(app: FastAPI, controller: Controller, found: Found) -> None:
    @app.post("/v1/jobs", **told("jobs", Job, 409, status=201, body=True))
    def submit(body: Submission, caller: Submitter) -> dict[str, Any]:
        """Take a job in; the same `key` of the same user again gives the same job."""
        by = caller.speaks_as(body.by)
        return job_json(controller.intake.submit(body.spec, body.file, by=by, key=body.key or None))

    @app.post("/v1/jobs:validate", **told("jobs", CompletedSpec, body=True))
    def validate(body: Submission, _: Submitter) -> dict[str, Any]:
        """The same without submitting: the spec completed, or every problem of it."""
        return {"spec": spec_data(controller.intake.validate(body.spec, body.file))}

    @app.post("/v1/jobs/{job}/cancel", **told("jobs", Job, 404, 409, body=True))
    def cancel(
        caller: Submitter, row: JobRow = Depends(found.controlled), body: Ask | None = None
    ) -> dict[str, Any]:
        """End a job, after a checkpoint where it has something to save."""
        with _asked_of(row.id):
            return job_json(controller.cancel(row.id, caller.signed((body or Ask()).reason)))

    @app.post("/v1/jobs/{job}/resume", **told("jobs", Job, 404, 409, body=True))
    def resume(
        caller: Submitter, row: JobRow = Depends(found.controlled), body: AskToResume | None = None
    ) -> dict[str, Any]:
        """Queue a paused, cancelled or failed job again, with other degrees where any are given."""
        asked = body or AskToResume()
        with _asked_of(row.id):
            reason = caller.signed(asked.reason)
            return job_json(controller.resume(row.id, reason, asked.parallelism))


def _add_lists(app: FastAPI, controller: Controller, found: Found) -> None:
    store = controller.store

    @app.get("/v1/jobs", **told("jobs", JobPage, 404))
    def jobs(
        _: Reader,
        after: Annotated[
            str | None,
            Query(pattern=r"^[a-z0-9-]{1,80}$", description="`next` of the page before."),
        ] = None,
        limit: Limit = PAGE,
        state: Annotated[
            list[State], Query(description="Only those in one of these states.", max_length=9)
        ] = [],  # noqa: B006 - FastAPI copies it
        by: Annotated[
            str | None, Query(max_length=200, description="Only those that this user submitted.")
        ] = None,
    ) -> dict[str, Any]:
        """Jobs, oldest first."""
        states = [state_named(word) for word in state]
        whose = None if by is None else on_one_line(by)
        rows = store.pages.jobs(after, limit + 1, states, whose)
        shown = rows[:limit]
        return {
            "jobs": [job_json(row, controller.waits.reason_of(row)) for row in shown],
            "next": shown[-1].id if len(rows) > limit else None,
        }

    @app.get("/v1/jobs/{job}", **told("jobs", JobDetail, 404, 409))
    def show(row: JobRow = Depends(found.shown)) -> dict[str, Any]:
        """A job with its spec and attempts."""
        return {
            **job_json(row, controller.waits.reason_of(row)),
            **_backend(store, row),
            RANK_PEAK: rank_peak_tokens_per_s(row.spec),
            "checkpoint_step": _checkpoint_step(store, row.id),
            "attempts": store.attempts.of(row.id),
            "spec": spec_data(row.spec),
        }

    @app.get("/v1/jobs/{job}/incidents", **told("jobs", IncidentPage, 404, 409))
    def incidents(
        row: JobRow = Depends(found.shown), after: After = 0, limit: Limit = PAGE
    ) -> dict[str, Any]:
        """What detectors saw, oldest first."""
        rows = store.pages.incidents(row.id, after, limit)
        shown = [{"id": id_, **body} for id_, body in rows]
        return {"incidents": shown, "next": rows[-1][0] if rows else after}

    @app.get("/v1/jobs/{job}/records", **told("jobs", RecordPage, 404, 409))
    def records(
        row: JobRow = Depends(found.shown),
        after: Annotated[
            str, Query(pattern=_PLACES, description="`next` of the page before.")
        ] = "0.0.0",
        limit: Limit = PAGE,
    ) -> dict[str, Any]:
        """Incidents, actions, and what supervisors knew beside steps; `limit` of each kind."""
        # Read first: of the steps before it, everything else is told here.
        newest = store.past.newest_step(row.id)
        places = [int(word) for word in after.split(".")]
        reads = (store.pages.incidents, store.pages.actions, store.pages.contexts)
        pages = [read(row.id, at, limit) for read, at in zip(reads, places, strict=True)]
        reached = [page[-1][0] if page else at for page, at in zip(pages, places, strict=True)]
        kinds = ("incidents", "actions", "contexts")
        return {
            "newest_step": newest,
            **{k: [body for _, body in page] for k, page in zip(kinds, pages, strict=True)},
            "next": ".".join(map(str, reached)),
            "more": any(len(page) == limit for page in pages),
        }


def _add_growing(app: FastAPI, store: Store, found: Found, bell: Bell) -> None:
    Rows = list[dict[str, Any]]

    def read(kind: str, job: str, after: int, limit: int) -> tuple[JobRow, Rows]:
        # The job first: once it is settled, what is read after that is all.
        now = store.job(job)
        rows = store.past.events if kind == "events" else store.past.steps
        return now, rows(job, after, limit)

    async def page(kind: str, job: str, after: int, limit: int, wait: float) -> dict[str, Any]:
        row, rows = await bell.held(
            wait,
            lambda: read(kind, job, after, limit),
            lambda seen: bool(seen[1]) or settled(seen[0]),
        )
        return {
            kind: rows,
            "next": rows[-1]["id"] if rows else after,
            "state": row.state.word,
            "settled": settled(row),
        }

    @app.get("/v1/jobs/{job}/events", **told("jobs", EventPage, 404, 409))
    async def events(
        row: JobRow = Depends(found.shown), after: After = 0, wait: Wait = 0, limit: Limit = PAGE
    ) -> dict[str, Any]:
        """What happened to a job, oldest first; `wait` for what is to come."""
        return await page("events", row.id, after, limit, wait)

    @app.get("/v1/jobs/{job}/steps", **told("jobs", StepPage, 404, 409))
    async def steps(
        row: JobRow = Depends(found.shown),
        after: After = 0,
        wait: Wait = 0,
        limit: Limit = PAGE,
        tensors: bool = True,
    ) -> dict[str, Any]:
        """Its steps, in the order in which they were stored."""
        shown = await page("steps", row.id, after, limit, wait)
        if not tensors:
            shown["steps"] = [{**step, "tensors": {}} for step in shown["steps"]]
        return shown


def _checkpoint_step(store: Store, job: str) -> int | None:
    written = store.past.newest_event(job, ("checkpoint_written",))
    return None if written is None else int(written["detail"]["step"])


def _backend(store: Store, row: JobRow) -> dict[str, str]:
    """What the linears run on and why: as the ranks told, or as far as the spec tells."""
    newest = store.past.newest_event(row.id, ("attempt_started", "backend_chosen"))
    known = {} if newest is None else newest["detail"]
    foretold = backend_detail(backend_of(row.spec))
    return {key: str(known.get(key, value)) for key, value in foretold.items()}


@contextlib.contextmanager
def _asked_of(job: str) -> Iterator[None]:
    """A refusal in a sentence that names the job."""
    try:
        yield
    except TransitionRefused as refused:
        raise HTTPException(409, nothing_to_do(job, refused)) from None
