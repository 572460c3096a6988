"""Stops of jobs before their controller's host ends: asked for, and waited for.

    stops = Stops(client, jobs, asked=running, order=lambda job: client.cancel(job, "why"))
    stops.wait()
    cut_off = stops.going_on()

Promises: a question or an order that is refused for a moment is said again; only a host that is
known to be gone, or the end of the time, ends the wait; a job is waited for until nothing more
happens to it, what the keepers write of its memory included. The time is what the job's own
``stopping`` and ``rescue`` events give it, ``LONGEST_STOP_S`` at least; or, where a platform ends
the host then, what the platform gives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from orchestrator.api.client import Client
from orchestrator.api.client_errors import ClientError, NotFoundError, RefusedError
from orchestrator.api.patience import MOMENTARY
from orchestrator.lifecycle import AFTER_STOP_S, LONGEST_STOP_S

POLL_S = 0.1
TELL_TIME = ("stopping", "rescue")
"""Kinds of events whose ``given_s`` is how long the job may take from then on."""


def at_rest(job: Mapping[str, Any]) -> bool:
    """Whether the end of the host takes nothing from it: settled, or in the queue without nodes."""
    return bool(job["settled"] or (job["state"] == "queued" and not job.get("nodes")))


class Stops:
    """The stops of ``jobs``: those of ``asked`` by ``order``, which may be said twice, and those of
    the others as they were asked by somebody else.

    ``bound``: when the platform ends the host, of the monotonic clock; ``gone``: whether the host
    is known to have ended.
    """

    def __init__(
        self,
        client: Client,
        jobs: Mapping[str, dict[str, Any]],
        *,
        asked: Iterable[str],
        order: Callable[[str], object],
        gone: Callable[[], bool],
        bound: float | None = None,
    ) -> None:
        self.jobs = dict(jobs)
        """As last seen."""
        self.given: dict[str, float] = {}
        """Seconds that jobs said their stops may take."""
        self._client, self._order, self._gone, self._bound = client, order, gone, bound
        self._unasked = set(asked)
        self._unseen = set(self._unasked)
        self._heard = dict.fromkeys(jobs, 0)
        self._until = dict.fromkeys(jobs, time.monotonic() + LONGEST_STOP_S)

    def going_on(self) -> list[str]:
        """Those that are not at rest, as far as is known: what ``jobs`` came with may be old."""
        return [n for n, job in self.jobs.items() if n in self._unseen or not at_rest(job)]

    def wait(self) -> None:
        """Until all are at rest, their time is up, or the host is gone. Raises ``ClientError``
        where an order is refused for good, as for a token that may not give it."""
        while left := [name for name in self.going_on() if time.monotonic() < self._end_of(name)]:
            # All are told before any is looked at: their histories may be long.
            for turn in (self._tell, self._look):
                for name in left:
                    try:
                        turn(name)
                    except MOMENTARY:
                        if self._gone():
                            return
            time.sleep(POLL_S)

    def _end_of(self, name: str) -> float:
        return self._until[name] if self._bound is None else self._bound

    def _tell(self, name: str) -> None:
        """Give its order, until it was heard."""
        if name not in self._unasked:
            return
        try:
            self._order(name)
        except MOMENTARY:
            raise
        except (RefusedError, NotFoundError):
            # It came to its end meanwhile, or heard it the first time.
            pass
        self._unasked.discard(name)

    def _look(self, name: str) -> None:
        """How it stands, once it has its order."""
        if name in self._unasked:
            return
        try:
            self.jobs[name] = self._client.job(name)
            self._unseen.discard(name)
            self._hear(name)
        except MOMENTARY:
            raise
        except NotFoundError:
            self.jobs[name] = {**self.jobs[name], "settled": True}
            self._unseen.discard(name)
        except ClientError:
            # A token that was revoked meanwhile ends no checkpoint.
            return

    def _hear(self, name: str) -> None:
        """Read on in its events: how long its stop may take, from now on."""
        while True:
            page = self._client.events(name, self._heard[name])
            self._heard[name] = page["next"]
            for event in page["events"]:
                given = event["detail"].get("given_s") if event["kind"] in TELL_TIME else None
                if given is None or event["attempt"] != self.jobs[name]["attempt"]:
                    continue
                self.given[name] = float(given)
                until = time.monotonic() + self.given[name] + AFTER_STOP_S
                self._until[name] = max(self._until[name], until)
            if not page["events"]:
                return
