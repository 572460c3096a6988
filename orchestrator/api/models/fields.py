"""Kinds of fields that several answers have, and how an answer is told with an example."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict

Number = float | Literal["nan", "inf", "-inf"]
State = Literal[
    "queued",
    "starting",
    "running",
    "recovering",
    "paused",
    "cancelling",
    "succeeded",
    "failed",
    "cancelled",
]

FOLLOWED = {"state": "running", "settled": False}
"""Of an example of what grows while a job runs."""


def example(*values: dict[str, Any]) -> ConfigDict:
    """Of a model that is told with these."""
    return ConfigDict(json_schema_extra={"examples": list(values)})
