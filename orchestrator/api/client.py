"""The Python client of the HTTP API, beneath the CLI: what may be asked of a controller.

    client = Client.of_home(Home.default())
    job = client.submit(spec_data(spec), "job.yaml")["id"]
    for event in client.follow_events(job): print(event["message"])

Promises: every failure is one of ``client_errors``, told for a person; lists are whole; what
follows a job goes on where a controller that was away left off. How it is reached, and what is said
to it again, is ``orchestrator.api.connection``'s.
"""

from __future__ import annotations

import os
import secrets
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from orchestrator.api.client_errors import (
    NotAuthorizedError,
    NotFoundError,
    UnreachableError,
    UsageError,
)
from orchestrator.api.connection import Connection
from orchestrator.api.patience import Answer, Patience
from orchestrator.home.folder import Home
from orchestrator.home.listening import CA_VARIABLE, trusting, trusting_home

URL_VARIABLE = "OCTAVO_URL"
TOKEN_VARIABLE = "OCTAVO_TOKEN"

POLL_S = 10.0
"""Seconds that a follower's question is held back by the controller."""
PATIENCE_S = 60.0
"""Seconds that a follower waits for a controller that doesn't answer."""


class Client:
    """One controller's API; its arguments are ``Connection``'s."""

    def __init__(
        self,
        url: str,
        token: str | None,
        home: Home | None = None,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        self._connection = Connection(url, token, home, trust)

    @classmethod
    def of_environment(cls, ca: Path | None = None) -> Client | None:
        """The controller at ``$OCTAVO_URL``, None where that says nothing; with ``$OCTAVO_TOKEN``
        and, where its certificate is of no authority that the system knows, ``ca`` or
        ``$OCTAVO_CA``."""
        url, named = os.environ.get(URL_VARIABLE), ca or os.environ.get(CA_VARIABLE)
        if not url:
            return None
        trust = trusting(Path(named)) if named else None
        return cls(url, os.environ.get(TOKEN_VARIABLE), trust=trust)

    @classmethod
    def of_home(cls, home: Home) -> Client:
        """The controller of ``home``, whatever the environment says: what has started a controller
        of its own must not give its orders to another one."""
        server = home.server()
        if server is None:
            raise UnreachableError(f"no controller runs in {home.path}")
        try:
            token = home.token()
        except PermissionError as error:
            raise NotAuthorizedError(str(error)) from None
        cert = home.config().tls_cert
        return cls(server.url, token, home, None if cert is None else trusting_home(cert))

    def healthy(self) -> bool:
        """Whether a controller answers."""
        return self._connection.healthy()

    def submit(
        self, spec: Mapping[str, Any], file: str, *, key: str = "", by: str = ""
    ) -> dict[str, Any]:
        """Submit a job; raises ``SpecError`` with the controller's problems.

        ``key``: yours; a submission that comes again under it is the same job. ``by``: whose turn
        in the queue it takes.
        """
        body = {"spec": dict(spec), "file": file, "key": key or secrets.token_hex(8), "by": by}
        # With a key it is one job, so that it may be said again where an answer was lost.
        return self._connection.post("/v1/jobs", body, repeatable=True)

    def validate(self, spec: Mapping[str, Any], file: str) -> dict[str, Any]:
        """The completed spec, without submitting it."""
        answer = self._connection.post("/v1/jobs:validate", {"spec": dict(spec), "file": file})
        return dict(answer["spec"])

    def hurry(self) -> None:
        """Give up on everything after a second: who asks waits at a prompt."""
        self._connection.hurry()

    def clock(self) -> float:
        """Seconds since the epoch, by the controller's clock, to the second."""
        return self._connection.clock()

    def whoami(self) -> dict[str, Any]:
        """``{name, role, expires_at}`` of the token."""
        return self._connection.get("/v1/whoami")

    def tokens(self, *, ended: bool = False) -> list[dict[str, Any]]:
        """Tokens in force, oldest first, and with ``ended`` those that are no more."""
        return list(self._connection.pages("/v1/tokens", "tokens", ended=ended))

    def create_token(self, name: str, role: str, seconds: float | None = None) -> dict[str, Any]:
        """A new one, with its ``token``, which is told this once."""
        return self._connection.post("/v1/tokens", {"name": name, "role": role, "seconds": seconds})

    def rotate_token(
        self, name: str, seconds: float | None = None, overlap_s: float = 0.0
    ) -> dict[str, Any]:
        """Another one of that name, by default for as long as the one before was made for; those
        before are accepted for ``overlap_s`` more."""
        body = {"seconds": seconds, "overlap_s": overlap_s}
        return self._connection.post(_token_path(name, "rotate"), body)

    def revoke_token(self, name: str) -> list[dict[str, Any]]:
        """End those of a name or an id; as they are now."""
        return list(self._connection.post(_token_path(name, "revoke"), {})["revoked"])

    def jobs(self, by: str | None = None, states: Sequence[str] = ()) -> list[dict[str, Any]]:
        """All jobs, oldest first; with ``by`` those that this user submitted."""
        chosen: dict[str, Any] = {} if by is None else {"by": by}
        if states:
            chosen["state"] = list(states)
        return list(self._connection.pages("/v1/jobs", "jobs", **chosen))

    def job(self, job: str) -> dict[str, Any]:
        """One job with its spec and attempts; by id, name or unique beginning."""
        return self._connection.get(_path(job))

    def nodes(self) -> list[dict[str, Any]]:
        """The nodes: their slots, who holds them, and which are quarantined, with why."""
        return list(self._connection.pages("/v1/nodes", "nodes"))

    def quarantine(
        self, node: str, reason: str, by: str, seconds: float | None = None
    ) -> dict[str, Any]:
        """Leave a node out of placements, for ``seconds`` or until it is released."""
        body = {"reason": reason, "by": by, "seconds": seconds}
        return self._connection.post(_node_path(node, "quarantine"), body)

    def release(self, node: str, by: str) -> dict[str, Any]:
        """Take a quarantined node back."""
        return self._connection.post(_node_path(node, "release"), {"by": by})

    def cancel(self, job: str, reason: str) -> dict[str, Any]:
        """Ask for the job's end."""
        return self._connection.post(_path(job, "cancel"), {"reason": reason})

    def resume(
        self, job: str, reason: str, degrees: Mapping[str, int] | None = None
    ) -> dict[str, Any]:
        """Queue a paused job again, with other ``degrees`` where any are given."""
        asked = {"reason": reason, **({"parallelism": dict(degrees)} if degrees else {})}
        return self._connection.post(_path(job, "resume"), asked)

    def rollback(
        self, job: str, to_step: int, skip: Sequence[int] = (), **ask: Any
    ) -> dict[str, Any]:
        """Go back to the snapshot or checkpoint of ``to_step``, leaving out ``skip``'s batches.

        This and the next three return the control as accepted, with its ``key``, or as
        answered; ``answer`` waits for what becomes of it. ``ask``: ``by``, ``reason``, ``key``.
        """
        return self._control(job, "rollback", {"to_step": to_step, "skip": list(skip)}, ask)

    def precision(self, job: str, layers: Sequence[str], to: str, **ask: Any) -> dict[str, Any]:
        """Move the linears that ``layers``' patterns match to ``bf16`` or ``fp8``."""
        return self._control(job, "precision", {"layers": list(layers), "to": to}, ask)

    def exchange(self, job: str, to: str, **ask: Any) -> dict[str, Any]:
        """What gradients cross the network in: ``fp8``, ``bf16`` or, by measurement, ``auto``."""
        return self._control(job, "exchange", {"to": to}, ask)

    def pause(self, job: str, **ask: Any) -> dict[str, Any]:
        """Stop after a checkpoint and give the nodes back; ``resume`` goes on exactly there."""
        return self._control(job, "pause", {}, ask)

    def control(self, job: str, key: str, wait: float = 0) -> dict[str, Any]:
        """What became of a control: ``state`` accepted, applied or refused, ``message``, ``step``.

        Held back up to ``wait`` seconds until there is an answer.
        """
        return self._connection.get(_path(job, "controls", key), wait=wait)

    def controls(self, job: str) -> list[dict[str, Any]]:
        """All that was asked of a job, oldest first."""
        return list(self._connection.pages(_path(job, "controls"), "controls"))

    def answer(self, job: str, key: str) -> dict[str, Any]:
        """Wait for what becomes of a control, through restarts of the controller too."""
        while True:
            found = self.patiently(self.control, job, key, POLL_S)
            if found["state"] != "accepted":
                return found

    def events(self, job: str, after: int = 0, wait: float = 0) -> dict[str, Any]:
        """A page ``{events, next, state, settled}``."""
        return self._connection.get(_path(job, "events"), after=after, wait=wait)

    def steps(
        self,
        job: str,
        after: int = 0,
        wait: float = 0,
        *,
        tensors: bool = True,
        limit: int | None = None,
    ) -> dict[str, Any]:
        """A page ``{steps, next, state, settled}``, of as many steps as the API gives at once or
        of ``limit``."""
        few = {} if limit is None else {"limit": limit}
        return self._connection.get(
            _path(job, "steps"), after=after, wait=wait, tensors=tensors, **few
        )

    def records(self, job: str) -> dict[str, Any]:
        """All ``{incidents, actions, contexts, newest_step}``."""
        whole = self._connection.get(_path(job, "records"))
        page = whole
        while page.get("more"):
            page = self._connection.get(_path(job, "records"), after=page["next"])
            for kind in ("incidents", "actions", "contexts"):
                whole[kind] += page[kind]
        return {k: whole[k] for k in ("incidents", "actions", "contexts", "newest_step")}

    def logs(
        self,
        job: str,
        rank: int,
        attempt: int | None = None,
        offset: int = 0,
        wait: float = 0,
        **begin: float,
    ) -> dict[str, Any]:
        """A piece of a rank's log ``{lines, text, offset, attempt, exists, state, settled}``.

        ``begin``: instead of ``offset`` ``since``, seconds since the epoch, or ``tail``, lines.
        """
        chosen = {"attempt": attempt, **begin}
        asked = {name: value for name, value in chosen.items() if value is not None}
        return self._connection.get(
            _path(job, "logs"), rank=rank, offset=offset, wait=wait, **asked
        )

    def follow_events(self, job: str, *, follow: bool = True) -> Iterator[dict[str, Any]]:
        """All events of a job; with ``follow`` also those to come, until it is settled."""
        after = 0
        while True:
            page = self.patiently(self.events, job, after, POLL_S if follow else 0)
            yield from page["events"]
            after = page["next"]
            if not page["events"] and (not follow or page["settled"]):
                return

    def follow_logs(
        self, job: str, rank: int, attempt: int | None, *, follow: bool = True, **begin: float
    ) -> Iterator[dict[str, Any]]:
        """Pieces of a rank's log, through the attempts that follow where none is named; with
        ``follow`` those to come too, until the job is settled. ``begin`` as in ``logs``."""
        piece = self.patiently(self.logs, job, rank, attempt, **begin)
        yield piece
        while True:
            number, offset = piece["attempt"], piece["offset"]
            if not piece["text"]:
                if attempt is None and self.patiently(self.job, job)["attempt"] > number:
                    number, offset = number + 1, 0
                elif not follow or piece["settled"]:
                    return
            wait = POLL_S if follow and not piece["text"] else 0
            piece = self.patiently(self.logs, job, rank, number or None, offset, wait)
            yield piece

    def patiently(self, ask: Callable[..., Answer], *args: Any, **kwargs: Any) -> Answer:
        """``ask(...)``, again while the controller can't answer, for ``PATIENCE_S``."""
        return Patience(time.monotonic() + PATIENCE_S).ask(ask, *args, **kwargs)

    def close(self) -> None:
        self._connection.close()

    def _control(
        self, job: str, kind: str, order: Mapping[str, Any], ask: Mapping[str, Any]
    ) -> dict[str, Any]:
        # With a key it is done once, so that it may be said again where an answer was lost.
        body = {"key": secrets.token_hex(8), **order, **ask}
        return self._connection.post(_path(job, kind), body, repeatable=True)


def _path(job: str, *more: str) -> str:
    return "/".join(["/v1/jobs", _segment(job, "job"), *more])


def _node_path(node: str, what: str) -> str:
    return f"/v1/nodes/{_segment(node, 'node')}/{what}"


def _token_path(name: str, what: str) -> str:
    return f"/v1/tokens/{_segment(name, 'token')}/{what}"


def _segment(word: str, what: str) -> str:
    """A name as a part of a path."""
    if not word.strip():
        raise UsageError(f"no {what} is named: the word for it is empty")
    if not word.strip("."):
        # A path without it, to whoever reads one.
        raise NotFoundError(f"there is no {what} {word!r}")
    return quote(word, safe="", errors="replace")
