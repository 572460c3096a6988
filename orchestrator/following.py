"""A job followed over the API: a ``JobView`` that grows with every poll."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from monitoring.job_view import JobView
from monitoring.records import StepRecord
from orchestrator.client import Client


@dataclass(frozen=True, slots=True)
class News:
    """What one poll brought."""

    events: tuple[dict[str, Any], ...]
    steps: tuple[StepRecord, ...]


class Following:
    """All that the API tells of one job, kept up to date by ``poll``."""

    def __init__(self, client: Client, job: str) -> None:
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
        page = client.patiently(client.steps, self.job, self._after["steps"], wait)
        steps = tuple(_step(row) for row in page["steps"])
        self._after["steps"] = page["next"]
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
            extra={"job_dir": self._shown["job_dir"], "reason": self._shown["reason"]},
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
