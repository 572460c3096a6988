"""``spec.yaml`` in a job's folder: a copy for people; what counts is in the store.

Promises: whoever is told that it can't be written has changed nothing; a reader never sees half of
a file, nor what the store didn't take.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from launch.preflight import SPEC_FILE
from orchestrator.spec.errors import Problem, SpecError
from orchestrator.spec.job import JobSpec, spec_yaml

logger = logging.getLogger(__name__)


@contextmanager
def replaced_copy(folder: Path, spec: JobSpec, file: str) -> Iterator[None]:
    """Write ``spec`` beside the copy that is there, and put it in its place once the body, which
    stores it, is through. Raises ``SpecError`` before that; ``file``: as what a person named it."""
    beside = folder / f".{SPEC_FILE}.{secrets.token_hex(3)}"
    try:
        try:
            beside.write_text(spec_yaml(spec))
        except OSError as error:
            raise _not_written(folder, file, error) from None
        yield
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise
    try:
        beside.replace(folder / SPEC_FILE)
    except OSError:
        # The job goes on as the store has it.
        logger.exception("the copy of the spec in %s is an older one", folder)


def _not_written(folder: Path, file: str, error: OSError) -> SpecError:
    message = f"{SPEC_FILE} can't be written there: {error.strerror or error}; the job is as it was"
    remedy = "make room, or mend the path, and ask again"
    return SpecError([Problem(file, "checkpoint.storage_path", str(folder), message, remedy)])
