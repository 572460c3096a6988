"""What every request passes first: the token and the size of its body."""

from __future__ import annotations

import hmac
import json
from typing import TYPE_CHECKING

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
                challenge = (b"www-authenticate", b"Bearer")
                await _refuse(send, 401, "this needs the controller's bearer token", challenge)
                return
            # In constant time, so that the token can't be found out letter by letter.
            if not hmac.compare_digest(given.strip(), self._token):
                await _refuse(send, 403, "the token is not this controller's")
                return
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > BODY_LIMIT:
            await _refuse(send, 413, f"the body is above {BODY_LIMIT} bytes")
            return
        body = await _read_body(receive)
        if body is None:
            await _refuse(send, 413, f"the body is above {BODY_LIMIT} bytes")
            return
        await self._app(scope, _replay(body, receive), send)


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


async def _refuse(send: Send, status: int, error: str, *headers: tuple[bytes, bytes]) -> None:
    body = json.dumps({"error": error, "problems": []}).encode()
    sent = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*sent, *headers]})
    await send({"type": "http.response.body", "body": body})
