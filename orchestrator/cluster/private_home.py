"""The home of one ``octavo run``: beside the jobs while it runs, with its job afterwards.

Promises: a run that ends leaves nothing beside the jobs; what a job that could go on needs
(its controller's store) lies in the job's directory then; what a killed run left is put
away by the next one in the same folder, and never that of a run which may be alive.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from orchestrator.cluster.local import running_host
from orchestrator.home.folder import Home, HomeConfig, replace_file

PREFIX = ".octavo-"
OWNER = "owner.json"
PLACE = "controller"
"""Where a job's directory keeps the home of its run."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The process of ``octavo run`` that a home belongs to, as in ``owner.json``."""

    pid: int
    created: float
    """When the process was created, to tell it from a later one of the same number."""
    machine: str
    job_dir: str = ""
    """Directory of the job that was submitted to it; empty before."""

    @classmethod
    def this(cls) -> Owner:
        import psutil

        return cls(os.getpid(), psutil.Process().create_time(), socket.gethostname())

    def dead(self) -> bool:
        """Whether it certainly is; on another machine nobody can tell."""
        import psutil

        if self.machine != socket.gethostname():
            return False
        try:
            return abs(psutil.Process(self.pid).create_time() - self.created) > 0.01
        except psutil.NoSuchProcess:
            return True
        except psutil.Error:
            return False


class PrivateHome:
    """A new home in ``folder``; ``keep``: it stays there whatever happens."""

    def __init__(self, folder: Path, *, keep: bool = False) -> None:
        self.home = Home(folder / f"{PREFIX}{secrets.token_hex(4)}")
        self.home.create(HomeConfig(jobs_dir=folder))
        self._keep = keep
        self._owner = Owner.this()
        self._write()

    def belongs_to(self, job_dir: Path) -> None:
        """A job was submitted to it."""
        self._owner = replace(self._owner, job_dir=str(job_dir))
        self._write()

    def leave(self, *, needed: bool) -> Path | None:
        """Nothing runs in it any more; where it lies now, None if nowhere.

        ``needed``: the job could go on.
        """
        if self._keep:
            return self.home.path
        return _put_away(self.home.path, self._owner.job_dir if needed else "")

    def _write(self) -> None:
        # Without an owner nobody ever puts it away.
        if not self._keep:
            replace_file(self.home.path / OWNER, json.dumps(asdict(self._owner)))


def sweep(folder: Path) -> list[Path]:
    """Put away what killed runs left in ``folder``; where the homes of their jobs are now."""
    kept: list[Path] = []
    for path in sorted(folder.glob(f"{PREFIX}*")):
        try:
            owner = Owner(**json.loads((path / OWNER).read_text()))
        except (OSError, ValueError, TypeError):
            continue
        # A host outlives its run by the seconds that ending takes.
        if owner.dead() and running_host(Home(path)) is None:
            place = _put_away(path, owner.job_dir)
            kept += [place] if place else []
    return kept


def _put_away(path: Path, job_dir: str) -> Path | None:
    place = Path(job_dir) / PLACE
    if job_dir and place.parent.is_dir() and not place.exists():
        (path / OWNER).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            shutil.move(path, place)
            return place
    shutil.rmtree(path, ignore_errors=True)
    return None
