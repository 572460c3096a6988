"""The part of the HTTP API by which people act on a running job.

Promises: 202 means stored: it will be done, or answered with why not, whatever restarts in
between; the same key again is the same control, and its answer says what became of it. 409
says why it can't be. ``by`` and ``reason`` are kept with the action, without control
characters.
"""

from __future__ import annotations

import re
import secrets
import time
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Path, Query, Response
from pydantic import BaseModel, Field

from orchestrator.access import Caller
from orchestrator.api.docs import Submitter, takes, told
from orchestrator.api.find import Found
from orchestrator.api.limits import KEY, PAGE, Count, Key, Limit, Line, Wait
from orchestrator.api.models.controls import ControlPage, ControlShown
from orchestrator.api.wait import Bell
from orchestrator.controller.controller import Controller
from orchestrator.recovery.controls import Control, ControlKind
from orchestrator.store.controls import UnknownControlError
from orchestrator.store.rows import JobRow

MOST_BATCHES = 10_000
"""Batches left out by one rollback."""


class Request(BaseModel):
    """What every control takes."""

    model_config = takes(key="c0ffee", by="alice", reason="the data were wrong")

    key: Key = ""
    """The client's, so that a request that is sent twice is done once; empty: made here."""
    by: Line = Field(default="", max_length=200)
    """Who asks, where an admin does; else it is the token's name."""
    reason: Line = Field(default="", max_length=1000)

    def control(self, caller: Caller, kind: ControlKind, **order: Any) -> Control:
        """As the control plane has it."""
        return Control(
            key=self.key or secrets.token_hex(8),
            kind=kind,
            by=caller.speaks_as(self.by) or "someone",
            time=time.time(),
            reason=self.reason,
            **order,
        )


class RollbackRequest(Request):
    """Back to an earlier step, leaving batches out from there on."""

    model_config = takes(to_step=80, skip=[90, 91], key="c0ffee")

    to_step: Count
    skip: list[Count] = Field(default=[], max_length=MOST_BATCHES)
    """Indices of batches, as step records have them."""


class PrecisionRequest(Request):
    """Layers to BF16 or back to FP8."""

    model_config = takes(layers=["layers.*.mlp.down"], to="bf16")

    layers: list[Annotated[str, Field(min_length=1, max_length=200)]] = Field(
        min_length=1, max_length=1000
    )
    """Patterns of linears' names, as ``layers.*.mlp.down``."""
    to: Literal["bf16", "fp8"]


class ExchangeRequest(Request):
    """What gradients cross the network in; auto: measured again, and the policy's from there."""

    model_config = takes(to="auto")

    to: Literal["fp8", "bf16", "auto"]


def add_controls(app: FastAPI, controller: Controller, found: Found, bell: Bell) -> None:
    """The routes."""
    store = controller.store

    def ask(row: JobRow, response: Response, control: Control) -> dict[str, Any]:
        asked = controller.ask(row.id, control)
        response.status_code = 202 if asked.state == "accepted" else 200
        return asked.to_json()

    order = told("controls", ControlShown, 404, 409, status=202, body=True)
    # A key that was answered already is answered with what became of it.
    order["responses"][200] = {"model": ControlShown}

    @app.post("/v1/jobs/{job}/rollback", **order)
    def rollback(
        body: RollbackRequest,
        response: Response,
        caller: Submitter,
        row: JobRow = Depends(found.controlled),
    ) -> dict[str, Any]:
        """Go back to the snapshot or checkpoint of a step, leaving batches out from there on."""
        skip = tuple(sorted(set(body.skip)))
        control = body.control(caller, "rollback", to_step=body.to_step, skip_batches=skip)
        return ask(row, response, control)

    @app.post("/v1/jobs/{job}/precision", **order)
    def precision(
        body: PrecisionRequest,
        response: Response,
        caller: Submitter,
        row: JobRow = Depends(found.controlled),
    ) -> dict[str, Any]:
        """Move layers to BF16, where they stay until asked back, or to FP8."""
        layers = tuple(dict.fromkeys(body.layers))
        control = body.control(caller, "precision", layers=layers, to=body.to)
        return ask(row, response, control)

    @app.post("/v1/jobs/{job}/exchange", **order)
    def exchange(
        body: ExchangeRequest,
        response: Response,
        caller: Submitter,
        row: JobRow = Depends(found.controlled),
    ) -> dict[str, Any]:
        """Change what gradients cross the network in."""
        return ask(row, response, body.control(caller, "exchange", to=body.to))

    @app.post("/v1/jobs/{job}/pause", **order)
    def pause(
        response: Response,
        caller: Submitter,
        row: JobRow = Depends(found.controlled),
        body: Request | None = None,
    ) -> dict[str, Any]:
        """Stop after a checkpoint and give the nodes back; resume goes on exactly there."""
        return ask(row, response, (body or Request()).control(caller, "pause"))

    @app.get("/v1/jobs/{job}/controls", **told("controls", ControlPage, 404, 409))
    def controls(
        row: JobRow = Depends(found.shown),
        after: Annotated[
            str | None, Query(pattern=KEY, description="`next` of the page before.")
        ] = None,
        limit: Limit = PAGE,
    ) -> dict[str, Any]:
        """What was asked of a job, oldest first."""
        rows = store.pages.controls(row.id, after, limit + 1)
        shown = [control.to_json() for control in rows[:limit]]
        return {"controls": shown, "next": shown[-1]["key"] if len(rows) > limit else None}

    @app.get("/v1/jobs/{job}/controls/{key}", **told("controls", ControlShown, 404, 409))
    async def control(
        key: Annotated[str, Path(max_length=200)],
        row: JobRow = Depends(found.shown),
        wait: Wait = 0,
    ) -> dict[str, Any]:
        """What became of a control; `wait` for it."""
        if not re.fullmatch(KEY, key):
            raise UnknownControlError(row.id, key)
        read = partial(store.controls.one, row.id, key)
        answered = await bell.held(wait, read, lambda asked: asked.state != "accepted")
        return answered.to_json()
