"""What the parameters of the HTTP API can be, so that nothing that comes can break what is behind.

Promises: every number fits into a column of the store and into JSON; every text that is shown on
terminals is one line without control characters; every page and every wait has a bound.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query
from pydantic import AfterValidator, Field

LARGEST = 2**53 - 1
"""What JSON can hold exactly."""
PAGE = 500
MOST_ROWS = 5000
LONGEST_WAIT_S = 30.0


def on_one_line(text: str) -> str:
    """Without control characters: it is shown on terminals."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


JobWord = Annotated[
    str,
    Path(
        max_length=200,
        description="Id, name or unique beginning of an id.",
        examples=["toy-1a2b3c"],
    ),
]
After = Annotated[int, Query(ge=0, le=LARGEST, description="`next` of the page before.")]
Limit = Annotated[int, Query(ge=1, le=MOST_ROWS, description="Rows of this page at most.")]
Wait = Annotated[
    float,
    Query(
        ge=0,
        le=LONGEST_WAIT_S,
        allow_inf_nan=False,
        description="Seconds that the answer may be held back until there is something new.",
    ),
]
Line = Annotated[str, AfterValidator(on_one_line)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
KEY = r"^[A-Za-z0-9._:-]{0,64}$"
Key = Annotated[
    str,
    Field(
        pattern=KEY,
        description="Yours: what is sent twice under it is done once. Empty: none.",
        examples=["c0ffee"],
    ),
]
