"""How the routes of the HTTP API are told in its OpenAPI description.

Promises: every route says what it answers with, its errors and the role that it needs; what it
needs is asked by the same declaration that tells it (``told``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from fastapi import FastAPI, Request, Security
from fastapi.openapi.utils import get_openapi
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer, SecurityScopes
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

from orchestrator.access import Caller, Role
from orchestrator.api.problems import Kind, ProblemDetails, RefusalError, refusals

TAGS = [
    {"name": "jobs", "description": "Submit jobs, look at them, end and resume them."},
    {"name": "controls", "description": "What people ask of a running job, and its answer."},
    {"name": "streams", "description": "Server-sent events, which go on from the id seen last."},
    {"name": "nodes", "description": "Who holds which node, and which are left out."},
    {"name": "tokens", "description": "Who may use this API, and for what."},
    {"name": "service", "description": "The controller itself."},
]
ABOUT = """\
Lists come in pages: `limit` at most, and `next` is the `after` of the page that follows. `{job}`
is an id, a name or a unique beginning of an id. Errors are `application/problem+json` (RFC 9457),
with a `type` for programs. A token that asks too often is refused with 429, whose `Retry-After`
says when to come again.
"""

_bearer = HTTPBearer(
    scheme_name="bearer",
    auto_error=False,
    description="`octavo token create NAME --role read|submit|admin`, or the home's own token.",
)


def caller_with(
    needed: SecurityScopes,
    request: Request,
    _: Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)],
) -> Caller:
    """Who asks, as the guard found out; refused where their role isn't enough."""
    caller: Caller = request.scope["caller"]
    for word in needed.scopes:
        if not caller.role.includes(Role(word)):
            told = f"the token {caller.name!r} has the role {caller.role.value}; this needs {word}"
            raise RefusalError(Kind.ROLE_TOO_LOW, told)
    return caller


Reader = Annotated[Caller, Security(caller_with, scopes=[Role.READ.value])]
Submitter = Annotated[Caller, Security(caller_with, scopes=[Role.SUBMIT.value])]
Admin = Annotated[Caller, Security(caller_with, scopes=[Role.ADMIN.value])]


def takes(**example: Any) -> ConfigDict:
    """Of a request's model: keys that it hasn't are refused; it is told with an example, and its
    fields with their docstrings."""
    return ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        json_schema_extra={"examples": [example]},
    )


def told(
    tag: str,
    model: type[BaseModel] | None,
    *errors: int,
    status: int = 200,
    body: bool = False,
    example: tuple[str, str] | None = None,
) -> dict[str, Any]:
    """Arguments of a route's decorator.

    ``model``: of its JSON answer; None: it answers in another form, of which ``example`` is the
    media type and a piece. ``errors``: beside those that every route has; ``body``: it takes one.
    """
    common = (401, 403, 422, 429, 500, 503)
    every = sorted({*common, *errors, *((413, 415) if body else ())})
    responses = refusals(*every)
    if model is not None:
        responses[status] = {"model": model}
    if example is not None:
        responses[status] = {"content": {example[0]: {"example": example[1]}}}
    return {
        "tags": [tag],
        "responses": responses,
        "response_model": None,
        "status_code": status,
    }


def describe(app: FastAPI) -> None:
    """Give ``app`` its OpenAPI description, with what errors look like."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title,
                version=app.version,
                description=ABOUT,
                routes=app.routes,
                tags=TAGS,
            )
            _, found = models_json_schema(
                [(ProblemDetails, "serialization")], ref_template="#/components/schemas/{model}"
            )
            schemas = schema["components"]["schemas"]
            schemas |= found["$defs"]
            for model in _answers(app):
                # FastAPI leaves out what is null, which an answer has all the same.
                extra = model.model_config.get("json_schema_extra")
                if isinstance(extra, dict):
                    schemas[model.__name__]["examples"] = extra["examples"]
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _answers(app: FastAPI) -> Iterator[type[BaseModel]]:
    for route in app.routes:
        for answer in getattr(route, "responses", {}).values():
            if "model" in answer:
                yield answer["model"]
