"""Tokens, and whose they are."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from orchestrator.api.models.fields import example

_TOKEN: dict[str, Any] = {
    "id": "5f0c2a91",
    "name": "alice",
    "role": "submit",
    "state": "live",
    "created_at": 1796000000.0,
    "created_by": "home",
    "expires_at": 1803776000.0,
    "revoked_at": None,
}


class Token(BaseModel):
    """A token as it is listed: without its secret, which nobody has but its holder."""

    model_config = example(_TOKEN)

    id: str
    name: str
    role: Literal["read", "submit", "admin"]
    state: Literal["live", "expired", "revoked"]
    created_at: float
    created_by: str
    expires_at: float | None
    revoked_at: float | None


class NewToken(Token):
    """A new token, with its secret, which is told this once."""

    model_config = example({**_TOKEN, "token": "octavo_5f0c2a91_…"})

    token: str


class TokenPage(BaseModel):
    """Tokens, oldest first."""

    model_config = example({"tokens": [_TOKEN], "next": None})

    tokens: list[Token]
    next: str | None = Field(description="`after` of the next page; null: this is the last.")


class RevokedTokens(BaseModel):
    """Tokens that are none any more."""

    model_config = example({"revoked": [{**_TOKEN, "state": "revoked"}]})

    revoked: list[Token]


class WhoAmI(BaseModel):
    """Whose token this is."""

    model_config = example({"name": "alice", "role": "submit", "expires_at": 1803776000.0})

    name: str = Field(description="`home`: the token of the controller's own home.")
    role: Literal["read", "submit", "admin"]
    expires_at: float | None
