"""One transaction for all who wait to write: a commit waits for the disk, however little it holds.

Promises: what a caller writes is committed when its call returns, or nothing of it is and the call
raises; who raises spoils nobody else's; writes of one transaction are in the order of the calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sqlalchemy.engine import Connection

from orchestrator.store.engine import Writes
from orchestrator.store.errors import StoreUnavailableError, passing_trouble

Result = TypeVar("Result")


@dataclass(eq=False)
class _Call:
    job: str
    work: Callable[[Connection], Any]
    over: bool = False
    result: Any = None
    error: BaseException | None = field(default=None)


class GroupCommit:
    """Of one store; ``writing`` is held by whoever writes to it."""

    def __init__(self, writing: AbstractContextManager[Any], write: Writes) -> None:
        self._writing = writing
        self._write = write
        self._adding = threading.Lock()
        self._waiting: list[_Call] = []

    def do(self, job: str, work: Callable[[Connection], Result]) -> Result:
        """``work`` in a transaction, with all that waits for one at the same time."""
        mine = _Call(job, work)
        with self._adding:
            self._waiting.append(mine)
        with self._writing:
            # Whoever had the store before may have done it.
            if not mine.over:
                with self._adding:
                    calls, self._waiting = self._waiting, []
                self._all(calls)
        if mine.error is not None:
            raise mine.error
        return mine.result

    def _all(self, calls: list[_Call]) -> None:
        try:
            with self._write(*(call.job for call in calls)) as db:
                for call in calls:
                    try:
                        with passing_trouble(), db.begin_nested():
                            call.result = call.work(db)
                    except StoreUnavailableError:
                        # Everybody's: the database may have undone what came before.
                        raise
                    except Exception as error:  # noqa: BLE001 - the caller's, who gets it
                        call.error = error
        except BaseException as error:
            for call in calls:
                call.error = call.error or error
            if not isinstance(error, Exception):
                raise
        finally:
            for call in calls:
                call.over = True
