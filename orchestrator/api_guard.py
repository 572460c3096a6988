"""What every request passes first: its token, and the form and size of its body."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import TYPE_CHECKING

from orchestrator.access import HOME, Caller, Role
from orchestrator.api_problems import MEDIA_TYPE, Kind, problem_body

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_LIMIT = 1024 * 1024
"""Bytes of a request's body at most; job files have a few kilobytes."""


GUARDED = ("/v1", "/metrics")
"""Beginnings of the paths that want the token."""


class Guard:
    """Refuses requests to ``GUARDED`` paths without the token, and bodies above ``BODY_LIMIT``."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        if scope["path"].startswith(GUARDED):
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not given.strip():
                challenge = {"WWW-Authenticate": "Bearer"}
                told = "this needs the controller's bearer token"
                await _refuse(send, Kind.TOKEN_MISSING, told, challenge)
                return
            # In constant time, so that the token can't be found out letter by letter.
            if not hmac.compare_digest(given.strip(), self._token):
                await _refuse(send, Kind.TOKEN_REFUSED, "the token is not this controller's")
                return
            scope["caller"] = Caller(HOME, Role.ADMIN, HOME)
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
        await self._app(scope, _replay(body, receive), send)


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


def _replay(body: bytes, receive: Receive) -> Receive:
    pending = [body]

    async def again() -> Message:
        if pending:
            return {"type": "http.request", "body": pending.pop(), "more_body": False}
        return await receive()

    return again


async def _refuse(
    send: Send, kind: Kind, detail: str, headers: Mapping[str, str] | None = None
) -> None:
    body = problem_body(kind, detail)
    sent = {**(headers or {}), "Content-Type": MEDIA_TYPE, "Content-Length": str(len(body))}
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in sent.items()]
    await send({"type": "http.response.start", "status": kind.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
