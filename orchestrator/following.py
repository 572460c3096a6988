"""A job followed over the API: a ``JobView`` that grows with every poll."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from monitoring.job_view import JobView
from monitoring.records import StepRecord
from monitoring.tensor_stats import NO_TENSORS
from orchestrator.client import Client

CAUGHT_UP = 100
"""Steps that a page has fewer of where it is the newest one."""


@dataclass(frozen=True, slots=True)
class News:
    """What one poll brought."""

    events: tuple[dict[str, Any], ...]
    steps: tuple[StepRecord, ...]


class Following:
    """All that the API tells of one job, kept up to date by ``poll``."""

    def __init__(self, client: Client, job: str, *, whole: bool = True) -> None:
        """``whole``: with the statistics of every step's tensors; else of the newest alone, which
        is what a live view shows: those of a long job would be gigabytes."""
        self._whole = whole
        self._client = client
        self._shown = client.job(job)
        self.job = str(self._shown["id"])
        self.state = str(self._shown["state"])
        self.settled = False
        self._events: list[dict[str, Any]] = []
        self._steps: list[StepRecord] = []
        self._records: dict[str, Any] = {"incidents": [], "actions": []}
        self._after = {"events": 0, "steps": 0}

    def poll(self, wait: float = 0.0) -> News:
        """Ask for what is new; held back up to ``wait`` seconds while there is nothing."""
        client = self._client
        # Steps come several a second, so it is them that a poll waits for.
        steps = self._new_steps(wait)
        told = client.patiently(client.events, self.job, self._after["events"])
        events = tuple(told["events"])
        self._after["events"] = told["next"]
        if events:
            # Incidents and actions are always told in an event too.
            self._records = client.patiently(client.records, self.job)
            self._shown = client.patiently(client.job, self.job)
        self._steps += steps
        self._events += events
        self.state = told["state"]
        self.settled = bool(told["settled"]) and not events and not steps
        return News(events, steps)

    def _new_steps(self, wait: float) -> tuple[StepRecord, ...]:
        client, after = self._client, self._after["steps"]
        page = client.patiently(client.steps, self.job, after, wait, tensors=self._whole)
        rows = page["steps"]
        self._after["steps"] = page["next"]
        if 0 < len(rows) < CAUGHT_UP and not self._whole:
            if self._steps:
                self._steps[-1] = replace(self._steps[-1], tensors=NO_TENSORS)
            last = client.patiently(client.steps, self.job, rows[-1]["id"] - 1)
            rows = [*rows[:-1], *last["steps"][:1]]
        return tuple(map(_step, rows))

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
            extra={k: self._shown[k] for k in ("job_dir", "reason", "nodes", "attempt")},
        )


def whole_view(client: Client, job: str) -> JobView:
    """Everything stored of a job at this moment."""
    following = Following(client, job)
    while True:
        news = following.poll()
        if not news.events and not news.steps:
            return following.view()


def _step(row: dict[str, Any]) -> StepRecord:
    return StepRecord.from_json({k: v for k, v in row.items() if k != "id"})
