"""The store's tables. Bodies are JSON texts; what is searched or ordered by has a column.

Size: a step's record is some 500 bytes and 75 a tensor, whole for as long as the job is kept, so
that its detectors can be replayed; deflated, a third of that is left (36 tensors: 1.2 of 3.3 kB).
The statistics of its tensors have a column of their own, the last one: what is read of a long
job's steps without them costs as much as if there were none.
``contexts`` adds a row of some 80 bytes where a snapshot came to be held by all ranks, 8 bytes a
step with one every ten.
"""

from __future__ import annotations

import zlib

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    inspect,
    text,
)
from sqlalchemy.engine import Dialect, Engine
from sqlalchemy.schema import CreateColumn


class Deflated(TypeDecorator[str]):
    """A text that is stored deflated; one that an older Octavo stored plain is read as it is."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> bytes | None:
        return None if value is None else zlib.compress(value.encode(), 3)

    def process_result_value(self, value: bytes | str | None, dialect: Dialect) -> str | None:
        return zlib.decompress(value).decode() if isinstance(value, bytes) else value


metadata = MetaData()

# SQLite counts up only INTEGER keys; AUTOINCREMENT keeps it from reusing the newest ones.
_Id = BigInteger().with_variant(Integer, "sqlite")

jobs = Table(
    "jobs",
    metadata,
    Column("id", String(80), primary_key=True),
    Column("name", String(63), nullable=False, index=True),
    Column("state", String(16), nullable=False, index=True),
    Column("reason", Text, nullable=False, default=""),
    Column("priority", Integer, nullable=False),
    Column("file", Text, nullable=False),
    Column("spec", Text, nullable=False),
    Column("job_dir", Text, nullable=False),
    Column("submitted_at", Float, nullable=False),
    Column("started_at", Float),
    Column("ended_at", Float),
    Column("attempt", Integer, nullable=False, default=0),
    Column("placement_group", String(64), nullable=False, default=""),
    Column("nodes", Text, nullable=False, default="[]"),
    Column("step", Integer, nullable=False, default=-1),
    Column("timeline", Integer, nullable=False, default=0),
    Column("loss", Float),
    # Of an older Octavo; now in ``detector_states``: a row is written anew with every step.
    Column("detector_state", Text),
    # Added to stores that an older Octavo made, so they can be NULL or have a server's default.
    Column("submitted_by", String(200), nullable=False, server_default=""),
    Column("submit_key", String(64), unique=True),
    # When nodes were given to it last.
    Column("granted_at", Float),
    # The step that a way back leads to; NULL once a step has followed.
    Column("goes_on_at", Integer),
    # Lists are in this order, of all, of a user, of a state.
    Index("ix_jobs_submitted", "submitted_at", "id"),
    Index("ix_jobs_by_submitted", "submitted_by", "submitted_at", "id"),
    Index("ix_jobs_state_submitted", "state", "submitted_at", "id"),
    # When each user was given nodes last.
    Index("ix_jobs_by_granted", "submitted_by", "granted_at"),
)

detector_states = Table(
    "detector_states",
    metadata,
    Column("job", ForeignKey("jobs.id"), primary_key=True),
    Column("body", Text, nullable=False),
)

attempts = Table(
    "attempts",
    metadata,
    Column("job", ForeignKey("jobs.id"), primary_key=True),
    Column("attempt", Integer, primary_key=True),
    Column("reason", Text, nullable=False),
    Column("started_at", Float, nullable=False),
    Column("sequence", Integer, nullable=False, default=0),
    # Where its ranks run, as ``jobs.nodes``; empty in those of an older Octavo.
    Column("nodes", Text, nullable=False, server_default=""),
)

accusations = Table(
    "accusations",
    metadata,
    Column("id", _Id, primary_key=True, autoincrement=True),
    Column("job", ForeignKey("jobs.id"), nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("node_id", String(64), nullable=False),
    Column("address", String(255), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("message", Text, nullable=False),
    Column("time", Float, nullable=False, index=True),
    Column("rehearsed", Integer, nullable=False, default=0),
    Column("check", String(32), nullable=False, server_default="unknown"),
    # What an attempt shows of a node counts once, however often it is looked at.
    UniqueConstraint("job", "attempt", "node_id", "kind"),
    sqlite_autoincrement=True,
)

quarantines = Table(
    "quarantines",
    metadata,
    Column("id", _Id, primary_key=True, autoincrement=True),
    Column("node_id", String(64), nullable=False),
    Column("address", String(255), nullable=False),
    Column("kind", String(16), nullable=False),
    Column("reason", Text, nullable=False),
    Column("by", String(200), nullable=False),
    # Empty: no job showed it. No foreign key, for that reason.
    Column("job", String(80), nullable=False),
    Column("since", Float, nullable=False),
    # NULL: until somebody releases it.
    Column("until", Float, index=True),
    Column("released_at", Float),
    sqlite_autoincrement=True,
)

controls = Table(
    "controls",
    metadata,
    Column("id", _Id, primary_key=True, autoincrement=True),
    Column("job", ForeignKey("jobs.id"), nullable=False),
    Column("key", String(64), nullable=False),
    Column("state", String(16), nullable=False, index=True),
    Column("body", Text, nullable=False),
    Column("message", Text, nullable=False, default=""),
    Column("step", Integer),
    Column("answered_at", Float),
    UniqueConstraint("job", "key"),
    sqlite_autoincrement=True,
)

webhooks = Table(
    "webhooks",
    metadata,
    Column("id", _Id, primary_key=True, autoincrement=True),
    Column("job", ForeignKey("jobs.id"), nullable=False),
    Column("body", Text, nullable=False),
    Column("tries", Integer, nullable=False, default=0),
    # NULL: delivered or given up.
    Column("due_at", Float, index=True),
    sqlite_autoincrement=True,
)


def add_missing(engine: Engine) -> None:
    """Bring the tables of a store that an older Octavo made up to these: columns and indexes."""
    inspector = inspect(engine)
    with engine.begin() as db:
        for table in metadata.sorted_tables:
            have = {column["name"] for column in inspector.get_columns(table.name)}
            for column in table.columns:
                if column.name in have:
                    continue
                # SQLite adds no column with a constraint; the index below is one.
                plain = Column(
                    column.name,
                    column.type,
                    nullable=column.nullable,
                    server_default=column.server_default,
                )
                spelt = CreateColumn(plain).compile(dialect=engine.dialect)
                db.execute(text(f"ALTER TABLE {table.name} ADD COLUMN {spelt}"))
                if column.unique:
                    name = f"ux_{table.name}_{column.name}"
                    index = f"CREATE UNIQUE INDEX {name} ON {table.name} ({column.name})"
                    db.execute(text(index))
        for table in metadata.sorted_tables:
            for wanted in table.indexes:
                wanted.create(db, checkfirst=True)


def _records(name: str, *columns: Column | Index) -> Table:
    return Table(
        name,
        metadata,
        Column("id", _Id, primary_key=True, autoincrement=True),
        Column("job", ForeignKey("jobs.id"), nullable=False),
        Column("attempt", Integer, nullable=False),
        *columns,
        Index(f"ix_{name}_job_id", "job", "id"),
        sqlite_autoincrement=True,
    )


events = _records(
    "events",
    Column("time", Float, nullable=False),
    Column("kind", String(64), nullable=False),
    Column("message", Text, nullable=False),
    Column("detail", Text, nullable=False),
)

incidents = _records(
    "incidents",
    Column("timeline", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    Column("kind", String(64), nullable=False),
    Column("body", Text, nullable=False),
)

actions = _records(
    "actions",
    Column("timeline", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    Column("kind", String(64), nullable=False),
    Column("body", Text, nullable=False),
)

contexts = _records(
    "contexts",
    Column("timeline", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    Column("held", Text, nullable=False, default=""),
    Column("decides", Integer, nullable=False, default=1),
    Column("ended", Integer, nullable=False, server_default="0"),
)

steps = _records(
    "steps",
    Column("timeline", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    Column("drills", Text, nullable=False, default=""),
    # NULL: of an older Octavo, which kept it in the body alone.
    Column("batch", _Id),
    Column("body", Deflated, nullable=False),
    # NULL: of an older Octavo, which kept them in the body.
    Column("tensors", Deflated),
    Index("ix_steps_place", "job", "attempt", "timeline", "step"),
)
