"""Whose token a request carries, and how often they may ask.

Promises: a token is compared in constant time, by its hash; what is wrong with one is told only to
who holds it; who has none, or a wrong one, is counted by their address, so that guessing is slow
and costs nobody else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

from orchestrator.access import HOME, Caller, Role, same_hash, token_hash
from orchestrator.api.problems import Kind
from orchestrator.home.folder import Home
from orchestrator.home.rate_limit import RateLimit, RateLimiter
from orchestrator.store.tokens import TokenRecords

logger = logging.getLogger(__name__)

STRANGERS = RateLimit(per_second=10, burst=50)
"""How often an address may come without a token that is known."""


@dataclass(frozen=True, slots=True)
class Denied:
    """Why a request goes no further; ``retry_s``: it may come again after that."""

    kind: Kind
    detail: str
    retry_s: float = 0.0


class TokenFile:
    """The token of a home, read again when its file has changed: so it is rotated.

    A file that is away, or that others can read, changes nothing; it is told in the log.
    """

    def __init__(self, home: Home) -> None:
        self._home = home
        self._seen: tuple[int, ...] = ()
        self._token = ""

    def __call__(self) -> str:
        try:
            now = (self._home.path / "token").stat()
            seen = (now.st_ino, now.st_mtime_ns, now.st_mode)
            if seen != self._seen:
                self._seen = seen
                self._token = self._home.token() or self._token
        except OSError as error:
            logger.error("the home's token can't be read, the one before counts: %s", error)
        return self._token


class Gate:
    """The home's token, those of the store, and a bucket for each.

    ``clock``: seconds since the epoch, for what expires.
    """

    def __init__(
        self,
        home_token: str | Callable[[], str],
        records: TokenRecords,
        limit: RateLimit | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._home = home_token if callable(home_token) else lambda: home_token
        self._records = records
        self._callers = RateLimiter(limit or RateLimit())
        self._strangers = RateLimiter(STRANGERS)
        self._clock = clock

    def enter(self, authorization: str, address: str) -> Caller | Denied:
        """Who asks, by an ``Authorization`` header, or why they may not."""
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer" or not given.strip():
            denied = Denied(Kind.TOKEN_MISSING, "this needs the controller's bearer token")
            return self._strange(address) or denied
        found = self.whose(given.strip())
        if not isinstance(found, Caller):
            told = found or "the token is not this controller's"
            return self._strange(address) or Denied(Kind.TOKEN_REFUSED, told)
        wait = self._callers.admit(found.token, monotonic())
        if not wait:
            return found
        rate = self._callers.limit.per_second
        told = f"the token {found.name!r} asks more than {rate:g} times a second"
        return Denied(Kind.TOO_MANY_REQUESTS, told, wait)

    def whose(self, token: str) -> Caller | str:
        """Who holds a token, or why it isn't accepted; "" where nobody knows it."""
        home = self._home()
        if home and same_hash(token_hash(token), token_hash(home)):
            return Caller(HOME, Role.ADMIN, HOME)
        return self._records.caller(token, self._clock())

    def _strange(self, address: str) -> Denied | None:
        wait = self._strangers.admit(address, monotonic())
        if not wait:
            return None
        told = f"{address} comes too often without a token that is known here"
        return Denied(Kind.TOO_MANY_REQUESTS, told, wait)
