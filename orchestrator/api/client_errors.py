"""What the controller, or the way to it, says no to: the errors of ``orchestrator.api.client``.

Promises: every failure is one of these or a ``SpecError``, told for a person; an answer that is no
controller's is told as such. What a controller of before says (``error`` alone) is read too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from orchestrator.spec.errors import Problem, SpecError

START_ONE = (
    "start one with `octavo up`, or run a job alone: `octavo run`;\n"
    "to reach one elsewhere set $OCTAVO_URL and $OCTAVO_TOKEN, or name its folder with --home"
)
ELSEWHERE = (
    "$OCTAVO_URL says so: is it right, does the controller run, and does it listen there?\n"
    "`octavo up --listen ADDRESS` starts one; `unset OCTAVO_URL` for the one on this machine"
)
NO_URL = "addresses are as http://10.0.0.1:8420 or https://head.example.org: set $OCTAVO_URL so"
UNTRUSTED = (
    "name the authority that signed its certificate with --ca FILE or $OCTAVO_CA; if you do, or "
    "it is your own machine's, then something else answers there"
)
PLAIN = "write http:// for https://, or give the controller a certificate: `octavo up --tls-cert`"
START_AGAIN = (
    "Ray starts it again as long as its host runs; else start Ray there, and then the controller: "
    "`python -m orchestrator.cluster.on_ray HOME --address {address}`; its jobs are in the store"
)
TRY_AGAIN = "try again in a moment; if that doesn't help: `octavo down`, `octavo up`"
LOOK_FIRST = (
    "it may have taken the order all the same: look by `octavo list` before you repeat it; if that "
    "gets no answer either: `octavo down`, `octavo up`"
)
"""Of an order that isn't known to have been heard, as a submission: repeated, it would be two."""


class ClientError(Exception):
    """What the controller or the way to it said no to."""

    def __init__(self, message: str, candidates: Sequence[str] = ()) -> None:
        super().__init__(message, tuple(candidates))
        self.candidates = tuple(candidates)
        """What an ambiguous name could have meant."""

    def __str__(self) -> str:
        return str(self.args[0])


class UnreachableError(ClientError):
    """Nobody answers: the controller is not running, or elsewhere, or restarts for too long."""

    def __init__(self, message: str, remedy: str = START_ONE) -> None:
        super().__init__(message)
        self.args = (message, remedy)
        self.remedy = remedy


class NotAuthorizedError(ClientError):
    """The token is missing, wrong, or kept where others can read it."""


class NotAllowedError(ClientError):
    """The token is known, and its role doesn't allow this."""

    @property
    def needed(self) -> str:
        """The role that does, as the controller says; "" where it doesn't."""
        found = re.search(r"; this needs (read|submit|admin)$", str(self))
        return found[1] if found else ""


class NotYoursError(NotAllowedError):
    """The job is another user's."""


class NotFoundError(ClientError):
    """No job goes by that name."""


class RefusedError(ClientError):
    """The controller understood and won't: the job has ended, or the name is ambiguous."""


class UsageError(RefusedError):
    """The request was wrong: a value that can't be, a body that is too large."""


class TooManyRequestsError(RefusedError):
    """The token asks too often, and did so for as long as was waited."""


class ServerError(ClientError):
    """The controller failed on the request."""


def error_of(answer: httpx.Response, url: str) -> Exception:
    """The error that an answer of 400 and above tells."""
    try:
        body = answer.json()
        message = str(body.get("detail") or body["error"])
        problems, kind = list(body.get("problems", ())), _kind(body)
        candidates = [str(word) for word in body.get("candidates", ())]
    except (ValueError, KeyError, TypeError, AttributeError):
        return ServerError(f"{url} answered {answer.status_code}, and not as a controller does")
    if problems and kind in ("", "spec-invalid"):
        return SpecError([Problem.from_json(_with_remedy(p)) for p in problems])
    kinds: dict[int, type[ClientError]] = {
        401: NotAuthorizedError,
        403: {"role-too-low": NotAllowedError, "not-your-job": NotYoursError}.get(
            kind, NotAuthorizedError
        ),
        404: NotFoundError,
        409: RefusedError,
        413: UsageError,
        415: UsageError,
        422: UsageError,
        429: TooManyRequestsError,
    }
    return kinds.get(answer.status_code, ServerError)(message, candidates)


def _kind(body: Mapping[str, Any]) -> str:
    return str(body.get("type", "")).removeprefix("urn:octavo:")


def _with_remedy(problem: Mapping[str, Any]) -> dict[str, Any]:
    return {**problem, "remedy": problem.get("hint") or problem.get("remedy", "")}
