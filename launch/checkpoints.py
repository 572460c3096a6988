"""State on disk: written beside the run by the ranks, made valid by one rename.

``<job>/checkpoints/step-00000100/`` holds one safetensors file a rank and a manifest with
their digests. It comes out of its attempt's own folder (``launch.attempt_folder``, the fence):

    write_rank_file     (ranks) write into it
    commit_checkpoint   (supervisor, once all have) renames a step out of it

Promises: a folder named ``step-…`` is complete; an attempt that was given up can change nothing any
more; damage is found before anything is loaded; no pickle, no torch.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from launch import checkpoint_files
from launch.attempt_folder import (
    checkpoints_folder,
    grave_name,
    own_folder,
    refuse_if_over,
    retire,
)
from launch.checkpoint_files import (
    RankFile,
    complete_file,
    entries,
    is_absent,
    open_regular,
    sync_folder,
    what_is_wrong,
)
from launch.checkpoint_manifest import Checkpoint, ManifestError, read_manifest, write_manifest
from launch.digests import Payload
from launch.snapshots import (
    DamagedSnapshotError,
    MissingSnapshotError,
    SnapshotKey,
    StoredSnapshot,
    UnreadSnapshotError,
    refuse_damaged,
)

HOLD_S = 3600.0
"""How long a checkpoint that somebody reads is kept for that."""

_STAGED = re.compile(r"step-(\d+)-timeline-(\d+)")

logger = logging.getLogger(__name__)


class IncompleteCheckpointError(RuntimeError):
    """Not every rank's file is there; the folder stays as it is."""

    def __init__(self, step: int, missing: tuple[int, ...]) -> None:
        super().__init__(f"checkpoint of step {step}: no complete file of ranks {list(missing)}")
        self.step, self.missing = step, missing

    def __reduce__(self) -> tuple[type[IncompleteCheckpointError], tuple[int, tuple[int, ...]]]:
        return (type(self), (self.step, self.missing))


def write_rank_file(job_dir: Path, key: SnapshotKey, payload: Payload, digest: str) -> Path:
    """Write one rank's file of a checkpoint, durable and read back on return.

    Raises OSError if it can't be, AttemptOverError, or DamagedFileError.
    """
    root = checkpoints_folder(job_dir)
    folder = own_folder(root, key.attempt) / _staged_name(key.step, key.timeline)
    try:
        folder.mkdir(exist_ok=True)
        checkpoint_files.write_rank_file(folder, _rank_name(key.rank), payload, digest)
    except FileNotFoundError:
        refuse_if_over(root, key.attempt)
        raise
    return folder / _rank_name(key.rank)


def commit_checkpoint(
    job_dir: Path | str,
    step: int,
    attempt: int,
    ranks: Collection[int],
    *,
    timeline: int | None = None,
    num_to_keep: int = 3,
    run: Mapping[str, Any] | None = None,
    living: Callable[[Checkpoint], bool] | None = None,
) -> Checkpoint:
    """Make the files that all ``ranks`` wrote for ``step`` a checkpoint, in one rename.

    ``timeline`` None takes the newest one of the attempt that is complete; ``run`` is what is to
    be known of the job without reading them. Deletes what is superseded: checkpoints beyond
    ``num_to_keep``, of which those of a branch that was given up go first, later ones of such a
    branch, and unfinished folders of older steps (``bury`` gives their space back). What can't be
    looked at stays. ``living`` says which aren't given up; None: all but later ones of earlier
    attempts and timelines. Raises IncompleteCheckpointError, AttemptOverError or
    OSError; then nothing has changed.
    What the files hold was verified as they were written.
    """
    root = checkpoints_folder(Path(job_dir))
    own = own_folder(root, attempt)
    folder, at_timeline, files = _complete_folder(own, step, ranks, timeline)
    final = checkpoint_folder(job_dir, step)
    checkpoint = Checkpoint(final, step, attempt, at_timeline, files, dict(run or {}))
    try:
        write_manifest(folder, checkpoint)
        sync_folder(folder)
        _put_in_place(folder, final, own)
    except FileNotFoundError:
        refuse_if_over(root, attempt)
        raise
    # It is a checkpoint from here on, whatever else fails.
    try:
        sync_folder(own)
        sync_folder(root)
        # Not before: a crash must not find the older ones gone, and this one not there yet.
        _delete_superseded(root, own, checkpoint, num_to_keep, living)
    except OSError as error:
        logger.warning("checkpoint %s stands; older ones stay for now: %s", final, error)
    return checkpoint


def discard_step(job_dir: Path | str, step: int, attempt: int, timeline: int) -> None:
    """A checkpoint won't be completed: ``bury`` gives back what it took. Never raises."""
    own = own_folder(checkpoints_folder(Path(job_dir)), attempt)
    retire(own / _staged_name(step, timeline), own)


def hold(path: Path | str, holder: str) -> None:
    """Keep a checkpoint from being deleted while ``holder`` (a word) reads it, for ``HOLD_S``.

    Where that can't be noted, as in a folder that may only be read, nothing happens.
    """
    try:
        (Path(path) / f"held-by-{holder}").touch()
    except OSError as error:
        logger.warning("%s can't be held: %s", path, error)


def let_go(path: Path | str, holder: str) -> None:
    """End a ``hold``; there may be none."""
    try:
        (Path(path) / f"held-by-{holder}").unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s stays held for a while: %s", path, error)


def _log_left_out(folder: Path, why: str) -> None:
    logger.warning("checkpoint %s is left out: %s", folder, why)


def _log_unseen(folder: Path, error: OSError) -> None:
    logger.warning("%s can't be looked at: %s", folder, error)


def list_checkpoints(
    job_dir: Path | str,
    rollbacks: Mapping[int, int] | None = None,
    left_out: Callable[[Path, str], None] = _log_left_out,
    unseen: Callable[[Path, OSError], None] = _log_unseen,
) -> list[Checkpoint]:
    """Committed checkpoints with a good manifest, newest step first; contents unchecked.

    ``rollbacks``: the step each later timeline began at, by timeline. A checkpoint of an
    earlier timeline beyond that step belongs to what was rolled back, and is left out.
    ``left_out`` is told of the folders whose manifest is not good, and why; ``unseen`` of what the
    storage doesn't say anything of, one of them or the folder of all.
    """
    root = checkpoints_folder(Path(job_dir))
    found = []
    try:
        folders = entries(root, "step-")
    except OSError as error:
        unseen(root, error)
        return []
    for folder in reversed(folders):
        try:
            checkpoint = read_manifest(folder)
        except (OSError, ManifestError) as error:
            if isinstance(error, OSError) and not is_absent(error):
                unseen(folder, error)
            else:
                left_out(folder, str(error))
            continue
        later = (rollbacks or {}).items()
        if all(checkpoint.step <= to for at, to in later if at > checkpoint.timeline):
            found.append(checkpoint)
    return found


def newest_checkpoint(
    job_dir: Path | str,
    rollbacks: Mapping[int, int] | None = None,
    unseen: Callable[[Path, OSError], None] = _log_unseen,
) -> Checkpoint | None:
    """The newest checkpoint whose files are all as written; older ones when newer are damaged.

    Damage is logged, never raised. ``rollbacks`` and ``unseen`` as in ``list_checkpoints``.
    """
    for checkpoint in list_checkpoints(job_dir, rollbacks, unseen=unseen):
        try:
            problems = verify_checkpoint(checkpoint)
        except OSError as error:
            unseen(checkpoint.path, error)
            continue
        if not problems:
            return checkpoint
        logger.warning("checkpoint %s is left out: %s", checkpoint.path, "; ".join(problems))
    return None


def verify_checkpoint(checkpoint: Checkpoint, *, contents: bool = True) -> list[str]:
    """What is wrong with its files, one sentence each; with ``contents`` reads all of them.

    Raises OSError where the storage doesn't say.
    """
    files = checkpoint.files.values()
    found = (what_is_wrong(checkpoint.path, file, contents=contents) for file in files)
    return [problem for problem in found if problem is not None]


def read_rank_file(path: Path | str, rank: int, step: int) -> StoredSnapshot:
    """One rank's state from the checkpoint folder ``path``, checked.

    Raises MissingSnapshotError, UnreadSnapshotError or DamagedSnapshotError (rank, step, tier
    disk).
    """
    folder = Path(path)
    try:
        checkpoint = read_manifest(folder)
        file = checkpoint.files[rank]
        with os.fdopen(open_regular(folder / file.name), "rb") as stream:
            payload = np.fromfile(stream, dtype=np.uint8)
    except (OSError, KeyError) as error:
        away = isinstance(error, OSError) and not is_absent(error)
        kind = UnreadSnapshotError if away else MissingSnapshotError
        raise kind(rank, step, "disk", f"{folder}: {error}") from error
    except ManifestError as error:
        raise DamagedSnapshotError(rank, step, "disk", f"{folder}: {error}") from error
    if checkpoint.step != step:
        raise MissingSnapshotError(rank, step, "disk", f"{folder} is of step {checkpoint.step}")
    snapshot = StoredSnapshot(payload, file.digest)
    refuse_damaged(snapshot, rank, step, "disk")
    return snapshot


def checkpoint_folder(job_dir: str | Path, step: int) -> Path:
    """Where the complete checkpoint of a step lies."""
    return checkpoints_folder(Path(job_dir)) / f"step-{step:08d}"


def _staged_name(step: int, timeline: int) -> str:
    return f"step-{step:08d}-timeline-{timeline}"


def _rank_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _complete_folder(
    own: Path, step: int, ranks: Collection[int], timeline: int | None
) -> tuple[Path, int, dict[int, RankFile]]:
    """The staged folder that has every rank's file, its timeline, and the files."""
    missing: tuple[int, ...] = tuple(sorted(ranks))
    for at_timeline, folder in _staged_folders(own, step, timeline):
        found = {rank: complete_file(folder, _rank_name(rank)) for rank in sorted(ranks)}
        files = {rank: file for rank, file in found.items() if file is not None}
        missing = tuple(rank for rank in found if rank not in files)
        if not missing:
            return folder, at_timeline, files
    raise IncompleteCheckpointError(step, missing)


def _staged_folders(own: Path, step: int, timeline: int | None) -> list[tuple[int, Path]]:
    """(timeline, folder) of what was written for this step, newest timeline first."""
    found = []
    for folder in entries(own, f"step-{step:08d}-timeline-"):
        match = _STAGED.fullmatch(folder.name)
        if match and timeline in (None, int(match[2])):
            found.append((int(match[2]), folder))
    return sorted(found, reverse=True)


def _put_in_place(folder: Path, final: Path, own: Path) -> None:
    """Give a complete checkpoint its name; on an OSError all is as it was."""
    grave = None
    if final.exists():
        # The same step of an older branch. A crash between the two renames leaves the older
        # checkpoints to restart from.
        grave = own / grave_name(final)
        final.rename(grave)
    try:
        folder.rename(final)
    except OSError:
        if grave is not None:
            with suppress(OSError):  # a later attempt has taken over, or nothing helps
                grave.rename(final)
        raise


def _delete_superseded(
    root: Path,
    own: Path,
    newest: Checkpoint,
    num_to_keep: int,
    living: Callable[[Checkpoint], bool] | None,
) -> None:
    """What ``newest`` makes needless; nothing any more, should a later attempt have taken over."""
    kept: list[tuple[int, Checkpoint]] = []
    going: list[Checkpoint] = []
    for checkpoint in list_checkpoints(root.parent):
        try:
            # One that is known to be damaged must not take the place of one that isn't.
            damaged = bool(verify_checkpoint(checkpoint, contents=False))
        except OSError as error:
            _log_unseen(checkpoint.path, error)
            continue
        earlier = (checkpoint.attempt, checkpoint.timeline) < (newest.attempt, newest.timeline)
        passed_over = earlier and checkpoint.step > newest.step
        given_up = passed_over if living is None else not living(checkpoint)
        if damaged or (given_up and passed_over):
            going.append(checkpoint)
        else:
            # One that the attempt didn't start from may have been found damaged by a rank.
            kept.append((2 * given_up + passed_over, checkpoint))
    # The newest come first already.
    kept.sort(key=lambda entry: entry[0])
    for checkpoint in [*going, *(checkpoint for _, checkpoint in kept[num_to_keep:])]:
        if not _is_held(checkpoint.path):
            retire(checkpoint.path, own)
    for folder in entries(own, "step-"):
        match = _STAGED.fullmatch(folder.name)
        if match and int(match[1]) < newest.step:
            retire(folder, own)


def _is_held(folder: Path) -> bool:
    try:
        holds = entries(folder, "held-by-")
        return any(time.time() - hold.stat().st_mtime < HOLD_S for hold in holds)
    except OSError:
        return True
