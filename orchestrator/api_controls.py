"""The part of the HTTP API by which people act on a running job.

Promises: 202 means stored: it will be done, or answered with why not, whatever restarts in
between; the same key again is the same control, and its answer says what became of it. 409
says why it can't be. ``by`` and ``reason`` are kept with the action, without control
characters.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Response
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from orchestrator.controller import Controller
from orchestrator.controls import Control, ControlKind
from orchestrator.store_controls import ControlRow
from orchestrator.store_rows import JobRow

MOST_BATCHES = 10_000
"""Batches left out by one rollback."""
LARGEST = 2**53 - 1
"""Of a step or batch: what JSON can hold exactly."""

Find = Callable[[str], JobRow]


def _on_one_line(text: str) -> str:
    """Without control characters: it is shown on terminals."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


LONGEST_WAIT_S = 30.0
Wait = Annotated[float, Query(ge=0, le=LONGEST_WAIT_S)]
"""Seconds that an answer may be held back until there is something new."""

Line = Annotated[str, AfterValidator(_on_one_line)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]


class Request(BaseModel):
    """What every control takes."""

    model_config = ConfigDict(extra="forbid")

    key: str = Field(default="", pattern=r"^[A-Za-z0-9._:-]{0,64}$")
    """The client's, so that a request that is sent twice is done once; empty: made here."""
    by: Line = Field(default="someone", max_length=200)
    reason: Line = Field(default="", max_length=1000)

    def control(self, kind: ControlKind, **order: Any) -> Control:
        """As the control plane has it."""
        return Control(
            key=self.key or secrets.token_hex(8),
            kind=kind,
            by=self.by or "someone",
            time=time.time(),
            reason=self.reason,
            **order,
        )


class RollbackRequest(Request):
    """Back to an earlier step, leaving batches out from there on."""

    to_step: Count
    skip: list[Count] = Field(default=[], max_length=MOST_BATCHES)
    """Indices of batches, as step records have them."""


class PrecisionRequest(Request):
    """Layers to BF16 or back to FP8."""

    layers: list[Annotated[str, Field(min_length=1, max_length=200)]] = Field(
        min_length=1, max_length=1000
    )
    """Patterns of linears' names, as ``layers.*.mlp.down``."""
    to: Literal["bf16", "fp8"]


class ExchangeRequest(Request):
    """What gradients cross the network in; auto: measured again, and the policy's from there."""

    to: Literal["fp8", "bf16", "auto"]


def add_controls(app: FastAPI, controller: Controller, find: Find) -> None:
    """The routes; ``find`` is how a job is named."""

    def ask(job: str, response: Response, control: Control) -> dict[str, Any]:
        row = controller.ask(find(job).id, control)
        response.status_code = 202 if row.state == "accepted" else 200
        return row.to_json()

    @app.post("/v1/jobs/{job}/rollback", status_code=202)
    def rollback(job: str, body: RollbackRequest, response: Response) -> dict[str, Any]:
        skip = tuple(sorted(set(body.skip)))
        control = body.control("rollback", to_step=body.to_step, skip_batches=skip)
        return ask(job, response, control)

    @app.post("/v1/jobs/{job}/precision", status_code=202)
    def precision(job: str, body: PrecisionRequest, response: Response) -> dict[str, Any]:
        layers = tuple(dict.fromkeys(body.layers))
        return ask(job, response, body.control("precision", layers=layers, to=body.to))

    @app.post("/v1/jobs/{job}/exchange", status_code=202)
    def exchange(job: str, body: ExchangeRequest, response: Response) -> dict[str, Any]:
        return ask(job, response, body.control("exchange", to=body.to))

    @app.post("/v1/jobs/{job}/pause", status_code=202)
    def pause(job: str, response: Response, body: Request | None = None) -> dict[str, Any]:
        return ask(job, response, (body or Request()).control("pause"))

    @app.get("/v1/jobs/{job}/controls")
    def controls(job: str) -> dict[str, Any]:
        return {"controls": [row.to_json() for row in controller.store.controls(find(job).id)]}

    @app.get("/v1/jobs/{job}/controls/{key}")
    def control(job: str, key: str, wait: Wait = 0) -> dict[str, Any]:
        return _held(controller, find(job).id, key, wait).to_json()


def _held(controller: Controller, job: str, key: str, wait: float) -> ControlRow:
    """The control, as soon as it is answered or the time is over."""
    deadline = time.monotonic() + wait
    while True:
        seen = controller.changes()
        row = controller.store.control(job, key)
        left = deadline - time.monotonic()
        if row.state != "accepted" or left <= 0:
            return row
        controller.wait_for_change(seen, left)
