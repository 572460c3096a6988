"""Which job a request is about, and whether who asks may look at it or control it."""

from __future__ import annotations

from orchestrator.access import Caller
from orchestrator.api.docs import Reader, Submitter
from orchestrator.api.limits import JobWord
from orchestrator.api.problems import Kind, RefusalError
from orchestrator.store.database import Store
from orchestrator.store.rows import JobRow


class Found:
    """Dependencies of routes: the job that ``{job}`` means, an id, a name or a unique beginning."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def shown(self, job: JobWord, _: Reader) -> JobRow:
        """A job to look at; every role may look at all."""
        return self._store.pages.job(job)

    def controlled(self, job: JobWord, caller: Submitter) -> JobRow:
        """A job to control: one's own, or any for an admin."""
        row = self._store.pages.job(job)
        check_controls(caller, row)
        return row


def check_controls(caller: Caller, row: JobRow) -> None:
    """Raises ``RefusalError`` where ``caller`` may not control the job."""
    if caller.controls(row.submitted_by):
        return
    whose = f"{row.submitted_by}'s" if row.submitted_by else "nobody's in particular"
    told = f"{row.id} is {whose}; the token {caller.name!r} may control only its own jobs"
    raise RefusalError(Kind.NOT_YOUR_JOB, told)
