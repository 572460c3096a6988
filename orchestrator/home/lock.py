"""Who has a home: one host and one controller at a time, or jobs would have two masters.

A lock of the kernel's on a file, held for as long as the process lives. Promises: it is free when
its process has ended, however that ended; who is refused is told who has it. Over a network it
holds as far as the file system carries ``flock`` (NFS 4 does); one that has no locks is told in
the log and nothing is held.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import Literal

from orchestrator.home.folder import Home

logger = logging.getLogger(__name__)

Role = Literal["host", "controller"]

_TAKEN = {errno.EAGAIN, errno.EACCES}
_LOOK_S = 0.05


class HomeTakenError(RuntimeError):
    """Another process has this role in the home."""

    def __init__(self, home: Path, role: str, holder: str) -> None:
        super().__init__(home, role, holder)
        self.home, self.role, self.holder = home, role, holder

    def __str__(self) -> str:
        who = f", {self.holder}" if self.holder else ""
        return f"another {self.role} has {self.home}{who}: end that one first, or name another home"


class HomeLock:
    """``role`` in ``home``, once ``take`` has returned, until the process' end."""

    def __init__(self, home: Home, role: Role) -> None:
        self._home = home.path
        self._role = role

    def take(self, wait_s: float = 0.0) -> None:
        """Raises HomeTakenError when it isn't free within ``wait_s`` seconds."""
        path = self._home / f"{self._role}.lock"
        # Python's files don't pass to programs that are started: nobody inherits the lock.
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        deadline = time.monotonic() + wait_s
        while not self._try(file, path):
            if time.monotonic() > deadline:
                holder = _holder(path)
                os.close(file)
                raise HomeTakenError(self._home, self._role, holder)
            time.sleep(_LOOK_S)
        told = {"pid": os.getpid(), "host": socket.gethostname()}
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(told).encode(), 0)

    def _try(self, file: int, path: Path) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                return False
            logger.warning("nothing keeps a second %s off: %s has no locks", self._role, path)
        return True


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        told = json.loads(path.read_text())
        return f"process {told['pid']} on {told['host']}"
    return ""
