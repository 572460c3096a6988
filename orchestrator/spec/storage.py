"""Whether a job's directory can be made in the folder that its spec names.

Promises: nothing is left behind, and no folder is made; asked on the machine that will make it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from orchestrator.spec.errors import Problem, SpecError


def check_storage(folder: Path, file: str) -> None:
    """Raise ``SpecError`` if no directory can be made in ``folder``, which need not exist yet.

    ``file``: the job file, as the user named it.
    """
    folder = folder.absolute()
    try:
        nearest = next(p for p in (folder, *folder.parents) if p.exists())
        # Permissions don't tell of file systems that hold no files, such as /proc: trying does.
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise no_job_directory(folder, file, error) from None


def no_job_directory(folder: Path, file: str, error: OSError) -> SpecError:
    """What is told where a job's directory can't be made in ``folder``."""
    message = f"the job directory can't be made: {error.strerror or error}"
    remedy = "name a folder that the controller may write to"
    return SpecError([Problem(file, "checkpoint.storage_path", str(folder), message, remedy)])
