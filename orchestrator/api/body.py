"""Whether a JSON body is one that everything behind can hold.

Promises: nested no deeper than ``MOST_DEPTH``, so that nothing that walks it ends in a recursion;
whole numbers that JSON and the store can hold; no null characters, which no path and not every
database can, and no half ones, which no answer can. What is no JSON at all is not told here.
"""

from __future__ import annotations

import json

from orchestrator.api.limits import LARGEST

MOST_DEPTH = 64


def wrong_with(body: bytes) -> str:
    """What is wrong with a body, and where, for a person; empty for nothing."""
    try:
        whole = json.loads(body)
    except (ValueError, RecursionError) as error:
        return "the body is nested too deep" if isinstance(error, RecursionError) else ""
    level: list[tuple[str, object]] = [("body", whole)]
    for _ in range(MOST_DEPTH):
        following: list[tuple[str, object]] = []
        for place, value in level:
            if wrong := _wrong_value(value):
                return f"{place}: {wrong}"
            if isinstance(value, dict):
                if wrong := next(filter(None, map(_wrong_value, value)), ""):
                    return f"{place}: a key {wrong}"
                following += [(f"{place}.{key[:40]}", inner) for key, inner in value.items()]
            elif isinstance(value, list):
                following += [(f"{place}.{i}", inner) for i, inner in enumerate(value)]
        if not following:
            return ""
        level = following
    return f"the body is nested deeper than {MOST_DEPTH} levels"


def _wrong_value(value: object) -> str:
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"is a whole number beyond {LARGEST}"
    if isinstance(value, str) and "\0" in value:
        return "has a null character in it"
    if isinstance(value, str) and not _is_whole(value):
        return "has half a character in it"
    return ""


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
