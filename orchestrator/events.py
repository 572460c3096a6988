"""What happened to a job, in a sentence: before it has a time (``Notice``), and with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Notice:
    """One event, before it has a time."""

    kind: str
    """One word, as ``attempt_started``."""
    message: str
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EventDraft:
    """Something that happened to a job, told in one sentence; the store numbers it."""

    kind: str
    """One word, as ``attempt_started``, ``rolled_back``, ``checkpoint_written``."""
    time: float
    message: str
    detail: Mapping[str, Any]
