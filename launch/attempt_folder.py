"""The folder that all of an attempt's writes to the job's storage go through: the fence.

In ``<job>/checkpoints`` each attempt has its own, ``.attempt-N/``:

    open_attempt        (supervisor) makes it, and renames those of earlier attempts away
    put_file            renames what is told of the job's end out of it
    retire              renames into it what is to go, and ``bury`` deletes that

and checkpoints are written in it and renamed out of it (``launch.checkpoints``). So an attempt that
was given up can change nothing any more, whatever it was in the middle of, and however late it
wakes up: the folder that it would rename from, or to, has gone.
"""

from __future__ import annotations

import logging
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

from launch.checkpoint_files import entries, sync_folder

_ATTEMPT = re.compile(r"\.attempt-(\d+)")

logger = logging.getLogger(__name__)


class AttemptOverError(RuntimeError):
    """A write of an attempt that was given up: another one has the job's checkpoints."""

    def __init__(self, attempt: int, detail: str) -> None:
        super().__init__(f"attempt {attempt} is over: {detail}")
        self.attempt, self.detail = attempt, detail

    def __reduce__(self) -> tuple[type[AttemptOverError], tuple[int, str]]:
        return (type(self), (self.attempt, self.detail))


def open_attempt(job_dir: Path | str, attempt: int) -> None:
    """Take the checkpoints over for ``attempt``, before any rank of it runs.

    Asked again by the same attempt it changes nothing; ``bury`` gives back what earlier ones took.
    Raises AttemptOverError when a later one has them, or OSError.
    """
    root = checkpoints_folder(Path(job_dir))
    own = own_folder(root, attempt)
    made = not own.exists()
    refuse_if_over(root, attempt)
    own.mkdir(parents=True, exist_ok=True)
    # Whoever comes later has made his folder before he looks; so either he sees ours, or we his.
    try:
        refuse_if_over(root, attempt)
    except AttemptOverError:
        if made:
            shutil.rmtree(own, ignore_errors=True)
        raise
    for folder in entries(root, ".attempt-"):
        match = _ATTEMPT.fullmatch(folder.name)
        if match and int(match[1]) < attempt:
            # Another supervisor of this attempt may have done it.
            with suppress(FileNotFoundError):
                folder.rename(root / f".given-up-{match[1]}-{time.time_ns()}")
    sync_folder(root)
    sync_folder(root.parent)


def attempt_is_open(job_dir: Path | str, attempt: int) -> bool:
    """Whether what ``open_attempt`` made is there. Raises OSError where the storage doesn't say."""
    return own_folder(checkpoints_folder(Path(job_dir)), attempt).exists()


def put_file(job_dir: Path | str, attempt: int, name: str, text: str) -> None:
    """Make ``text`` the file ``name`` in the job's folder, in one rename.

    Raises AttemptOverError when a later attempt has the job, or OSError; the file is then as it
    was.
    """
    open_attempt(job_dir, attempt)
    root = checkpoints_folder(Path(job_dir))
    beside = own_folder(root, attempt) / name
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(Path(job_dir) / name)
    except FileNotFoundError:
        refuse_if_over(root, attempt)
        raise


def bury(job_dir: Path | str, attempt: int) -> None:
    """Delete what ``attempt`` and those before it are done with; takes as long as the disk does.
    Never raises: what is left is deleted the next time."""
    root = checkpoints_folder(Path(job_dir))
    try:
        graves = entries(root, ".given-up-") + entries(own_folder(root, attempt), "old-")
    except OSError as error:
        logger.warning("%s: nothing is deleted for now: %s", root, error)
        return
    for grave in graves:
        shutil.rmtree(grave, ignore_errors=True)


def checkpoints_folder(job_dir: Path) -> Path:
    """Where a job's checkpoints and its attempts' folders are."""
    return job_dir / "checkpoints"


def own_folder(root: Path, attempt: int) -> Path:
    """The folder of ``attempt`` in ``checkpoints_folder``."""
    return root / f".attempt-{attempt}"


def refuse_if_over(root: Path, attempt: int) -> None:
    """Raises AttemptOverError when a later attempt has the job."""
    if (newest := _newest_attempt(root)) > attempt:
        raise AttemptOverError(attempt, f"attempt {newest} has taken over")


def grave_name(folder: Path) -> str:
    """A name in an attempt's folder for what is to be deleted."""
    return f"old-{folder.name}-{time.time_ns()}"


def retire(folder: Path, own: Path) -> None:
    """Take a folder away by one rename, so that no half of it is ever found."""
    try:
        folder.rename(own / grave_name(folder))
    except FileNotFoundError:
        return  # nothing there, or a later attempt has taken over
    except OSError as error:
        logger.warning("%s can't be deleted: %s", folder, error)


def _newest_attempt(root: Path) -> int:
    matches = (_ATTEMPT.fullmatch(folder.name) for folder in entries(root, ".attempt-"))
    return max((int(match[1]) for match in matches if match), default=-1)
