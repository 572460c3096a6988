"""Whether a JSON body is one that everything behind can hold.

Promises: nested no deeper than ``MOST_DEPTH``, so that nothing that walks it ends in a recursion;
whole numbers that JSON and the store can hold; no null characters, which no path and not every
database can, and no half ones, which no answer can. What is no JSON at all is not told here.
"""

from __future__ import annotations

import json

from orchestrator.api_limits import LARGEST

MOST_DEPTH = 64


def wrong_with(body: bytes) -> str:
    """What is wrong with a body, for a person; empty for nothing."""
    try:
        whole = json.loads(body)
    except (ValueError, RecursionError) as error:
        return "the body is nested too deep" if isinstance(error, RecursionError) else ""
    level = [whole]
    for _ in range(MOST_DEPTH):
        following: list[object] = []
        for value in level:
            if isinstance(value, int) and abs(value) > LARGEST:
                return f"the body has a whole number beyond {LARGEST}"
            if isinstance(value, str) and "\0" in value:
                return "the body has a null character in it"
            if isinstance(value, str) and not _is_whole(value):
                return "the body has half a character in it"
            if isinstance(value, dict):
                following += [*value, *value.values()]
            elif isinstance(value, list):
                following += value
        if not following:
            return ""
        level = following
    return f"the body is nested deeper than {MOST_DEPTH} levels"


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
