"""Lines of ranks' logs."""

from __future__ import annotations

from pydantic import BaseModel, Field

from orchestrator.api.models.fields import FOLLOWED, State, example

_LOG_LINE = {
    "time": 1796000040.5,
    "level": "INFO",
    "attempt": 1,
    "rank": 0,
    "step": 119,
    "logger": "launch.training",
    "message": "ready",
}


class LogLineShown(BaseModel):
    """One line of a rank's log."""

    model_config = example(_LOG_LINE)

    time: float | None = Field(description="Of a line that has none, that of the line before.")
    level: str = Field(
        description="A level of Python's logging; STDOUT, STDERR: printed; OUTPUT: past Python."
    )
    attempt: int | None
    rank: int | None
    step: int | None
    logger: str
    message: str


class LogPiece(BaseModel):
    """Lines of a rank's log."""

    model_config = example(
        {
            "lines": [_LOG_LINE],
            "text": "2026-11-30T06:00:40.500Z INFO step 119 launch.training: ready\n",
            "offset": 4096,
            "attempt": 1,
            "rank": 0,
            "exists": True,
            **FOLLOWED,
        }
    )

    lines: list[LogLineShown]
    text: str = Field(description="The same lines as text, their times in UTC.")
    offset: int = Field(description="Place at which the next piece begins.")
    attempt: int
    rank: int
    exists: bool = Field(description="The rank has written a log in this attempt.")
    state: State
    settled: bool
