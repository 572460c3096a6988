"""The part of the HTTP API that shows nodes, and by which people leave one out or take it back.

Promises: ``{node}`` is an address, a host name, Ray's id or a unique beginning of it; a quarantine
is stored when it is answered, and keeps who asked for it and why.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import FastAPI, Path, Query
from pydantic import BaseModel, Field

from orchestrator.api.docs import Admin, Reader, takes, told
from orchestrator.api.limits import PAGE, Limit, Line
from orchestrator.api.models.nodes import Node, NodePage
from orchestrator.controller.controller import Controller

NodeWord = Annotated[
    str,
    Path(
        max_length=300,
        description="Address, host name, Ray's id or a unique beginning of it.",
        examples=["10.0.0.1"],
    ),
]


class QuarantineRequest(BaseModel):
    """Leave a node out."""

    model_config = takes(reason="its fan fails", by="alice", seconds=7200)

    reason: Line = Field(min_length=1, max_length=1000)
    by: Line = Field("", max_length=200)
    seconds: float | None = Field(None, gt=0, le=366 * 86400, allow_inf_nan=False)
    """None: until it is released."""


class ReleaseRequest(BaseModel):
    """Take a node back."""

    model_config = takes(by="alice")

    by: Line = Field("", max_length=200)


def add_nodes(app: FastAPI, controller: Controller) -> None:
    """The routes."""
    roll = controller.roll

    @app.get("/v1/nodes", **told("nodes", NodePage))
    def nodes(
        _: Reader,
        after: Annotated[
            str | None, Query(max_length=200, description="`next` of the page before.")
        ] = None,
        limit: Limit = PAGE,
    ) -> dict[str, Any]:
        """All nodes that live, and those that are quarantined and don't."""
        views = sorted(roll.view(time.time()), key=lambda view: view.node_id)
        later = [view for view in views if after is None or view.node_id > after]
        shown = [view.to_json() for view in later[:limit]]
        return {"nodes": shown, "next": shown[-1]["node_id"] if len(later) > limit else None}

    @app.post("/v1/nodes/{node}/quarantine", **told("nodes", Node, 404, body=True))
    def quarantine(node: NodeWord, body: QuarantineRequest, caller: Admin) -> dict[str, Any]:
        """Leave a node out; jobs that are on it go on there until they start anew."""
        by = caller.speaks_as(body.by) or "someone"
        # Of control characters alone nothing is left to show.
        reason = body.reason or "no reason given"
        return roll.quarantine(node, reason, by, body.seconds, time.time()).to_json()

    @app.post("/v1/nodes/{node}/release", **told("nodes", Node, 404, body=True))
    def release(
        node: NodeWord, caller: Admin, body: ReleaseRequest | None = None
    ) -> dict[str, Any]:
        """Take a quarantined node back."""
        by = caller.speaks_as((body or ReleaseRequest()).by) or "someone"
        return roll.release(node, by, time.time()).to_json()
