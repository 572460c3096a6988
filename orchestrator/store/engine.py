"""How the database is opened, and what opens a transaction of it.

Promises: a transaction of SQLite begins where it is opened, and waits for another writer no longer
than ``BUSY_MS``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

BUSY_MS = 10_000
"""Milliseconds that SQLite waits for another writer."""

Reads = Callable[[], AbstractContextManager[Connection]]
"""Opens a connection that nothing is written over."""


class Writes(Protocol):
    """Opens a transaction; ``job``: whose rows it may change."""

    def __call__(self, *job: str) -> AbstractContextManager[Connection]: ...


def open_engine(url: str) -> Engine:
    """Of a SQLAlchemy ``url``, whatever the database."""
    engine = sa.create_engine(url)
    if engine.dialect.name != "sqlite":
        return engine

    # pysqlite begins transactions late and on its own; these two put BEGIN where it belongs.
    @sa.event.listens_for(engine, "connect")
    def _connected(connection: Any, _record: Any) -> None:
        connection.isolation_level = None
        for pragma in ("journal_mode=WAL", f"busy_timeout={BUSY_MS}", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    @sa.event.listens_for(engine, "begin")
    def _begun(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    return engine
