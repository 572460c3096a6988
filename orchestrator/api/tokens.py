"""The part of the HTTP API by which admins say who may use it, and for what.

Promises: a token is told once, in the answer that makes it, which no cache may keep; a change is in
force when it is answered.
"""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Path, Query, Response
from pydantic import BaseModel, Field

from orchestrator.access import NAME, Role
from orchestrator.api.docs import Admin, Reader, takes, told
from orchestrator.api.limits import PAGE, Limit
from orchestrator.api.models.tokens import NewToken, RevokedTokens, TokenPage, WhoAmI
from orchestrator.store.database import Store
from orchestrator.store.tokens import TokenRow

LONGEST_S = 100 * 366 * 86400.0

Lifetime = Annotated[float | None, Field(gt=0, le=LONGEST_S, allow_inf_nan=False)]
"""Seconds that a token is accepted; None: until it is revoked."""
TokenWord = Annotated[str, Path(max_length=100, description="Name or id.", examples=["alice"])]


class TokenRequest(BaseModel):
    """A token to be made."""

    model_config = takes(name="ci", role="submit", seconds=7776000)

    name: str = Field(pattern=NAME)
    """Whose it is: it owns the jobs that it submits."""
    role: Literal["read", "submit", "admin"]
    seconds: Lifetime = None


class RotationRequest(BaseModel):
    """Another token in place of the one there is."""

    model_config = takes(seconds=7776000, overlap_s=3600)

    seconds: Lifetime = None
    """Seconds that it is accepted; none: as long as the one before was made for."""
    overlap_s: float = Field(0.0, ge=0, le=30 * 86400, allow_inf_nan=False)
    """Seconds that the ones before are accepted still."""


def add_tokens(app: FastAPI, store: Store) -> None:
    """The routes."""
    records = store.tokens

    @app.get("/v1/whoami", **told("tokens", WhoAmI))
    def whoami(caller: Reader) -> dict[str, Any]:
        """Whose token this is, and what it may do."""
        return {
            "name": caller.name,
            "role": caller.role.value,
            "expires_at": caller.expires_at,
        }

    @app.get("/v1/tokens", **told("tokens", TokenPage, 404))
    def tokens(
        _: Admin,
        after: Annotated[
            str | None, Query(pattern="^[0-9a-f]{8}$", description="`next` of the page before.")
        ] = None,
        limit: Limit = PAGE,
        ended: Annotated[bool, Query(description="Those too that are in force no more.")] = False,
    ) -> dict[str, Any]:
        """Tokens, oldest first, without their secrets."""
        now = time.time()
        rows = records.page(after, limit + 1, now=now, ended=ended)
        shown = [row.to_json(now) for row in rows[:limit]]
        return {"tokens": shown, "next": shown[-1]["id"] if len(rows) > limit else None}

    @app.post("/v1/tokens", **told("tokens", NewToken, 409, status=201, body=True))
    def create(body: TokenRequest, caller: Admin, response: Response) -> dict[str, Any]:
        """Make a token; this answer alone has its secret."""
        now = time.time()
        ends = None if body.seconds is None else now + body.seconds
        made = records.create(body.name, Role(body.role), caller.name, now, ends)
        return _once(made, now, response)

    @app.post("/v1/tokens/{token}/rotate", **told("tokens", NewToken, 404, status=201, body=True))
    def rotate(
        token: TokenWord, caller: Admin, response: Response, body: RotationRequest | None = None
    ) -> dict[str, Any]:
        """Another secret under the same name and role; the ones before end."""
        now, asked = time.time(), body or RotationRequest()
        ends = None if asked.seconds is None else now + asked.seconds
        made = records.rotate(token, caller.name, now, ends, asked.overlap_s)
        return _once(made, now, response)

    @app.post("/v1/tokens/{token}/revoke", **told("tokens", RevokedTokens, 404, body=True))
    def revoke(token: TokenWord, _: Admin) -> dict[str, Any]:
        """End a token at once, by its name or its id."""
        now = time.time()
        return {"revoked": [row.to_json(now) for row in records.revoke(token, now)]}


def _once(made: tuple[TokenRow, str], now: float, response: Response) -> dict[str, Any]:
    """A new token with its secret."""
    row, token = made
    response.headers["Cache-Control"] = "no-store"
    return {**row.to_json(now), "token": token}
