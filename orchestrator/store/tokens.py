"""Tokens of the HTTP API, as stored: their hashes, whose they are and what they may do.

Promises: a token itself is never stored, and told once, to who made it; what is revoked or expired
stays listed; a name is of one role at a time. The controller is the store's only writer, so they
are kept in memory: asking whose a token is reads no database.
"""

from __future__ import annotations

import re
import secrets
import threading
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from orchestrator.access import (
    HOME,
    NAME,
    Caller,
    Role,
    new_token,
    same_hash,
    token_hash,
    token_id,
)
from orchestrator.store.engine import Reads, Writes
from orchestrator.store.tables import metadata

tokens = sa.Table(
    "tokens",
    metadata,
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=True),
    sa.Column("id", sa.String(8), nullable=False, unique=True),
    sa.Column("name", sa.String(63), nullable=False, index=True),
    sa.Column("role", sa.String(16), nullable=False),
    sa.Column("hash", sa.String(64), nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    sa.Column("created_by", sa.String(200), nullable=False),
    # NULL: never.
    sa.Column("expires_at", sa.Float),
    sa.Column("revoked_at", sa.Float),
    sqlite_autoincrement=True,
)


class UnknownTokenError(KeyError):
    """No token in force has this name."""

    def __str__(self) -> str:
        return f"there is no token {self.args[0]!r} in force"


class TokenConflictError(ValueError):
    """A token of that name is in force, or the name is taken otherwise; the text says which."""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A token as stored, without its hash. Times are seconds since the epoch."""

    id: str
    name: str
    role: Role
    created_at: float
    created_by: str
    expires_at: float | None
    revoked_at: float | None

    def state(self, now: float) -> str:
        """``live``, ``expired`` or ``revoked``."""
        if self.revoked_at is not None and self.revoked_at <= now:
            return "revoked"
        if self.expires_at is not None and self.expires_at <= now:
            return "expired"
        return "live"

    def to_json(self, now: float) -> dict[str, Any]:
        """As the API shows it."""
        return {
            "id": self.id,
            "name": self.name,
            "role": self.role.value,
            "state": self.state(now),
            "created_at": self.created_at,
            "created_by": self.created_by,
            "expires_at": self.expires_at,
            "revoked_at": self.revoked_at,
        }


class TokenRecords:
    """The tokens of one store; ``write`` and ``read`` open transactions of it."""

    def __init__(self, write: Writes, read: Reads) -> None:
        self._write = write
        self._read = read
        self._lock = threading.Lock()
        self._known: dict[str, tuple[TokenRow, str]] | None = None
        """All, with their hashes, by id; None: not read since the last change."""

    def caller(self, token: str, now: float) -> Caller | str:
        """Whose ``token`` this is, or why it isn't accepted; "" where nobody knows it."""
        known = self._live().get(token_id(token) or "")
        if known is None or not same_hash(known[1], token_hash(token)):
            return ""
        row = known[0]
        match row.state(now):
            case "live":
                until = [t for t in (row.expires_at, row.revoked_at) if t is not None]
                return Caller(row.name, row.role, row.id, min(until) if until else None)
            case ended:
                return f"the token {row.name!r} is {ended}: an admin makes another one"

    def create(
        self, name: str, role: Role, by: str, now: float, expires_at: float | None
    ) -> tuple[TokenRow, str]:
        """Make a token; itself as second. Raises ``TokenConflictError`` for a name in use."""
        with self._write() as db:
            if name == HOME:
                told = f"{HOME!r} is the token of the controller's own home: take another name"
                raise TokenConflictError(told)
            if _in_force(db, name, now):
                told = f"there is a token {name!r}: rotate or revoke it, or take another name"
                raise TokenConflictError(told)
            made = _add(db, name, role, by, now, expires_at)
        self._forget()
        return made

    def rotate(
        self, name: str, by: str, now: float, expires_at: float | None, overlap_s: float
    ) -> tuple[TokenRow, str]:
        """Make another token of that name and role; those in force are for ``overlap_s`` more.

        ``expires_at`` None: it is accepted for as long as the newest before was made for, so that
        no rotation makes one that lasts for ever of one that doesn't. Raises
        ``UnknownTokenError``.
        """
        with self._write() as db:
            before = _in_force(db, name, now)
            if not before:
                raise UnknownTokenError(name)
            _revoke(db, before, now + overlap_s)
            last = before[-1]
            if expires_at is None and last.expires_at is not None:
                expires_at = now + (last.expires_at - last.created_at)
            made = _add(db, name, last.role, by, now, expires_at)
        self._forget()
        return made

    def revoke(self, word: str, now: float) -> list[TokenRow]:
        """End those in force with this name or id, at once. Raises ``UnknownTokenError``."""
        with self._write() as db:
            ended = _in_force(db, word, now) or [
                row for row in _in_force(db, None, now) if row.id == word
            ]
            if not ended:
                raise UnknownTokenError(word)
            _revoke(db, ended, now)
            ids = [row.id for row in ended]
            query = sa.select(tokens).where(tokens.c.id.in_(ids)).order_by(tokens.c.number)
            rows = [_row(row) for row in db.execute(query).mappings()]
        self._forget()
        return rows

    def page(self, after: str | None, limit: int, *, now: float, ended: bool) -> list[TokenRow]:
        """Tokens after the one with the id ``after``, oldest first; with ``ended`` those too that
        are in force no more. Raises ``UnknownTokenError`` for a cursor of no token."""
        query = sa.select(tokens).order_by(tokens.c.number).limit(limit)
        if not ended:
            query = query.where(_is_in_force(now))
        with self._read() as db:
            if after is not None:
                at = sa.select(tokens.c.number).where(tokens.c.id == after)
                number = db.execute(at).scalar_one_or_none()
                if number is None:
                    raise UnknownTokenError(after)
                query = query.where(tokens.c.number > number)
            return [_row(row) for row in db.execute(query).mappings()]

    def _forget(self) -> None:
        with self._lock:
            self._known = None

    def _live(self) -> dict[str, tuple[TokenRow, str]]:
        known = self._known
        if known is None:
            # Under the lock, so that what is read before a change doesn't replace what is after.
            with self._lock, self._read() as db:
                rows = db.execute(sa.select(tokens)).mappings().all()
                known = self._known = {row["id"]: (_row(row), row["hash"]) for row in rows}
        return known


def _add(
    db: Connection, name: str, role: Role, by: str, now: float, expires_at: float | None
) -> tuple[TokenRow, str]:
    id_ = secrets.token_hex(4)
    token = new_token(id_)
    row = TokenRow(id_, name, role, now, by, expires_at, None)
    values = {
        "id": id_,
        "name": name,
        "role": role.value,
        "hash": token_hash(token),
        "created_at": now,
        "created_by": by,
        "expires_at": expires_at,
    }
    db.execute(sa.insert(tokens).values(values))
    return row, token


def _revoke(db: Connection, rows: list[TokenRow], at: float) -> None:
    for row in rows:
        # One that ends sooner does so all the same.
        ends = at if row.revoked_at is None else min(at, row.revoked_at)
        change = sa.update(tokens).where(tokens.c.id == row.id).values(revoked_at=ends)
        db.execute(change)


def _is_in_force(now: float) -> sa.ColumnElement[bool]:
    return sa.and_(
        sa.or_(tokens.c.revoked_at.is_(None), tokens.c.revoked_at > now),
        sa.or_(tokens.c.expires_at.is_(None), tokens.c.expires_at > now),
    )


def _in_force(db: Connection, name: str | None, now: float) -> list[TokenRow]:
    query = sa.select(tokens).where(_is_in_force(now)).order_by(tokens.c.number)
    if name is not None and not re.fullmatch(NAME, name):
        return []
    if name is not None:
        query = query.where(tokens.c.name == name)
    return [_row(row) for row in db.execute(query).mappings()]


def _row(row: RowMapping) -> TokenRow:
    values = {k: row[k] for k in TokenRow.__dataclass_fields__}
    return TokenRow(**{**values, "role": Role(row["role"])})
