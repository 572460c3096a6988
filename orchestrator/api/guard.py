"""What every request passes first: its token, how often that asks, the form and size of its body.

Promises: nothing behind it runs for who has no token that is known; a body is read up to its limit
at most; a stream ends within ``LOOK_S`` after its token has. No token is in a log.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from fastapi.concurrency import run_in_threadpool

from orchestrator.access import Caller
from orchestrator.api.access import Denied, Gate
from orchestrator.api.body import wrong_with
from orchestrator.api.problems import MEDIA_TYPE, STORE_RETRY_S, Kind, problem_body
from orchestrator.store.errors import StoreUnavailableError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

BODY_LIMIT = 1024 * 1024
"""Bytes of a request's body at most; job files have a few kilobytes."""
LOOK_S = 5.0
"""Seconds between two looks at whether the token of a stream is still in force."""

GUARDED = ("/v1", "/metrics")
"""Beginnings of the paths that want a token."""


class Guard:
    """Refuses requests to ``GUARDED`` paths that ``gate`` doesn't let in, and bodies that are above
    ``BODY_LIMIT`` or aren't JSON."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        token = ""
        if scope["path"].startswith(GUARDED):
            given = headers.get(b"authorization", b"").decode("latin-1")
            found = await self._enter(given, (scope.get("client") or ("somebody", 0))[0])
            if isinstance(found, Denied):
                await _deny(send, found)
                return
            token = given.partition(" ")[2].strip()
            scope["caller"] = found
        too_large = f"the body is above {BODY_LIMIT} bytes"
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > BODY_LIMIT:
            await _refuse(send, Kind.TOO_LARGE, too_large)
            return
        body = await _read_body(receive)
        if body is None:
            await _refuse(send, Kind.TOO_LARGE, too_large)
            return
        form = headers.get(b"content-type", b"")
        if body and not _is_json(form):
            shown = form.decode("latin-1")[:100] or "of no Content-Type"
            told = f"the body is {shown}: send it as application/json"
            await _refuse(send, Kind.WRONG_MEDIA_TYPE, told, {"Accept": "application/json"})
            return
        if wrong := await run_in_threadpool(wrong_with, body):
            await _refuse(send, Kind.BODY_UNFIT, wrong)
            return
        held = _Held(body, receive, lambda: not token or self._known(token))
        await self._app(scope, held.receive, send)
        if held.cut:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _enter(self, authorization: str, address: str) -> Caller | Denied:
        try:
            # In a thread: the store may have to be read.
            return await run_in_threadpool(self._gate.enter, authorization, address)
        except StoreUnavailableError as error:
            logger.error("a token can't be looked up: %s", error)
            return Denied(Kind.STORE_UNAVAILABLE, str(error), STORE_RETRY_S)

    def _known(self, token: str) -> bool:
        try:
            return isinstance(self._gate.whose(token), Caller)
        except StoreUnavailableError:
            return True


class _Held:
    """The body that was read, and then what comes of the connection, or its end when ``known``
    says that the token is no more."""

    def __init__(self, body: bytes, receive: Receive, known: Callable[[], bool]) -> None:
        self._pending = [body]
        self._receive = receive
        self._known = known
        self.cut = False

    async def receive(self) -> Message:
        if self._pending:
            return {"type": "http.request", "body": self._pending.pop(), "more_body": False}
        while not self.cut:
            try:
                async with asyncio.timeout(LOOK_S):
                    return await self._receive()
            except TimeoutError:
                self.cut = not self._known()
        return {"type": "http.disconnect"}


def _is_json(content_type: bytes) -> bool:
    form = content_type.partition(b";")[0].strip().lower()
    return form == b"application/json" or (
        form.startswith(b"application/") and form.endswith(b"+json")
    )


async def _read_body(receive: Receive) -> bytes | None:
    """All of the body; None as soon as it is above the limit (a length may not be given)."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return bytes(body)
        body += message.get("body", b"")
        if len(body) > BODY_LIMIT:
            return None
        if not message.get("more_body", False):
            return bytes(body)


async def _deny(send: Send, denied: Denied) -> None:
    headers = {}
    if denied.kind is Kind.TOKEN_MISSING:
        headers["WWW-Authenticate"] = "Bearer"
    if denied.retry_s:
        headers["Retry-After"] = str(math.ceil(denied.retry_s))
    await _refuse(send, denied.kind, denied.detail, headers)


async def _refuse(
    send: Send, kind: Kind, detail: str, headers: Mapping[str, str] | None = None
) -> None:
    body = problem_body(kind, detail)
    sent = {**(headers or {}), "Content-Type": MEDIA_TYPE, "Content-Length": str(len(body))}
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in sent.items()]
    await send({"type": "http.response.start", "status": kind.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
