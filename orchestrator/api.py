"""The HTTP API of the controller.

    POST /v1/jobs                 submit {spec, file, key, by}
    POST /v1/jobs:validate        the same without submitting
    GET  /v1/jobs                 all jobs
    GET  /v1/jobs/{job}           one, with its spec and attempts
    GET  /v1/jobs/{job}/events    ?after=&wait=
    GET  /v1/jobs/{job}/steps     ?after=&wait=&tensors=
    GET  /v1/jobs/{job}/records   incidents, actions, what supervisors knew beside a step
    GET  /v1/jobs/{job}/logs      ?rank=&attempt=&offset=&wait=
    GET  /v1/jobs/{job}/stream    events and steps as server-sent events, and
    GET  /v1/jobs/{job}/logs/stream   a rank's log (``orchestrator.api_stream``)
    POST /v1/jobs/{job}/cancel    {reason}
    POST /v1/jobs/{job}/resume    {reason, parallelism}
    POST /v1/jobs/{job}/pause     {key, by, reason}, and so the next three
    POST /v1/jobs/{job}/rollback  {to_step, skip}
    POST /v1/jobs/{job}/precision {layers, to}
    POST /v1/jobs/{job}/exchange  {to}
    GET  /v1/jobs/{job}/controls  what was asked by these, and what became of it
    GET  /v1/jobs/{job}/controls/{key}   ?wait=
    GET  /metrics                 of all jobs, for Prometheus
    GET  /v1/nodes                nodes: who holds them, which are quarantined
    POST /v1/nodes/{node}/quarantine  {reason, by, seconds}
    POST /v1/nodes/{node}/release     {by}
    GET  /healthz                 without a token

Promises: everything under /v1, and /metrics, wants the bearer token (401 without, 403 with a wrong
one); every error is JSON ``{error, problems}`` and never a traceback; parameters that a route
doesn't have are refused (422); a body above ``BODY_LIMIT`` is refused unread. ``{job}`` is an id,
a name or a unique beginning.
``wait`` holds the answer back until there is something new, for that many seconds at most.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException as AnyHTTPException

from monitoring.prometheus import CONTENT_TYPE, exposition
from orchestrator.api_controls import Line, Wait, add_controls
from orchestrator.api_guard import Guard
from orchestrator.api_logs import add_logs
from orchestrator.api_nodes import add_nodes
from orchestrator.api_stream import add_streams
from orchestrator.controller import Controller, SubmitConflictError
from orchestrator.degrees import Word
from orchestrator.lifecycle import TransitionRefused, nothing_to_do
from orchestrator.node_roll import NodeNotFoundError
from orchestrator.notices import backend_detail
from orchestrator.spec import spec_data
from orchestrator.spec_backend import backend_of
from orchestrator.spec_errors import SpecError
from orchestrator.store import Store
from orchestrator.store_controls import (
    ControlConflictError,
    ControlRefusedError,
    UnknownControlError,
)
from orchestrator.store_errors import StoreUnavailableError
from orchestrator.store_rows import JobRow, UnknownJobError, settled

logger = logging.getLogger(__name__)

PAGE = 500
After = Annotated[int, Query(ge=0)]
Limit = Annotated[int, Query(ge=1, le=5000)]


class AmbiguousJobError(ValueError):
    """Several jobs go by this name."""

    def __init__(self, word: str, ids: list[str]) -> None:
        super().__init__(word, ids)
        self.word, self.ids = word, ids

    def __str__(self) -> str:
        listed = ", ".join(self.ids[:10]) + (", …" if len(self.ids) > 10 else "")
        return f"{self.word!r} could be {listed}"


class Submission(BaseModel):
    """A job as a client sends it."""

    model_config = ConfigDict(extra="forbid")

    spec: dict[str, Any]
    file: str = Field("request", max_length=4096)
    """The job file as the user named it, for messages."""
    key: str = Field("", pattern=r"^[A-Za-z0-9._:-]{0,64}$")
    """The client's, so that a submission that is sent twice is one job; empty: none."""
    by: Line = Field("", max_length=200)
    """Whose turn in the queue it takes, as they call themselves."""


class Ask(BaseModel):
    """Why something is asked for."""

    model_config = ConfigDict(extra="forbid")

    reason: str = Field("asked over the API", max_length=1000)


class AskToResume(Ask):
    """Why, and with which degrees from now on."""

    parallelism: dict[Word, int] = {}


def create_app(controller: Controller, token: str) -> FastAPI:
    """The API of ``controller``."""
    known = [Depends(_known_parameters)]
    app = FastAPI(title="Octavo", docs_url=None, redoc_url=None, dependencies=known)
    app.add_middleware(Guard, token=token)
    _add_errors(app)
    _add_commands(app, controller)
    _add_reads(app, controller)
    meant = partial(resolve, controller.store)
    add_logs(app, controller.store, meant)
    add_streams(app, controller, meant)
    add_controls(app, controller, meant)
    add_nodes(app, controller)
    return app


def _known_parameters(request: Request) -> None:
    """Refuse what nobody reads: who misspells a parameter would take the answer for another's."""
    known = {field.alias for field in _query_fields(request.scope["route"].dependant)}
    for name in request.query_params:
        if name not in known:
            listed = f"it has {', '.join(sorted(known))}" if known else "it has none"
            raise HTTPException(422, f"no parameter is called {name!r} here; {listed}")


def _query_fields(dependant: Dependant) -> Iterator[Any]:
    """A route's own parameters, and those of what it depends on."""
    yield from dependant.query_params
    for part in dependant.dependencies:
        yield from _query_fields(part)


def resolve(store: Store, word: str) -> JobRow:
    """The job meant by an id, a name or a unique beginning of an id.

    Of several with the same name, the only one that hasn't ended. Raises ``UnknownJobError``
    and ``AmbiguousJobError``.
    """
    try:
        return store.job(word)
    except UnknownJobError:
        rows = store.jobs()
    found = [r for r in rows if r.name == word] or [r for r in rows if r.id.startswith(word)]
    going = [r for r in found if not r.state.terminal]
    if len(found) == 1 or len(going) == 1:
        return (going or found)[0]
    if not found:
        raise UnknownJobError(word)
    raise AmbiguousJobError(word, [r.id for r in found])


def job_json(row: JobRow) -> dict[str, Any]:
    """A job as the API shows it in a list."""
    return {
        "id": row.id,
        "name": row.name,
        "state": row.state.word,
        "reason": row.reason,
        "settled": settled(row),
        "step": row.stands_at,
        "steps": row.spec.training.steps,
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


def _backend(store: Store, row: JobRow) -> dict[str, str]:
    """What the linears run on and why: as the ranks told, or as far as the spec tells."""
    told = store.newest_event(row.id, ("attempt_started", "backend_chosen"))
    known = {} if told is None else told["detail"]
    foretold = backend_detail(backend_of(row.spec))
    return {key: str(known.get(key, value)) for key, value in foretold.items()}


@contextlib.contextmanager
def _asked_of(job: str) -> Iterator[None]:
    """A refusal in a sentence that names the job."""
    try:
        yield
    except TransitionRefused as refused:
        raise HTTPException(409, nothing_to_do(job, refused)) from None


def _add_commands(app: FastAPI, controller: Controller) -> None:
    @app.post("/v1/jobs", status_code=201)
    def submit(body: Submission) -> dict[str, Any]:
        key = body.key or None
        return job_json(controller.submit(body.spec, body.file, by=body.by, key=key))

    @app.post("/v1/jobs:validate")
    def validate(body: Submission) -> dict[str, Any]:
        return {"spec": spec_data(controller.validate(body.spec, body.file))}

    @app.post("/v1/jobs/{job}/cancel")
    def cancel(job: str, body: Ask | None = None) -> dict[str, Any]:
        row = resolve(controller.store, job)
        with _asked_of(row.id):
            return job_json(controller.cancel(row.id, (body or Ask()).reason))

    @app.post("/v1/jobs/{job}/resume")
    def resume(job: str, body: AskToResume | None = None) -> dict[str, Any]:
        row, asked = resolve(controller.store, job), body or AskToResume()
        with _asked_of(row.id):
            return job_json(controller.resume(row.id, asked.reason, asked.parallelism))


def _add_reads(app: FastAPI, controller: Controller) -> None:
    store = controller.store

    @app.get("/healthz")
    def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", response_class=Response)
    def metrics() -> Response:
        return Response(exposition(controller.numbers()), media_type=CONTENT_TYPE)

    @app.get("/v1/jobs")
    def jobs() -> dict[str, Any]:
        return {"jobs": [job_json(row) for row in store.jobs()]}

    @app.get("/v1/jobs/{job}")
    def show(job: str) -> dict[str, Any]:
        row = resolve(store, job)
        return {
            **job_json(row),
            **_backend(store, row),
            "attempts": store.attempts(row.id),
            "spec": spec_data(row.spec),
        }

    @app.get("/v1/jobs/{job}/events")
    def events(job: str, after: After = 0, wait: Wait = 0, limit: Limit = PAGE) -> dict[str, Any]:
        row = resolve(store, job)
        rows = _held(controller, wait, lambda: store.events(row.id, after, limit), row.id)
        return _page("events", rows, after, store.job(row.id))

    @app.get("/v1/jobs/{job}/steps")
    def steps(
        job: str, after: After = 0, wait: Wait = 0, limit: Limit = PAGE, tensors: bool = True
    ) -> dict[str, Any]:
        row = resolve(store, job)
        rows = _held(controller, wait, lambda: store.steps(row.id, after, limit), row.id)
        if not tensors:
            rows = [{**step, "tensors": {}} for step in rows]
        return _page("steps", rows, after, store.job(row.id))

    @app.get("/v1/jobs/{job}/records")
    def records(job: str) -> dict[str, Any]:
        row = resolve(store, job)
        return {
            # Read first: of the steps before it, everything else is told here.
            "newest_step": store.newest_step(row.id),
            "incidents": [i.to_json() for i in store.incidents(row.id)],
            "actions": [a.to_json() for a in store.actions(row.id)],
            "contexts": [c.to_json() for c in store.contexts(row.id)],
        }


def _held(
    controller: Controller, wait: float, read: Callable[[], list[dict[str, Any]]], job: str
) -> list[dict[str, Any]]:
    """What ``read`` gives, as soon as it gives something or the job is settled."""
    deadline = time.monotonic() + wait
    while True:
        seen = controller.changes()
        rows = read()
        left = deadline - time.monotonic()
        if rows or left <= 0 or settled(controller.store.job(job)):
            return rows
        controller.wait_for_change(seen, left)


def _page(name: str, rows: list[dict[str, Any]], after: int, row: JobRow) -> dict[str, Any]:
    newest = rows[-1]["id"] if rows else after
    return {name: rows, "next": newest, "state": row.state.word, "settled": settled(row)}


def _error(status: int, error: str, problems: list[dict[str, Any]] | None = None) -> JSONResponse:
    return JSONResponse({"error": error, "problems": problems or []}, status)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(SpecError)
    def spec_error(_: Request, error: SpecError) -> JSONResponse:
        count = len(error.problems)
        told = f"{count} problem{'s' * (count > 1)} in the job file"
        return _error(422, told, [p.to_json() for p in error.problems])

    @app.exception_handler(ControlConflictError)
    @app.exception_handler(ControlRefusedError)
    @app.exception_handler(SubmitConflictError)
    def in_vain(_: Request, error: Exception) -> JSONResponse:
        return _error(409, str(error))

    @app.exception_handler(UnknownControlError)
    @app.exception_handler(NodeNotFoundError)
    @app.exception_handler(UnknownJobError)
    def unknown(_: Request, error: Exception) -> JSONResponse:
        return _error(404, str(error))

    @app.exception_handler(AmbiguousJobError)
    def ambiguous(_: Request, error: AmbiguousJobError) -> JSONResponse:
        return _error(409, str(error))

    @app.exception_handler(TransitionRefused)
    def refused(_: Request, error: TransitionRefused) -> JSONResponse:
        return _error(409, str(error))

    @app.exception_handler(RequestValidationError)
    def malformed(_: Request, error: RequestValidationError) -> JSONResponse:
        told = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        return _error(422, "; ".join(told))

    @app.exception_handler(AnyHTTPException)
    def http(_: Request, error: AnyHTTPException) -> JSONResponse:
        detail = str(error.detail)
        return _error(error.status_code, detail[:1].lower() + detail[1:])

    @app.exception_handler(StoreUnavailableError)
    def without_store(_: Request, error: StoreUnavailableError) -> JSONResponse:
        logger.error("a request failed: %s", error)
        return _error(503, f"{error}; nothing was changed, try again in a moment")

    @app.exception_handler(Exception)
    def unexpected(_: Request, error: Exception) -> JSONResponse:
        logger.error("a request failed", exc_info=error)
        return _error(500, f"the controller failed on this request ({type(error).__name__})")
