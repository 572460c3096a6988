"""One line of a rank's log: an object a line, with when, which attempt, rank and step.

    {"time": 1796000000.97, "level": "INFO", "attempt": 1, "rank": 0, "step": 12,
     "logger": "launch.training", "message": "command 1 before step 12: …"}

``level`` is a level of ``logging``, or STDOUT or STDERR for what Python code printed. A line that
is no such object is what something wrote past Python: a C library, or the process' last words
(faulthandler, an abort). It stands where it was written and is read as level OUTPUT.

Promises: what is written is strict JSON in one line, however odd the message; every line is read,
whatever it holds, and nothing of it is left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from monitoring.clock import utc

OUTPUT = "OUTPUT"
"""Level of a line that is no object."""
MOST_MESSAGE = 64 * 1024
"""Characters kept of one message."""

_BEGIN = '{"time": '


@dataclass(frozen=True, slots=True)
class LogLine:
    """What is known of one line."""

    message: str
    level: str = OUTPUT
    time: float | None = None
    """Seconds since the epoch; of a line that has none, when the one before it was written."""
    attempt: int | None = None
    rank: int | None = None
    step: int | None = None
    """Step that the rank was in; None before its first."""
    logger: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "time": self.time,
            "level": self.level,
            "attempt": self.attempt,
            "rank": self.rank,
            "step": self.step,
            "logger": self.logger,
            "message": self.message,
        }

    def text(self, told: Callable[[float], str] = utc) -> str:
        """``2026-11-30T06:00:00.970Z INFO step 12 launch.training: message``, its time as ``told``
        has it; of what is no object, the line itself."""
        if self.level == OUTPUT or self.time is None:
            return self.message
        at = told(self.time)
        step = "" if self.step is None else f" step {self.step}"
        logger = f" {self.logger}" if self.logger else ""
        return f"{at} {self.level}{step}{logger}: {self.message}"


def written(line: LogLine) -> bytes:
    """The line as it stands in a file, with its end; UTF-8."""
    message = line.message
    if len(message) > MOST_MESSAGE:
        left = len(message) - MOST_MESSAGE
        message = f"{message[:MOST_MESSAGE]}… ({left} characters more)"
    row = replace(line, message=message).to_json()
    return f"{json.dumps(row, ensure_ascii=False)}\n".encode("utf-8", "backslashreplace")


def read_line(text: str, before: LogLine) -> list[LogLine]:
    """What a line of a file says, without its end; ``before``: the line above it, whose time and
    step it takes where it is no object, or its rank and attempt alone.

    Two where an object stands behind what a C library wrote without an end.
    """
    at = text.find(_BEGIN)
    found = _parsed(text[at:]) if at >= 0 else None
    if found is None:
        return [replace(before, message=text, level=OUTPUT, logger="")]
    if at == 0:
        return [found]
    return [replace(before, message=text[:at], level=OUTPUT, logger=""), found]


def time_of(text: str) -> float | None:
    """When a line was written; None where it doesn't say."""
    at = text.find(_BEGIN)
    found = _parsed(text[at:]) if at >= 0 else None
    return found.time if found else None


def _parsed(text: str) -> LogLine | None:
    """None: no object of ours, or cut off."""
    try:
        row = json.loads(text)
        time = float(row["time"])
        if not math.isfinite(time):
            return None
        return LogLine(
            message=str(row["message"]),
            level=str(row["level"]),
            time=time,
            attempt=_whole(row["attempt"]),
            rank=_whole(row["rank"]),
            step=_whole(row["step"]),
            logger=str(row["logger"]),
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _whole(value: Any) -> int | None:
    return None if value is None else int(value)
