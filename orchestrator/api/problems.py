"""Errors of the HTTP API, as RFC 9457 has them: ``application/problem+json``.

    {"type": "urn:octavo:unknown-job", "title": "No such job", "status": 404,
     "detail": "there is no job 'gamma'", "problems": [], "candidates": [], "error": "there is …"}

Promises: every answer of 400 and above is one of these, whoever gives it; ``type`` is one of
``Kind`` and is what programs go by, ``detail`` is a sentence for a person; ``problems`` lists each
wrong value with its key, what is wrong and a hint; nothing of a traceback, a token or the value of
a secret is in it. ``error`` repeats ``detail`` and a problem's ``remedy`` its ``hint``: so they
were called before, and /v1 keeps them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from enum import Enum
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.routing import Match

from orchestrator.controller.intake import SubmitConflictError
from orchestrator.lifecycle import TransitionRefused
from orchestrator.nodes.roll import NodeNotFoundError
from orchestrator.spec.errors import SpecError
from orchestrator.store.controls import (
    ControlConflictError,
    ControlRefusedError,
    UnknownControlError,
)
from orchestrator.store.errors import StoreUnavailableError
from orchestrator.store.pages import AmbiguousJobError
from orchestrator.store.rows import UnknownJobError
from orchestrator.store.tokens import TokenConflictError, UnknownTokenError

logger = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
STORE_RETRY_S = 1
"""Seconds after which to ask again where the store can't be used."""


class Kind(Enum):
    """What went wrong; the member's name makes the ``type``."""

    TOKEN_MISSING = (401, "No bearer token")
    TOKEN_REFUSED = (403, "The token is not accepted")
    ROLE_TOO_LOW = (403, "The token's role doesn't allow this")
    NOT_YOUR_JOB = (403, "The job is another user's")
    NOT_FOUND = (404, "Nothing is here")
    UNKNOWN_JOB = (404, "No such job")
    UNKNOWN_NODE = (404, "No such node")
    UNKNOWN_CONTROL = (404, "Nothing was asked under this key")
    UNKNOWN_TOKEN = (404, "No such token")
    METHOD_NOT_ALLOWED = (405, "Not with this method")
    AMBIGUOUS_JOB = (409, "Several jobs go by this name")
    CONFLICT = (409, "Not in this state")
    TOO_LARGE = (413, "The body is too large")
    WRONG_MEDIA_TYPE = (415, "The body is not JSON")
    SPEC_INVALID = (422, "The job can't be run as it is written")
    REQUEST_INVALID = (422, "The request can't be understood")
    BODY_UNFIT = (422, "The body is JSON that can't be kept")
    TOO_MANY_REQUESTS = (429, "Too many requests")
    FAILED = (500, "The controller failed on this request")
    STORE_UNAVAILABLE = (503, "The store can't be used for now")

    def __init__(self, status: int, title: str) -> None:
        self.status = status
        self.title = title

    @property
    def type(self) -> str:
        """The URI that names it."""
        return f"urn:octavo:{self.name.lower().replace('_', '-')}"


class ProblemItem(BaseModel):
    """One value that is wrong."""

    key: str = Field(description="Dotted path of the value, as `parallelism.pipeline`.")
    message: str
    hint: str = Field(description="What to do about it; empty where it goes without saying.")
    file: str = Field("", description="The job file as the user named it.")
    value: str = ""
    line: int | None = None
    remedy: str = Field("", description="The same as `hint`.", deprecated=True)


class ProblemDetails(BaseModel):
    """An error (RFC 9457)."""

    type: str = Field(description="What programs go by.", examples=["urn:octavo:unknown-job"])
    title: str
    status: int
    detail: str = Field(description="What happened, in a sentence for a person.")
    problems: list[ProblemItem] = Field(description="Each value that is wrong; often none.")
    candidates: list[str] = Field(description="Ids that an ambiguous name could mean.")
    error: str = Field(description="The same as `detail`.", deprecated=True)


class RefusalError(Exception):
    """A request that is answered with an error of this kind."""

    def __init__(self, kind: Kind, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(kind, detail)
        self.kind, self.detail, self.headers = kind, detail, dict(headers or {})


def problem_body(
    kind: Kind,
    detail: str,
    problems: Sequence[Mapping[str, Any]] = (),
    candidates: Sequence[str] = (),
    status: int | None = None,
) -> bytes:
    """The answer's body; ``status`` only where it isn't the kind's."""
    body = {
        "type": kind.type,
        "title": kind.title,
        "status": status or kind.status,
        "detail": detail,
        "problems": list(problems),
        "candidates": list(candidates),
        "error": detail,
    }
    return json.dumps(body).encode()


def problem_response(
    kind: Kind,
    detail: str,
    problems: Sequence[Mapping[str, Any]] = (),
    candidates: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
    status: int | None = None,
) -> Response:
    """The answer."""
    body = problem_body(kind, detail, problems, candidates, status)
    return Response(body, status or kind.status, dict(headers or {}), MEDIA_TYPE)


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Error answers of a route, for its OpenAPI description, each with an example."""
    told: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        kinds = [kind for kind in Kind if kind.status == status]
        examples = {
            kind.type.rpartition(":")[2]: {
                "value": json.loads(problem_body(kind, *_EXAMPLES[kind]))
            }
            for kind in kinds
        }
        content: dict[str, Any] = {
            "schema": {"$ref": "#/components/schemas/ProblemDetails"},
            "examples": examples,
        }
        told[status] = {
            "description": "; ".join(kind.title for kind in kinds),
            "content": {MEDIA_TYPE: content},
        }
        if status in (429, 503):
            retry = {"description": "Seconds to wait.", "schema": {"type": "integer"}}
            told[status]["headers"] = {"Retry-After": retry}
    return told


def add_errors(app: FastAPI) -> None:
    """Whatever is raised under ``app`` becomes such an answer."""

    @app.exception_handler(RefusalError)
    def refused(_: Request, error: RefusalError) -> Response:
        return problem_response(error.kind, error.detail, headers=error.headers)

    @app.exception_handler(SpecError)
    def spec_error(_: Request, error: SpecError) -> Response:
        count = len(error.problems)
        told = f"{count} problem{'s' * (count > 1)} in the job file"
        items = [{**p.to_json(), "hint": p.remedy} for p in error.problems]
        return problem_response(Kind.SPEC_INVALID, told, items)

    @app.exception_handler(ControlConflictError)
    @app.exception_handler(ControlRefusedError)
    @app.exception_handler(SubmitConflictError)
    @app.exception_handler(TokenConflictError)
    @app.exception_handler(TransitionRefused)
    def in_vain(_: Request, error: Exception) -> Response:
        return problem_response(Kind.CONFLICT, str(error))

    @app.exception_handler(UnknownControlError)
    def unknown_control(_: Request, error: UnknownControlError) -> Response:
        return problem_response(Kind.UNKNOWN_CONTROL, str(error))

    @app.exception_handler(UnknownTokenError)
    def unknown_token(_: Request, error: UnknownTokenError) -> Response:
        return problem_response(Kind.UNKNOWN_TOKEN, str(error))

    @app.exception_handler(NodeNotFoundError)
    def unknown_node(_: Request, error: NodeNotFoundError) -> Response:
        return problem_response(Kind.UNKNOWN_NODE, str(error))

    @app.exception_handler(UnknownJobError)
    def unknown_job(_: Request, error: UnknownJobError) -> Response:
        return problem_response(Kind.UNKNOWN_JOB, str(error))

    @app.exception_handler(AmbiguousJobError)
    def ambiguous(_: Request, error: AmbiguousJobError) -> Response:
        return problem_response(Kind.AMBIGUOUS_JOB, str(error), candidates=error.ids)

    @app.exception_handler(RequestValidationError)
    def malformed(_: Request, error: RequestValidationError) -> Response:
        items = [_item(e) for e in error.errors()]
        told = "; ".join(f"{item['key']}: {item['message']}" for item in items)
        return problem_response(Kind.REQUEST_INVALID, told, items)

    @app.exception_handler(HTTPException)
    def http(request: Request, error: HTTPException) -> Response:
        told = _UNTOLD.get(error.status_code, "").format(method=request.method)
        if not told or error.detail != HTTPStatus(error.status_code).phrase:
            told = str(error.detail)
        kind, headers = _kind_of(error.status_code), dict(error.headers or {})
        # FastAPI's 400 is a body that can't be read: one that isn't understood, as others.
        status = kind.status if kind is Kind.REQUEST_INVALID else error.status_code
        if kind is Kind.METHOD_NOT_ALLOWED:
            # Starlette names those of the first route on this path alone.
            headers["Allow"] = ", ".join(_methods(app, request))
        return problem_response(kind, told, headers=headers, status=status)

    @app.exception_handler(StoreUnavailableError)
    def without_store(_: Request, error: StoreUnavailableError) -> Response:
        logger.error("a request failed: %s", error)
        told = f"{error}; nothing was changed, try again in a moment"
        retry = {"Retry-After": str(STORE_RETRY_S)}
        return problem_response(Kind.STORE_UNAVAILABLE, told, headers=retry)

    @app.exception_handler(Exception)
    def unexpected(_: Request, error: Exception) -> Response:
        logger.error("a request failed", exc_info=error)
        told = f"the controller failed on this request ({type(error).__name__})"
        return problem_response(Kind.FAILED, told)


def _methods(app: FastAPI, request: Request) -> list[str]:
    """What the path of the request can be asked with."""
    found = [r for r in app.routes if r.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in found for method in getattr(route, "methods", None) or ()})


def _item(error: Mapping[str, Any]) -> dict[str, Any]:
    """What pydantic says of a value, without the value: it may be a secret."""
    key = ".".join(map(str, error["loc"]))
    message = str(error["msg"])
    filled = {"hint": "", "file": "", "value": "", "line": None, "remedy": ""}
    return {"key": key, "message": message, **filled}


_UNTOLD = {
    404: "there is nothing at this path; /openapi.json shows what there is",
    405: "{method} is not for this path",
}
"""What the framework says by no more than the status' name."""


def _kind_of(status: int) -> Kind:
    """Of an error that the framework gives by its status alone."""
    own = {404: Kind.NOT_FOUND, 405: Kind.METHOD_NOT_ALLOWED, 409: Kind.CONFLICT}
    if status in own:
        return own[status]
    if status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return Kind.REQUEST_INVALID
    return Kind.FAILED


_PIPELINE = {
    "key": "parallelism.pipeline",
    "message": "9 stages for a model of 8 layers",
    "hint": "make it 8 at most",
    "file": "job.yaml",
    "value": "9",
    "line": 4,
    "remedy": "make it 8 at most",
}
_EXAMPLES: dict[Kind, tuple[Any, ...]] = {
    Kind.TOKEN_MISSING: ("this needs a bearer token",),
    Kind.TOKEN_REFUSED: ("the token is not this controller's",),
    Kind.ROLE_TOO_LOW: ("the token 'grafana' has the role read; this needs submit",),
    Kind.NOT_YOUR_JOB: ("toy-1a2b3c is bob's; the token 'alice' may control only its own jobs",),
    Kind.NOT_FOUND: ("not Found",),
    Kind.UNKNOWN_JOB: ("there is no job 'gamma'",),
    Kind.UNKNOWN_NODE: ("there is no node '10.0.0.9'; there are 10.0.0.1, 10.0.0.2",),
    Kind.UNKNOWN_CONTROL: ("nothing was asked of toy-1a2b3c under the key 'none'",),
    Kind.UNKNOWN_TOKEN: ("there is no token 'ci'",),
    Kind.METHOD_NOT_ALLOWED: ("method Not Allowed",),
    Kind.AMBIGUOUS_JOB: (
        "'toy' could be toy-1a2b3c, toy-4d5e6f",
        (),
        ("toy-1a2b3c", "toy-4d5e6f"),
    ),
    Kind.CONFLICT: ("toy-1a2b3c was cancelled already; there is nothing to cancel",),
    Kind.TOO_LARGE: ("the body is above 1048576 bytes",),
    Kind.WRONG_MEDIA_TYPE: ("the body is text/plain: send it as application/json",),
    Kind.SPEC_INVALID: ("1 problem in the job file", (_PIPELINE,)),
    Kind.REQUEST_INVALID: (
        "body.to_step: Field required",
        (
            {
                "key": "body.to_step",
                "message": "Field required",
                "hint": "",
                "file": "",
                "value": "",
                "line": None,
                "remedy": "",
            },
        ),
    ),
    Kind.BODY_UNFIT: ("body.to_step: is a whole number beyond 9007199254740991",),
    Kind.TOO_MANY_REQUESTS: ("the token 'ci' asks more than 100 times a second: again in 1 s",),
    Kind.FAILED: ("the controller failed on this request (RuntimeError)",),
    Kind.STORE_UNAVAILABLE: (
        "the store can't be used for now: database is locked; nothing was changed, "
        "try again in a moment",
    ),
}
