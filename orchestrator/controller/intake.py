"""How a job is taken in: checked whole, its directory made, stored.

Promises: what can't work is refused before anything is stored; the same submission, however often
it comes under its key, is one job.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from launch.preflight import SPEC_FILE
from orchestrator.controller.changes import Changes
from orchestrator.controller.webhooks import check_webhook
from orchestrator.saved.resume_from import check_resume_from
from orchestrator.spec.errors import Source
from orchestrator.spec.job import JobSpec, spec_of, spec_yaml
from orchestrator.spec.storage import check_storage, no_job_directory
from orchestrator.spec.trial import check_factory_model
from orchestrator.store.database import Store
from orchestrator.store.rows import JobRow

DRAWS = 16
"""Ids that are drawn for a job at most, until there is one that no other has."""


class SubmitConflictError(ValueError):
    """The key was used to submit another job."""

    def __init__(self, key: str, job: str) -> None:
        super().__init__(key, job)
        self.key, self.job = key, job

    def __str__(self) -> str:
        return f"the key {self.key!r} was used to submit another job, {self.job}: take a new one"


class Intake:
    """Of one controller. ``jobs_dir``: where job directories go unless the spec says otherwise."""

    def __init__(
        self, store: Store, jobs_dir: Path, changes: Changes, clock: Callable[[], float]
    ) -> None:
        self._store = store
        self._jobs_dir = jobs_dir
        self._changes = changes
        self._clock = clock

    def validate(self, data: Mapping[str, Any], file: str) -> JobSpec:
        """The completed spec; raises ``SpecError``."""
        spec = spec_of(Source(file, dict(data), {}))
        check_storage(spec.checkpoint.storage_path or self._jobs_dir, file)
        check_factory_model(spec, file)
        check_webhook(spec, file, os.environ)
        check_resume_from(spec, file)
        return spec

    def submit(
        self, data: Mapping[str, Any], file: str, *, by: str = "", key: str | None = None
    ) -> JobRow:
        """Take a job in: checked, its directory made, stored. Raises ``SpecError``.

        ``by``: whose turn in the queue it takes; ``key``: theirs, under which the same job
        is taken once however often it comes. ``SubmitConflictError`` for another job under it.
        """
        spec = self.validate(data, file)
        if key and (known := self._store.job_of_key(key, by)) is not None:
            return _same_job(known, spec, key)
        folder = _new_folder(
            (spec.checkpoint.storage_path or self._jobs_dir).absolute(), spec, file
        )
        job = folder.name
        stored = self._store.add_job(job, spec, str(folder), file, self._clock(), by=by, key=key)
        if stored != job:
            # It came twice at the same time.
            shutil.rmtree(folder, ignore_errors=True)
            return _same_job(self._store.job(stored), spec, key or "")
        self._changes.notify()
        return self._store.job(job)


def _same_job(known: JobRow, spec: JobSpec, key: str) -> JobRow:
    if known.spec != spec:
        raise SubmitConflictError(key, known.id)
    return known


def _new_folder(root: Path, spec: JobSpec, file: str) -> Path:
    """The folder of a new job, with its spec; its name is the job's id, and no other job's. Raises
    ``SpecError``; then there is none."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder = _drawn(root, spec.name)
    except OSError as error:
        raise no_job_directory(root, file, error) from None
    try:
        (folder / "logs").mkdir()
        (folder / SPEC_FILE).write_text(spec_yaml(spec))
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise no_job_directory(root, file, error) from None
    return folder


def _drawn(root: Path, name: str) -> Path:
    """A folder that was not there: among thousands of jobs of one name, an id is drawn twice."""
    for _ in range(DRAWS):
        folder = root / f"{name}-{secrets.token_hex(3)}"
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise FileExistsError(errno.EEXIST, "all names that were drawn are taken")
