"""The part of the HTTP API that shows nodes, and by which people leave one out or take it back.

Promises: ``{node}`` is an address, a host name, Ray's id or a unique beginning of it; a quarantine
is stored when it is answered, and keeps who asked for it and why.
"""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from orchestrator.api_controls import Line
from orchestrator.controller import Controller


class QuarantineRequest(BaseModel):
    """Leave a node out."""

    model_config = ConfigDict(extra="forbid")

    reason: Line = Field(min_length=1, max_length=1000)
    by: Line = Field("someone", max_length=200)
    seconds: float | None = Field(None, gt=0, le=366 * 86400)
    """None: until it is released."""


class ReleaseRequest(BaseModel):
    """Take a node back."""

    model_config = ConfigDict(extra="forbid")

    by: Line = Field("someone", max_length=200)


def add_nodes(app: FastAPI, controller: Controller) -> None:
    """The routes."""
    roll = controller.roll

    @app.get("/v1/nodes")
    def nodes() -> dict[str, Any]:
        return {"nodes": [view.to_json() for view in roll.view(time.time())]}

    @app.post("/v1/nodes/{node}/quarantine")
    def quarantine(node: str, body: QuarantineRequest) -> dict[str, Any]:
        view = roll.quarantine(node, body.reason, body.by, body.seconds, time.time())
        return view.to_json()

    @app.post("/v1/nodes/{node}/release")
    def release(node: str, body: ReleaseRequest | None = None) -> dict[str, Any]:
        return roll.release(node, (body or ReleaseRequest()).by, time.time()).to_json()
