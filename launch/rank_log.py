"""Writing a rank's log: log records, prints and last words of its process into one rotated file.

    with rank_log(assignment.log_path, attempt, rank) as log:
        log.step = lambda: loop.step_of_log
        …

Log records and what Python prints become objects (``launch.log_lines``). File descriptors 1 and 2
are the file itself, without a pipe or a process in between: what a C library writes, and the
traceback with which the process dies, are in it at once.

Promises: a record is one write, so that threads never tear each other's; the file is a new one from
``MOST_BYTES`` on and ``KEPT_FILES`` old ones stay, named as ``launch.log_files`` reads them; a disk
that is full, or a folder that can't be written, costs lines and never the training; what Python
writes has no value of an environment variable in it that is named as a secret.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from launch.log_files import KEPT_FILES, dropped, sealed_name
from launch.log_lines import LogLine, written
from monitoring.secrets import secrets_of, without

MOST_BYTES = 16 * 1024 * 1024
"""Size from which a file is closed."""
LOOK_S = 1.0
"""Seconds between two looks at what was written past us."""

logger = logging.getLogger(__name__)


class RankLog(logging.Handler):
    """The open log of one rank; a handler for log records, and what prints go through."""

    def __init__(self, path: Path, attempt: int, rank: int, most_bytes: int = MOST_BYTES) -> None:
        """Raises OSError where the file can't be opened."""
        super().__init__()
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.step: Callable[[], int | None] = lambda: None
        """What a line says that it was written in."""
        self.lost = 0
        """Lines that the disk had no room for."""
        self._attempt, self._rank = attempt, rank
        self._most_bytes = most_bytes
        self._writing = threading.RLock()
        self._secrets = secrets_of(os.environ)
        self._file = _opened(path)
        self._shared: list[int] = [self._file]
        """Descriptors that are this file."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
            if record.exc_info:
                message += "\n" + (self.formatter or _FORMATTER).formatException(record.exc_info)
            if record.stack_info:
                message += "\n" + record.stack_info
        except Exception as error:  # noqa: BLE001 - a wrong log call is told, and no more
            message = f"{record.msg!r} could not be put together: {error}"
        self.write(record.levelname, message, record.name, record.created)

    def write(self, level: str, message: str, name: str = "", at: float | None = None) -> None:
        """One line; never raises."""
        told = without(message, self._secrets)
        line = LogLine(told, level, at or time.time(), self._attempt, self._rank, self._now(), name)
        with self._writing:
            try:
                os.write(self._file, written(line))
                if self.lost:
                    lost, self.lost = self.lost, 0
                    self.write("WARNING", f"{lost} lines of this log were lost", __name__)
                self.rotate()
            except OSError:
                self.lost += 1

    def rotate(self) -> None:
        """Begin a new file where this one is long enough. Raises OSError."""
        with self._writing:
            if os.fstat(self._file).st_size < self._most_bytes:
                return
            # A new file first, then all that write to the old one, then the names: no write of
            # this process can come into a file that readers take to be complete.
            fresh = self.path.with_name(f".{self.path.name}.next")
            descriptor = _opened(fresh)
            for number in self._shared:
                os.dup2(descriptor, number)
            os.close(descriptor)
            self.path.rename(sealed_name(self.path))
            fresh.rename(self.path)
            for old in dropped(self.path, KEPT_FILES):
                old.unlink(missing_ok=True)

    @contextmanager
    def taking_output(self) -> Iterator[None]:
        """File descriptors 1 and 2, and what Python prints, come here; then they are put back."""
        kept = {number: os.dup(number) for number in (1, 2)}
        streams = sys.stdout, sys.stderr
        _flush_output()
        mine = _Printed(self, "STDOUT", 1), _Printed(self, "STDERR", 2)
        done = threading.Event()
        looking = threading.Thread(target=self._look, args=(done,), name="rank-log", daemon=True)
        try:
            for number in kept:
                os.dup2(self._file, number)
            self._shared += kept
            sys.stdout, sys.stderr = mine
            looking.start()
            yield
        finally:
            done.set()
            for printed in mine:
                printed.flush()
            sys.stdout, sys.stderr = streams
            _flush_output()
            with self._writing:
                self._shared = [self._file]
                for number, copy in kept.items():
                    os.dup2(copy, number)
                    os.close(copy)

    def close(self) -> None:
        super().close()
        with suppress(OSError):
            os.close(self._file)

    def _look(self, done: threading.Event) -> None:
        """Rotation for what is written without us."""
        while not done.wait(LOOK_S):
            with suppress(OSError):
                self.rotate()

    def _now(self) -> int | None:
        try:
            return self.step()
        except Exception:  # noqa: BLE001 - a loop that is half built has no step
            return None


class _Printed(io.TextIOBase):
    """What Python code prints, a line of the log each."""

    def __init__(self, log: RankLog, level: str, number: int) -> None:
        self._log, self._level, self._number = log, level, number
        self._begun: dict[int, str] = {}
        """Of each thread, what it printed of a line so far: two of them print at once."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    @property
    def buffer(self) -> io.BufferedWriter:
        """For bytes, past us."""
        return io.BufferedWriter(io.FileIO(self._number, "wb", closefd=False), 1)

    def fileno(self) -> int:
        return self._number

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        mine = threading.get_ident()
        *lines, rest = (self._begun.pop(mine, "") + text).split("\n")
        for line in lines:
            self._log.write(self._level, line.rstrip("\r"))
        if rest:
            self._begun[mine] = rest
        return len(text)

    def flush(self) -> None:
        """What is flushed is meant to be seen, be its line complete or not."""
        rest = self._begun.pop(threading.get_ident(), "")
        if rest:
            self._log.write(self._level, rest)


@contextmanager
def rank_log(path: Path, attempt: int, rank: int) -> Iterator[RankLog | None]:
    """Send this process' output and all its log records to ``path``.

    None, with a warning, where it can't be opened: the output stays where it was.
    """
    try:
        log = RankLog(path, attempt, rank)
    except OSError as error:
        logger.warning("%s can't be written: %s", path, error)
        yield None
        return
    root = logging.getLogger()
    level = root.level
    apart = _printing_loggers()
    with log.taking_output():
        root.addHandler(log)
        root.setLevel(logging.INFO)
        for own, printing in apart:
            own.addHandler(log)
            for handler in printing:
                own.removeHandler(handler)
        try:
            yield log
        finally:
            for own, printing in apart:
                own.removeHandler(log)
                for handler in printing:
                    own.addHandler(handler)
            root.removeHandler(log)
            root.setLevel(level)
    log.close()


def _printing_loggers() -> list[tuple[logging.Logger, list[logging.Handler]]]:
    """Loggers that keep their records from the root's handlers and print them, as DeepSpeed's does,
    with the handlers that print."""
    found = []
    for own in list(logging.root.manager.loggerDict.values()):
        if isinstance(own, logging.Logger) and not own.propagate:
            printing = [h for h in own.handlers if _prints(h)]
            if printing:
                found.append((own, printing))
    return found


def _prints(handler: logging.Handler) -> bool:
    if not isinstance(handler, logging.StreamHandler) or isinstance(handler, logging.FileHandler):
        return False
    try:
        return handler.stream.fileno() in (1, 2)
    except (AttributeError, OSError, ValueError):
        return False


_FORMATTER = logging.Formatter()


def _opened(path: Path) -> int:
    """Appending, so that who writes to it through another descriptor writes behind us."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
