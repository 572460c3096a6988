from __future__ import annotations

import pytest

from launch.rank_errors import in_one_line
from launch.worker import RankFailedError


class ActorDiedError(Exception):
    """Ray's, with the texts that it has."""


DIED = "The actor died unexpectedly before finishing this task."
LOST_NODE = f"""{DIED}
\tclass_name: Worker
\tactor_id: 1797a7038e78c00370ec1a1601000000
\tip: 10.66.0.2
The actor died because its node has died. Node Id: 8e9d14bc
\tthe actor's node was terminated unexpectedly: health check failed"""
NOT_CREATED = """The actor died because of an error raised in its creation task, Worker.__init__()
  File "launch/worker.py", line 86, in __init__
    run_politely(import_ahead)
ModuleNotFoundError: No module named 'mine'
"""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ActorDiedError(f"{DIED}\n\tpid: 12"), f"ActorDiedError: {DIED}"),
        (ActorDiedError(LOST_NODE), "ActorDiedError: its node has died"),
        (
            ActorDiedError(NOT_CREATED),
            "ActorDiedError: its worker could not start: "
            "ModuleNotFoundError: No module named 'mine'",
        ),
        (RankFailedError(3, 7, "ValueError: no\nsecond line"), "ValueError: no"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_an_end_is_told_by_what_caused_it(error: BaseException, line: str) -> None:
    assert in_one_line(error) == line
