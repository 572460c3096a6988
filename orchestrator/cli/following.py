"""A job followed over the API: a ``JobView`` that grows with every poll."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from monitoring.job_view import JobView
from monitoring.records import StepRecord
from monitoring.tensor_stats import NO_TENSORS
from monitoring.utilization import RANK_PEAK
from orchestrator.api.client import PATIENCE_S, Client
from orchestrator.api.client_errors import UnreachableError

CAUGHT_UP = 100
"""Steps that a poll brings fewer of where it has come to the newest."""
WHOLE_STEPS = 512
"""Newest steps whose tensors are looked at, as in the report that a supervisor writes."""
SAMPLES = 64
"""Steps of which a live view keeps the tensors, spread over those that it has seen."""
FIRST_SAMPLES = 8
"""Of how many of the newest ``WHOLE_STEPS`` it gets them when it has come to the newest: a job at
rest has no other."""
ABSENT_LOOK_S = 0.5

Ask = Callable[..., dict[str, Any]]


class _Absent(Exception):  # noqa: N818
    """The controller doesn't answer now."""


@dataclass(frozen=True, slots=True)
class News:
    """What one poll brought."""

    events: tuple[dict[str, Any], ...]
    steps: tuple[StepRecord, ...]


class Following:
    """All that the API tells of one job, kept up to date by ``poll``."""

    def __init__(self, client: Client, job: str, *, whole: bool = True) -> None:
        """``whole``: with the statistics of every new step's tensors, of which the newest
        ``WHOLE_STEPS`` are kept; else of the newest step of each poll, of which ``SAMPLES`` are
        kept, which is what a live view shows: those of a long job are gigabytes."""
        self._whole = whole
        self._client = client
        self._shown = client.job(job)
        self.job = str(self._shown["id"])
        self.state = str(self._shown["state"])
        self.settled = False
        self._events: list[dict[str, Any]] = []
        self._steps: list[StepRecord] = []
        self._ids: list[int] = []
        self._forgotten = 0
        self._sampled: list[int] = []
        self._records: dict[str, Any] = {"incidents": [], "actions": []}
        self._after = {"events": 0, "steps": 0}
        self._absent_since: float | None = None

    def poll(self, wait: float = 0.0, *, patient: bool = True) -> News:
        """Ask for what is new; held back up to ``wait`` seconds while there is nothing.

        A controller that can't be reached is waited for: here, where ``patient``; else nothing is
        new, ``absent_s`` says for how long, and who polls may show that. Either raises
        UnreachableError after ``client.PATIENCE_S``.
        """
        ask = self._client.patiently if patient else self._once
        client = self._client
        try:
            # Steps come several a second, so it is them that a poll waits for.
            ids, steps, after = self._new_steps(ask, wait)
            told = ask(client.events, self.job, self._after["events"])
            events = tuple(told["events"])
            if events:
                # Incidents and actions are always told in an event too.
                records, shown = ask(client.records, self.job), ask(client.job, self.job)
                self._records, self._shown = records, shown
        except _Absent:
            time.sleep(ABSENT_LOOK_S)
            return News((), ())
        self._after = {"events": told["next"], "steps": after}
        self._ids += ids
        self._steps += steps
        if self._whole:
            self._forget(WHOLE_STEPS)
        elif len(steps) < CAUGHT_UP:
            with suppress(_Absent):  # the next poll asks again
                self._get_samples(ask)
        self._events += events
        self.state = told["state"]
        self.settled = bool(told["settled"]) and not events and not steps
        return News(events, steps)

    @property
    def absent_s(self) -> float:
        """Seconds that the controller couldn't be reached, up to now; 0 where it answers."""
        return 0.0 if self._absent_since is None else time.monotonic() - self._absent_since

    def fill(self) -> None:
        """Get the statistics of the newest ``WHOLE_STEPS`` steps."""
        ids = self._ids[-WHOLE_STEPS:]
        places = {number: i for i, number in enumerate(self._ids)}
        after = ids[0] - 1 if ids else 0
        while ids and after < ids[-1]:
            page = self._client.patiently(self._client.steps, self.job, after)
            for row in page["steps"]:
                if row["id"] in places:
                    self._steps[places[row["id"]]] = _step(row)
            if page["next"] == after:
                return
            after = int(page["next"])

    def _get_samples(self, ask: Ask) -> None:
        """Get the statistics of the newest step that has some; the first time also of others."""
        every = int((self._shown["spec"].get("fp8") or {}).get("statistics_every") or 1)
        first = max(0, len(self._steps) - WHOLE_STEPS)
        places = range(first, len(self._steps))
        measured = [i for i in places if (self._steps[i].step + 1) % every == 0]
        apart = max(1, len(measured) // FIRST_SAMPLES)
        wanted = measured[-1:] if self._sampled else measured[::-1][::apart][:FIRST_SAMPLES]
        for i in sorted(set(wanted).difference(self._sampled)):
            page = ask(self._client.steps, self.job, self._ids[i] - 1, limit=1)
            self._steps[i] = _step(page["steps"][0])
            self._sample(i)

    def _sample(self, newest: int) -> None:
        """Keep a step's statistics beside some of those before, ever further apart."""
        self._sampled.append(newest)
        if len(self._sampled) <= SAMPLES:
            return
        for i in self._sampled[1:-1:2]:
            self._steps[i] = replace(self._steps[i], tensors=NO_TENSORS)
        self._sampled = [*self._sampled[:-1:2], self._sampled[-1]]

    def _forget(self, most: int) -> None:
        """Keep the statistics of the newest ``most`` steps."""
        end = max(0, len(self._steps) - most)
        for i in range(self._forgotten, end):
            if self._steps[i].tensors:
                self._steps[i] = replace(self._steps[i], tensors=NO_TENSORS)
        self._forgotten = end

    def _new_steps(self, ask: Ask, wait: float) -> tuple[list[int], tuple[StepRecord, ...], int]:
        """(ids, steps, place after them)."""
        client, after = self._client, self._after["steps"]
        page = ask(client.steps, self.job, after, wait, tensors=self._whole)
        rows = page["steps"]
        return [int(row["id"]) for row in rows], tuple(map(_step, rows)), int(page["next"])

    def _once(self, question: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            answer = dict(question(*args, **kwargs))
        except UnreachableError:
            if self._absent_since is None:
                self._absent_since = time.monotonic()
            if self.absent_s > PATIENCE_S:
                raise
            raise _Absent from None
        self._absent_since = None
        return answer

    def view(self) -> JobView:
        """The job as known now."""
        return JobView(
            job=self.job,
            state=self.state,
            spec=self._shown["spec"],
            steps=tuple(self._steps),
            incidents=tuple(self._records["incidents"]),
            actions=tuple(self._records["actions"]),
            events=tuple(self._events),
            extra={
                **{k: self._shown[k] for k in ("job_dir", "reason", "nodes", "attempt")},
                # A controller of before doesn't say it.
                RANK_PEAK: self._shown.get(RANK_PEAK),
                "absent_s": self.absent_s,
            },
        )


def whole_view(client: Client, job: str) -> JobView:
    """Everything stored of a job at this moment; of its tensors, the newest ``WHOLE_STEPS``
    steps'."""
    following = Following(client, job, whole=False)
    while True:
        news = following.poll()
        if not news.events and not news.steps:
            following.fill()
            return following.view()


def _step(row: dict[str, Any]) -> StepRecord:
    return StepRecord.from_json({k: v for k, v in row.items() if k != "id"})
