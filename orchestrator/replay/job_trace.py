"""All that is stored of a job and decides what its supervisors did: the input of a replay.

Promises: read whole from the store or over the API, the same either way, and nothing is
made up: what an older Octavo didn't store is told in ``not_kept``. Of a job that goes on, the
newest record is left out, for what it led to may still be under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import takewhile
from typing import Any

from monitoring.records import Incident, StepRecord
from orchestrator.actions import Action
from orchestrator.api.client import Client
from orchestrator.lifecycle import JobState
from orchestrator.protocol import StepContext
from orchestrator.spec.job import JobSpec
from orchestrator.store.database import Store
from orchestrator.store.rows import JobRow

PAGE = 500
"""Rows read at a time."""


@dataclass(frozen=True, slots=True)
class Begun:
    """An attempt."""

    attempt: int
    new_supervisor: bool
    """Its detectors came from the store; else they are those of the attempt before."""
    starts: tuple[int, ...]
    """Step at which its ranks were given out, then those that they went down to where copies
    were damaged; (): they never were given out."""
    kept: int | None = None
    """Snapshots that its ranks' rings held; None: ``snapshots.keep``."""


@dataclass(frozen=True)
class JobTrace:
    """The records of one job, each kind in the order in which it was stored."""

    job: str
    spec: JobSpec
    steps: Iterable[StepRecord]
    """Read once, as it is gone through."""
    attempts: tuple[Begun, ...]
    incidents: tuple[Incident, ...]
    actions: tuple[Action, ...]
    contexts: tuple[StepContext, ...]
    goes_on: bool = False
    """More may have come since; what is there is read up to one moment."""
    not_kept: tuple[str, ...] = ()
    decided_by: tuple[str, ...] = ()
    """Other versions of Octavo than this one: their detectors and rungs may have been others."""
    """What an exact replay needs and these records lack."""


def trace_of_store(store: Store, row: JobRow) -> JobTrace:
    """A job's records in ``store``."""
    at_rest = row.state.terminal or row.state is JobState.PAUSED
    newest = store.past.newest_step(row.id)
    return _trace(
        row.id,
        row.spec,
        newest,
        not at_rest,
        lambda after: store.past.steps(row.id, after, PAGE),
        _pages(lambda after: store.past.events(row.id, after, PAGE)),
        store.past.incidents(row.id),
        store.past.actions(row.id),
        store.past.contexts(row.id),
    )


def trace_of_client(client: Client, job: str) -> JobTrace:
    """The same over the API; raises the client's errors."""
    shown = client.job(job)
    records = client.records(job)
    return _trace(
        shown["id"],
        JobSpec.model_validate(shown["spec"]),
        int(records["newest_step"]),
        not shown["settled"],
        lambda after: client.steps(job, after)["steps"],
        client.follow_events(job, follow=False),
        [Incident.from_json(row) for row in records["incidents"]],
        [Action.from_json(row) for row in records["actions"]],
        [StepContext.from_json(row) for row in records.get("contexts", ())],
    )


def _trace(
    job: str,
    spec: JobSpec,
    newest: int,
    goes_on: bool,
    steps: Callable[[int], Sequence[Mapping[str, Any]]],
    events: Iterable[Mapping[str, Any]],
    incidents: Sequence[Incident],
    actions: Sequence[Action],
    contexts: Sequence[StepContext],
) -> JobTrace:
    begun: dict[int, Begun] = {}
    missing = ""
    others: set[str] = set()
    for event in events:
        detail = event["detail"]
        if event["kind"] == "attempt":
            number = int(detail["attempt"])
            if "new_supervisor" not in detail:
                missing = (
                    "these records are of an older Octavo, which did not store the snapshots that "
                    "could be gone back to, nor which supervisor began an attempt"
                )
            others.add(str(detail.get("octavo", "of another version")))
            begun[number] = Begun(number, bool(detail.get("new_supervisor", True)), ())
        elif event["kind"] in ("attempt_started", "restored_older"):
            number = int(detail["attempt"])
            starts = (*begun[number].starts, int(detail["step"]))
            begun[number] = replace(begun[number], starts=starts)
        elif event["kind"] == "fewer_snapshots":
            number = int(detail["attempt"])
            begun[number] = replace(begun[number], kept=int(detail["kept"]))

    def within(row: Mapping[str, Any]) -> bool:
        # Of what the newest record led to, nobody knows yet while the job goes on.
        return bool(row["id"] < newest if goes_on else row["id"] <= newest)

    return JobTrace(
        job=job,
        spec=spec,
        steps=(_record(row) for row in takewhile(within, _pages(steps))),
        attempts=tuple(begun[number] for number in sorted(begun)),
        incidents=tuple(incidents),
        actions=tuple(actions),
        contexts=tuple(contexts),
        goes_on=goes_on,
        not_kept=(missing,) if missing else (),
        decided_by=tuple(sorted(others - {version("octavo")})),
    )


def _pages(read: Callable[[int], Sequence[Mapping[str, Any]]]) -> Iterator[Mapping[str, Any]]:
    after = 0
    while rows := read(after):
        yield from rows
        after = rows[-1]["id"]


def _record(row: Mapping[str, Any]) -> StepRecord:
    return StepRecord.from_json({k: v for k, v in row.items() if k != "id"})
