"""Nodes, who holds them, and why one is left out."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from orchestrator.api.models.fields import example

_NODE: dict[str, Any] = {
    "node_id": "9f" * 28,
    "address": "10.0.0.1",
    "name": "node-1",
    "alive": True,
    "total": {"CPU": 8.0},
    "free": {"CPU": 4.0},
    "held_by": [{"job": "toy-1a2b3c", "slots": 4, "spare": False}],
    "quarantine": None,
}


class QuarantineShown(BaseModel):
    """Why a node is left out."""

    node_id: str
    address: str
    kind: str
    reason: str
    by: str
    job: str
    since: float
    until: float | None = Field(description="null: until it is released.")
    released_at: float | None


class HeldBy(BaseModel):
    """A job that is on a node."""

    job: str
    slots: int
    spare: bool


class Node(BaseModel):
    """A node."""

    model_config = example(_NODE)

    node_id: str
    address: str
    name: str
    alive: bool
    total: dict[str, float]
    free: dict[str, float]
    held_by: list[HeldBy]
    quarantine: QuarantineShown | None


class NodePage(BaseModel):
    """Nodes, by Ray's id."""

    model_config = example({"nodes": [_NODE], "next": None})

    nodes: list[Node]
    next: str | None = Field(description="`after` of the next page; null: this is the last.")
