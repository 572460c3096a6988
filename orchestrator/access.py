"""Who may do what over the HTTP API, and what a token looks like. Pure.

    read     everything that is shown, of all jobs and nodes, and /metrics
    submit   that, submitting jobs, and controlling those that it submitted
    admin    that, controlling every job, nodes and tokens

A token is ``octavo_<id>_<secret>``; the id names it in lists, and finds it. What is kept is the
SHA-256 of the whole: the secret has 256 random bits, which nobody guesses, so that a slow hash
would protect nothing. A token's *name* is whose it is: it owns the jobs that it submitted, through
all rotations. ``HOME`` is the name of the token in the controller's own home, which is an admin's.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from enum import Enum

HOME = "home"
NAME = r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,62}$"
"""What tokens may be called."""

_TOKEN = re.compile(r"octavo_([0-9a-f]{8})_[A-Za-z0-9_-]{20,100}")


class Role(Enum):
    """What a token is for; each may do what those before it may."""

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"

    def includes(self, other: Role) -> bool:
        """Whether it may do what ``other`` may."""
        order = list(Role)
        return order.index(self) >= order.index(other)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request."""

    name: str
    role: Role
    token: str
    """Id of the token; ``HOME`` for the home's."""
    expires_at: float | None = None

    def speaks_as(self, by: str) -> str:
        """Who is kept as the one who asked, of whom they call themselves ``by``.

        An admin may speak for others; everybody else is who their token says.
        """
        if self.role is not Role.ADMIN:
            return self.name
        return by or ("" if self.token == HOME else self.name)

    def signed(self, reason: str) -> str:
        """A reason with who gave it, where it doesn't say so."""
        if self.token == HOME or self.name in reason:
            return reason
        return f"{reason} (asked by {self.name})"

    def controls(self, submitted_by: str) -> bool:
        """Whether they may control a job of that user's."""
        return self.role is Role.ADMIN or (self.role is Role.SUBMIT and submitted_by == self.name)


def new_token(id_: str) -> str:
    """A token under that id (8 hex digits)."""
    return f"octavo_{id_}_{secrets.token_urlsafe(32)}"


def token_id(token: str) -> str | None:
    """The id in a token; None for what is none, as the home's."""
    found = _TOKEN.fullmatch(token)
    return None if found is None else found[1]


def token_hash(token: str) -> str:
    """What is kept of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def same_hash(one: str, other: str) -> bool:
    """Equality in constant time, so that a hash can't be found out digit by digit."""
    return hmac.compare_digest(one.encode(), other.encode())
