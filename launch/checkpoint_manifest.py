"""What a checkpoint's folder says of itself: its manifest, sealed with a digest of its own.

Promises: what was changed since, or is of another release, is told from what was written; no
pickle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launch.checkpoint_files import RankFile, read_small, write_durably
from launch.digests import digest_of

MANIFEST = "manifest.json"
FORMAT = 4


class ManifestError(ValueError):
    """A folder is no checkpoint, by its manifest; the message says why."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint, as its manifest tells."""

    path: Path
    step: int
    attempt: int
    timeline: int
    files: Mapping[int, RankFile]
    """By rank."""
    run: Mapping[str, Any] = field(default_factory=dict)
    """What whoever committed it said of the job, for JSON."""


def write_manifest(folder: Path, checkpoint: Checkpoint) -> None:
    """Into ``folder``, where the files of ``checkpoint`` are; durable on return, or OSError."""
    write_durably(folder / MANIFEST, json.dumps(_to_json(checkpoint), indent=1).encode())


def read_manifest(folder: Path | str) -> Checkpoint:
    """What the checkpoint ``folder`` says of itself; raises OSError or ManifestError."""
    folder = Path(folder)
    text = read_small(folder / MANIFEST)
    try:
        told = json.loads(text)
        if told["format"] != FORMAT:
            raise ManifestError(f"its format is {told['format']!r}, this is {FORMAT}")
        if told.pop("digest") != manifest_digest(told):
            raise ManifestError("its manifest has another digest than was written")
        files = {int(rank): RankFile(**file) for rank, file in told["files"].items()}
        step, attempt, timeline = numbers = told["step"], told["attempt"], told["timeline"]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ManifestError(f"its step, attempt and timeline are {numbers}")
        if not isinstance(told["run"], dict):
            raise ManifestError("it doesn't say what it is of")
        return Checkpoint(folder, step, attempt, timeline, files, told["run"])
    except ManifestError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ManifestError(f"its manifest can't be read: {error!r}") from error


def _to_json(checkpoint: Checkpoint) -> dict[str, Any]:
    told = {
        "format": FORMAT,
        "step": checkpoint.step,
        "attempt": checkpoint.attempt,
        "timeline": checkpoint.timeline,
        "run": dict(checkpoint.run),
        "files": {str(rank): asdict(file) for rank, file in checkpoint.files.items()},
    }
    return {**told, "digest": manifest_digest(told)}


def manifest_digest(told: Mapping[str, Any]) -> str:
    """Of all of a manifest but this."""
    text = json.dumps(told, sort_keys=True).encode()
    return digest_of(text)
