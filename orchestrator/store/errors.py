"""What is a passing trouble of the store, and what is a fault of ours.

Promises: a database that is locked, full, unreachable or out of reach raises
``StoreUnavailableError``, after which nothing was stored that isn't told again safely; whatever
else it raises is raised as it is.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import OperationalError

_PASSING = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
    }
)
"""Of SQLite's errors those that its surroundings cause; a missing table is none of them."""


class StoreUnavailableError(ConnectionError):
    """The store can't be used for now: somebody holds it, its disk is full, it is away."""


@contextmanager
def passing_trouble() -> Iterator[None]:
    """Raises ``StoreUnavailableError`` in place of what the database says of its surroundings."""
    try:
        yield
    except OperationalError as error:
        # The low byte is the error, the others tell which kind of it.
        code = getattr(error.orig, "sqlite_errorcode", 0) & 0xFF
        if isinstance(error.orig, sqlite3.Error) and code not in _PASSING:
            raise
        raise StoreUnavailableError(f"the store can't be used for now: {error.orig}") from error
