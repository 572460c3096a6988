"""What ended a rank, in one line for a person. Pure.

Promises: equal causes of many ranks give equal lines, so that they can be told once; a line says
what happened rather than how Ray came to know of it.
"""

from __future__ import annotations

from launch.worker import RankFailedError

_NODE_DIED = "its node has died"


def in_one_line(error: BaseException) -> str:
    """``RuntimeError: …``; without the rank."""
    if isinstance(error, RankFailedError):
        return error.cause.strip().splitlines()[0]
    lines = str(error).strip().splitlines() or [""]
    told = lines[0]
    if any(_NODE_DIED in line for line in lines):
        told = _NODE_DIED
    elif "creation task" in lines[0]:
        # A traceback follows, and what was raised stands at its end.
        told = f"its worker could not start: {lines[-1].strip()}"
    return f"{type(error).__name__}: {told}".rstrip(": ")
