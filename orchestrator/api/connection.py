"""The way to one controller: what is said to it, and when it is said again.

    connection = Connection("http://127.0.0.1:8420", token)
    connection.get("/v1/whoami")["role"]

Promises: every failure is one of ``client_errors``; nothing that a controller can have heard is
said twice, unless it is said to be the same; a controller that restarts is waited for, shortly, and
followed to where it listens then; one that says "too many requests" is asked again when it says;
lists are read to their end, page by page. It knows no path of the API but ``/healthz``: what there
is to ask stands in ``orchestrator.api.client``.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import httpx

from orchestrator.api.client_errors import (
    ELSEWHERE,
    LOOK_FIRST,
    NO_URL,
    PLAIN,
    START_AGAIN,
    START_ONE,
    TRY_AGAIN,
    UNTRUSTED,
    NotAuthorizedError,
    ServerError,
    TooManyRequestsError,
    UnreachableError,
    UsageError,
    error_of,
)
from orchestrator.home.folder import Home
from orchestrator.home.listening import trusting

TIMEOUT_S = 30.0
RESTART_S = 10.0
"""Seconds that a controller whose host runs may take to answer again."""
LONGEST_PAUSE_S = 60.0
"""Seconds that a request is put off at most where its token asks too often."""
HURRY_S = 1.0
"""All of these, where somebody waits at a prompt."""


class Connection:
    """The controller at ``url``; ``token`` is its bearer token.

    ``home``: where a controller that restarts says that it listens now; ``trust``: whose
    certificates are taken, by default those of the system's authorities. An ``url`` that is none
    is unreachable, and a ``token`` that can be none isn't accepted.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        home: Home | None = None,
        trust: ssl.SSLContext | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self._home = home
        self._timeout_s = TIMEOUT_S
        self._restart_s = RESTART_S
        self._longest_pause_s = LONGEST_PAUSE_S
        headers = {"Authorization": f"Bearer {_fit(token)}"} if token else {}
        # A proxy of the environment has no business between us and the loopback.
        local = _host(self.url) in ("127.0.0.1", "localhost", "::1")
        self._http = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=self._timeout_s,
            trust_env=not local,
            verify=trust or (trusting(None) if self.url.startswith("https:") else False),
        )

    def healthy(self) -> bool:
        """Whether a controller answers."""
        try:
            return self._http.get("/healthz", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def hurry(self) -> None:
        """Give up on everything after a second: who asks waits at a prompt."""
        self._timeout_s = self._restart_s = self._longest_pause_s = HURRY_S

    def clock(self) -> float:
        """Seconds since the epoch, by the controller's clock, to the second."""
        try:
            told = self._http.get("/healthz", timeout=5.0).headers["Date"]
            return parsedate_to_datetime(told).timestamp()
        except (httpx.HTTPError, KeyError, ValueError):
            return time.time()

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        """The answer to a question; its ``wait`` is how long the controller may hold it back."""
        timeout = self._timeout_s + float(params.get("wait", 0))
        return self._ask("GET", path, params=params, timeout=timeout)

    def pages(self, path: str, name: str, **params: Any) -> Iterator[dict[str, Any]]:
        """The rows of all pages of a list."""
        page = self.get(path, **params)
        yield from page[name]
        # A controller of before has no pages.
        while (after := page.get("next")) is not None:
            page = self.get(path, after=after, **params)
            yield from page[name]

    def post(
        self, path: str, body: Mapping[str, Any], *, repeatable: bool = False
    ) -> dict[str, Any]:
        """The answer to an order; ``repeatable``: it has a key, so that, said again where an
        answer was lost, it is the same one."""
        return self._ask("POST", path, json=body, timeout=self._timeout_s, repeatable=repeatable)

    def close(self) -> None:
        self._http.close()

    def _ask(self, method: str, path: str, **kwargs: Any) -> dict[str, Any]:
        answer = self._answer(method, path, **kwargs)
        if answer.is_success:
            try:
                return dict(answer.json())
            except ValueError:
                raise ServerError(f"{self.url} is no Octavo controller") from None
        raise error_of(answer, self.url)

    def _answer(
        self, method: str, path: str, *, repeatable: bool = False, **kwargs: Any
    ) -> httpx.Response:
        """The response; where the host of our home runs, the controller's restart is waited for,
        and where it was asked too often, until it may be asked again: it did nothing so far."""
        deadline = time.monotonic() + self._restart_s
        patience = time.monotonic() + self._longest_pause_s
        while True:
            try:
                answer = self._http.request(method, path, **kwargs)
                pause = _pause_of(answer)
                if pause is None:
                    return answer
                if time.monotonic() + pause > patience:
                    raise TooManyRequestsError(
                        f"the controller at {self.url} is asked too often; it answers again in "
                        f"{pause:g} s"
                    )
                time.sleep(pause)
                continue
            except (httpx.InvalidURL, UnicodeError) as error:
                # A name of a hundred thousand characters, bytes of an argument that are no text.
                raise UsageError(f"that can't be sent to a controller: {error}") from None
            except httpx.HTTPError as error:
                detail = str(error) or type(error).__name__
                # A question may be asked twice; an order only if nobody can have heard it.
                lost = isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError)
                unheard = isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                again = isinstance(error, httpx.ConnectError) or (
                    lost and (repeatable or method == "GET")
                )
            if "WRONG_VERSION_NUMBER" in detail:
                told = f"what answers at {self.url} speaks plain HTTP"
                raise UnreachableError(told, PLAIN)
            if "CERTIFICATE_VERIFY_FAILED" in detail or "SSL" in detail:
                told = f"the certificate of {self.url} is not to be trusted: {detail}"
                raise UnreachableError(told, UNTRUSTED)
            if not self._restarts():
                remedy = ELSEWHERE if self._home is None else START_ONE
                raise UnreachableError(f"no controller answers at {self.url}: {detail}", remedy)
            if not again or time.monotonic() > deadline:
                raise self._unreachable(detail, heard=method != "GET" and not unheard)
            time.sleep(0.2)
            self._look_again()

    def _unreachable(self, detail: str, *, heard: bool) -> UnreachableError:
        """Of a controller that Ray should have started again by now."""
        address = self._home.ray_address() if self._home else ""
        if address:
            told = (
                f"the controller at {self.url}, on the Ray of {address}, doesn't answer: {detail}"
            )
            remedy = START_AGAIN.format(address=address)
        else:
            told = f"the controller at {self.url} doesn't answer, though its host runs: {detail}"
            remedy = TRY_AGAIN
        return UnreachableError(told, LOOK_FIRST if heard else remedy)

    def _restarts(self) -> bool:
        """Whether there is, or may be, a Ray to start our controller again."""
        from orchestrator.cluster.local import running_host

        if self._home is None:
            return False
        # Of a cluster nobody can tell from here.
        return bool(self._home.ray_address()) or running_host(self._home) is not None

    def _look_again(self) -> None:
        """It may listen elsewhere after its restart."""
        server = self._home.server() if self._home else None
        if server is not None and server.url != self.url:
            self.url = server.url
            self._http.base_url = httpx.URL(server.url)


def _pause_of(answer: httpx.Response) -> float | None:
    """Seconds after which to ask again; None: this is an answer."""
    if answer.status_code != 429:
        return None
    told = answer.headers.get("Retry-After", "")
    return max(0.05, float(told)) if told.isascii() and told.isdigit() else 1.0


def _host(url: str) -> str:
    """The host of a controller's address."""
    try:
        found = httpx.URL(url)
    except (httpx.InvalidURL, UnicodeError) as error:
        raise UnreachableError(f"{url!r} is no address of a controller: {error}", NO_URL) from None
    if found.scheme not in ("http", "https") or not found.host:
        raise UnreachableError(f"{url!r} is no address of a controller", NO_URL)
    return found.host


def _fit(token: str) -> str:
    """The token, where it can be one: what it is isn't told."""
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise NotAuthorizedError(
            "the token has characters that no token has, such as a space, the end of a line or a "
            "letter with an accent: was it copied whole, and alone?"
        )
    return token
