"""State on disk: written beside the run by the ranks, made valid by one rename.

``<job>/checkpoints/step-00000100/`` holds one safetensors file a rank and a manifest with
their digests. Ranks write into ``.tmp-step-…-attempt-…-timeline-…``, so that an attempt
that was given up can't mix its files into another's; ``commit_checkpoint`` (called once,
by the supervisor) writes the manifest and renames the folder. Promises: a folder without
the prefix is complete; damage is found before anything is loaded; no pickle, no torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from launch.snapshots import (
    DamagedSnapshotError,
    MissingSnapshotError,
    Payload,
    SnapshotKey,
    StoredSnapshot,
    refuse_damaged,
)

MANIFEST = "manifest.json"
FORMAT = 1

_STAGED = re.compile(r"\.tmp-step-(\d+)-attempt-(\d+)-timeline-(\d+)")

logger = logging.getLogger(__name__)


class IncompleteCheckpointError(RuntimeError):
    """Not every rank's file is there; the folder stays as it is."""

    def __init__(self, step: int, missing: tuple[int, ...]) -> None:
        super().__init__(f"checkpoint of step {step}: no complete file of ranks {list(missing)}")
        self.step, self.missing = step, missing

    def __reduce__(self) -> tuple[type[IncompleteCheckpointError], tuple[int, tuple[int, ...]]]:
        return (type(self), (self.step, self.missing))


@dataclass(frozen=True, slots=True)
class RankFile:
    """One rank's state in a checkpoint."""

    name: str
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint, as its manifest tells."""

    path: Path
    step: int
    attempt: int
    timeline: int
    files: Mapping[int, RankFile]
    """By rank."""


def write_rank_file(job_dir: Path, key: SnapshotKey, payload: Payload, digest: str) -> Path:
    """Write one rank's file of a checkpoint, durable on return; OSError if it can't be."""
    folder = _checkpoints(job_dir) / _staged_name(key.step, key.attempt, key.timeline)
    folder.mkdir(parents=True, exist_ok=True)
    flat = np.frombuffer(payload, dtype=np.uint8)
    path = folder / _rank_name(key.rank)
    _write_durably(path, flat.data)
    # Beside the file and after it: says that the file is complete, and what it must be.
    file = RankFile(path.name, flat.nbytes, digest)
    _write_durably(path.with_suffix(".json"), json.dumps(asdict(file)).encode())
    _sync_folder(folder)
    return path


def commit_checkpoint(
    job_dir: Path | str,
    step: int,
    attempt: int,
    ranks: Collection[int],
    *,
    timeline: int | None = None,
    num_to_keep: int = 3,
) -> Checkpoint:
    """Make the files that all ``ranks`` wrote for ``step`` a checkpoint, in one rename.

    ``timeline`` None takes the newest one of the attempt that is complete. Deletes what is
    superseded: checkpoints beyond ``num_to_keep``, later ones of a branch that was given
    up, and unfinished folders of older attempts or steps. Raises IncompleteCheckpointError,
    or OSError; then nothing has changed.
    """
    root = _checkpoints(Path(job_dir))
    folder, at_timeline, files = _complete_folder(root, step, attempt, ranks, timeline)
    final = root / f"step-{step:08d}"
    checkpoint = Checkpoint(final, step, attempt, at_timeline, files)
    _write_durably(folder / MANIFEST, json.dumps(_to_json(checkpoint), indent=1).encode())
    _sync_folder(folder)
    if final.exists():
        # The same step of an older branch. A crash between the two renames leaves the
        # older checkpoints to restart from.
        _retire(final)
    folder.rename(final)
    _sync_folder(root)
    _delete_superseded(root, checkpoint, num_to_keep)
    return checkpoint


def list_checkpoints(
    job_dir: Path | str, rollbacks: Mapping[int, int] | None = None
) -> list[Checkpoint]:
    """Committed checkpoints with a readable manifest, newest step first; contents unchecked.

    ``rollbacks``: the step each later timeline began at, by timeline. A checkpoint of an
    earlier timeline beyond that step belongs to what was rolled back, and is left out.
    """
    root = _checkpoints(Path(job_dir))
    found = []
    for folder in sorted(root.glob("step-*"), reverse=True):
        try:
            checkpoint = _from_json(folder, json.loads((folder / MANIFEST).read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning(
                "checkpoint %s is left out, its manifest is unreadable: %s", folder, error
            )
            continue
        later = (rollbacks or {}).items()
        if all(checkpoint.step <= to for at, to in later if at > checkpoint.timeline):
            found.append(checkpoint)
    return found


def newest_checkpoint(
    job_dir: Path | str, rollbacks: Mapping[int, int] | None = None
) -> Checkpoint | None:
    """The newest checkpoint whose files are all as written; older ones when newer are damaged.

    Damage is logged, never raised. ``rollbacks`` as in ``list_checkpoints``.
    """
    for checkpoint in list_checkpoints(job_dir, rollbacks):
        problems = verify_checkpoint(checkpoint)
        if not problems:
            return checkpoint
        logger.warning("checkpoint %s is left out: %s", checkpoint.path, "; ".join(problems))
    return None


def verify_checkpoint(checkpoint: Checkpoint) -> list[str]:
    """What is wrong with its files, one sentence each; reads all of them."""
    problems = []
    for file in checkpoint.files.values():
        path = checkpoint.path / file.name
        try:
            size = path.stat().st_size
            if size != file.nbytes:
                problems.append(f"{file.name} has {size} bytes, {file.nbytes} were written")
                continue
            with path.open("rb") as stream:
                found = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=32))
        except OSError as error:
            problems.append(f"{file.name} can't be read: {error.strerror}")
            continue
        if found.hexdigest() != file.digest:
            problems.append(f"{file.name} has another digest than was written")
    return problems


def read_rank_file(path: Path | str, rank: int, step: int) -> StoredSnapshot:
    """One rank's state from the checkpoint folder ``path``, checked.

    Raises MissingSnapshotError or DamagedSnapshotError (rank, step, tier disk).
    """
    folder = Path(path)
    try:
        checkpoint = _from_json(folder, json.loads((folder / MANIFEST).read_text()))
        file = checkpoint.files[rank]
        payload = np.fromfile(folder / file.name, dtype=np.uint8)
    except (OSError, KeyError) as error:
        raise MissingSnapshotError(rank, step, "disk", f"{folder}: {error}") from error
    except (ValueError, TypeError) as error:
        raise DamagedSnapshotError(rank, step, "disk", f"{folder}: {error}") from error
    if checkpoint.step != step:
        raise MissingSnapshotError(rank, step, "disk", f"{folder} is of step {checkpoint.step}")
    snapshot = StoredSnapshot(payload, file.digest)
    refuse_damaged(snapshot, rank, step, "disk")
    return snapshot


def _checkpoints(job_dir: Path) -> Path:
    return job_dir / "checkpoints"


def _staged_name(step: int, attempt: int, timeline: int) -> str:
    return f".tmp-step-{step:08d}-attempt-{attempt}-timeline-{timeline}"


def _rank_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _complete_folder(
    root: Path, step: int, attempt: int, ranks: Collection[int], timeline: int | None
) -> tuple[Path, int, dict[int, RankFile]]:
    """The staged folder that has every rank's file, its timeline, and the files."""
    missing: tuple[int, ...] = tuple(sorted(ranks))
    for at_timeline, folder in _staged_folders(root, step, attempt, timeline):
        files, missing = _complete_files(folder, ranks)
        if not missing:
            return folder, at_timeline, files
    raise IncompleteCheckpointError(step, missing)


def _staged_folders(
    root: Path, step: int, attempt: int, timeline: int | None
) -> list[tuple[int, Path]]:
    """(timeline, folder) of what was written for this step, newest timeline first."""
    found = []
    for folder in root.glob(f".tmp-step-{step:08d}-attempt-{attempt}-timeline-*"):
        match = _STAGED.fullmatch(folder.name)
        if match and timeline in (None, int(match[3])):
            found.append((int(match[3]), folder))
    return sorted(found, reverse=True)


def _complete_files(
    folder: Path, ranks: Collection[int]
) -> tuple[dict[int, RankFile], tuple[int, ...]]:
    files, missing = {}, []
    for rank in sorted(ranks):
        path = folder / _rank_name(rank)
        try:
            file = RankFile(**json.loads(path.with_suffix(".json").read_text()))
            complete = path.stat().st_size == file.nbytes
        except (OSError, ValueError, TypeError):
            complete = False
        if complete:
            files[rank] = file
        else:
            missing.append(rank)
    return files, tuple(missing)


def _to_json(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": checkpoint.step,
        "attempt": checkpoint.attempt,
        "timeline": checkpoint.timeline,
        "files": {str(rank): asdict(file) for rank, file in checkpoint.files.items()},
    }


def _from_json(folder: Path, manifest: Mapping[str, Any]) -> Checkpoint:
    if manifest["format"] != FORMAT:
        raise ValueError(f"format {manifest['format']} is not {FORMAT}")
    files = {int(rank): RankFile(**file) for rank, file in manifest["files"].items()}
    return Checkpoint(folder, manifest["step"], manifest["attempt"], manifest["timeline"], files)


def _delete_superseded(root: Path, newest: Checkpoint, num_to_keep: int) -> None:
    branch = (newest.attempt, newest.timeline)
    kept = []
    for checkpoint in list_checkpoints(root.parent):
        given_up = (checkpoint.attempt, checkpoint.timeline) < branch
        if given_up and checkpoint.step > newest.step:
            _retire(checkpoint.path)
        else:
            kept.append(checkpoint)
    for checkpoint in kept[num_to_keep:]:
        _retire(checkpoint.path)
    for folder in root.glob(".tmp-step-*"):
        match = _STAGED.fullmatch(folder.name)
        if match and (
            int(match[2]) < newest.attempt
            or (int(match[2]) == newest.attempt and int(match[1]) < newest.step)
        ):
            shutil.rmtree(folder, ignore_errors=True)


def _retire(folder: Path) -> None:
    """Take a checkpoint away: renamed first, so that no half of it is ever found."""
    grave = folder.with_name(f".old-{folder.name}")
    shutil.rmtree(grave, ignore_errors=True)
    try:
        folder.rename(grave)
    except OSError as error:
        logger.warning("%s can't be deleted: %s", folder, error)
        return
    shutil.rmtree(grave, ignore_errors=True)


def _write_durably(path: Path, data: bytes | memoryview) -> None:
    partial = path.with_name(f"{path.name}.partial")
    with _removed_on_error(partial), partial.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    partial.rename(path)


@contextmanager
def _removed_on_error(path: Path) -> Iterator[None]:
    """A full disk gets its space back."""
    try:
        yield
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
