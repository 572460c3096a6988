"""The HTTP API of the controller.

    POST /v1/jobs                 submit {spec, file, key, by}
    POST /v1/jobs:validate        the same without submitting
    GET  /v1/jobs                 ?after=&limit=&state=&by=
    GET  /v1/jobs/{job}           one, with its spec and attempts
    GET  /v1/jobs/{job}/events    ?after=&wait=&limit=
    GET  /v1/jobs/{job}/steps     ?after=&wait=&limit=&tensors=
    GET  /v1/jobs/{job}/incidents ?after=&limit=
    GET  /v1/jobs/{job}/records   incidents, actions, what supervisors knew beside a step
    GET  /v1/jobs/{job}/logs      ?rank=&attempt=&offset=&since=&wait=
    GET  /v1/jobs/{job}/stream    events and steps as server-sent events, and
    GET  /v1/jobs/{job}/logs/stream   a rank's log (``orchestrator.api.stream``)
    POST /v1/jobs/{job}/cancel    {reason}
    POST /v1/jobs/{job}/resume    {reason, parallelism}
    POST /v1/jobs/{job}/pause     {key, by, reason}, and so the next three
    POST /v1/jobs/{job}/rollback  {to_step, skip}
    POST /v1/jobs/{job}/precision {layers, to}
    POST /v1/jobs/{job}/exchange  {to}
    GET  /v1/jobs/{job}/controls  what was asked by these, and what became of it
    GET  /v1/jobs/{job}/controls/{key}   ?wait=
    GET  /v1/nodes                nodes: who holds them, which are quarantined
    POST /v1/nodes/{node}/quarantine  {reason, by, seconds}
    POST /v1/nodes/{node}/release     {by}
    GET  /v1/tokens, POST /v1/tokens, …   (``orchestrator.api.tokens``)
    GET  /metrics                 of all jobs, for Prometheus
    GET  /healthz                 without a token

Promises: everything under /v1, and /metrics, wants a bearer token (401 without, 403 with a wrong
one) whose role allows it (403); every error is ``application/problem+json``
(``orchestrator.api.problems``) and never a traceback; parameters that a route doesn't have are
refused (422); every list comes in pages of a bounded size, with a cursor that stays right.
``{job}`` is an id, a name or a unique beginning.
``wait`` holds the answer back until there is something new, for that many seconds at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any, get_origin

from fastapi import Depends, FastAPI, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.responses import PlainTextResponse

from monitoring.prometheus import CONTENT_TYPE, exposition
from orchestrator.api.access import Gate
from orchestrator.api.controls import add_controls
from orchestrator.api.docs import Reader, describe, told
from orchestrator.api.find import Found
from orchestrator.api.guard import Guard
from orchestrator.api.jobs import add_jobs
from orchestrator.api.logs import add_logs
from orchestrator.api.models.service import Health
from orchestrator.api.nodes import add_nodes
from orchestrator.api.problems import Kind, RefusalError, add_errors
from orchestrator.api.stream import add_streams
from orchestrator.api.tokens import add_tokens
from orchestrator.api.wait import Bell
from orchestrator.controller.controller import Controller
from orchestrator.home.rate_limit import RateLimit


def create_app(
    controller: Controller, token: str | Callable[[], str], rate: RateLimit | None = None
) -> FastAPI:
    """The API of ``controller``; ``token``: of its home, an admin's, or what gives it as it is
    now; ``rate``: of each token."""
    app = FastAPI(
        title="Octavo",
        version=version("octavo"),
        docs_url=None,
        redoc_url=None,
        dependencies=[Depends(_known_parameters)],
    )
    app.add_middleware(Guard, gate=Gate(token, controller.store.tokens, rate))
    add_errors(app)
    found, bell = Found(controller.store), Bell(controller.changes)
    _add_service(app, controller)
    add_jobs(app, controller, found, bell)
    add_logs(app, controller.store, found)
    add_streams(app, controller, found, bell)
    add_controls(app, controller, found, bell)
    add_nodes(app, controller)
    add_tokens(app, controller.store)
    describe(app)
    return app


def _add_service(app: FastAPI, controller: Controller) -> None:
    @app.get("/healthz", tags=["service"], responses={200: {"model": Health}}, response_model=None)
    def healthz() -> dict[str, str]:
        """Whether the controller answers; without a token."""
        return {"status": "ok"}

    shown = ("text/plain", 'octavo_jobs{state="running"} 2.0\n')

    @app.get("/metrics", response_class=PlainTextResponse, **told("service", None, example=shown))
    def metrics(_: Reader) -> Response:
        """Numbers of all jobs, in Prometheus' text form."""
        return Response(exposition(controller.numbers()), media_type=CONTENT_TYPE)


def _known_parameters(request: Request) -> None:
    """Refuse what nobody reads: who misspells a parameter would take the answer for another's, and
    of one that comes twice, where it is no list, only the last would count."""
    known = {field.alias: field for field in _query_fields(request.scope["route"].dependant)}
    given = [name for name, _ in request.query_params.multi_items()]
    for name in dict.fromkeys(given):
        if name not in known:
            listed = f"it has {', '.join(sorted(known))}" if known else "it has none"
            refusal = f"no parameter is called {name!r} here; {listed}"
            raise RefusalError(Kind.REQUEST_INVALID, refusal)
        a_list = get_origin(known[name].field_info.annotation) is list
        if given.count(name) > 1 and not a_list:
            refusal = f"{name}: is given {given.count(name)} times; once is meant"
            raise RefusalError(Kind.REQUEST_INVALID, refusal)


def _query_fields(dependant: Dependant) -> Iterator[Any]:
    """A route's own parameters, and those of what it depends on."""
    yield from dependant.query_params
    for part in dependant.dependencies:
        yield from _query_fields(part)
