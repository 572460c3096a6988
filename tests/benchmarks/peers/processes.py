"""Starting a side's programs, and ending all that came of them, and nothing else.

    mark = new_mark()
    program = Program([...], mark, log=folder / "log.txt", env={...})
    while program.poll() is None: ...
    end_all(mark)

Whatever a side starts inherits a mark in its environment, daemons and Ray's workers too, so that
each is found and ended by its own id. Promises: ``end_all`` is over within a bound and tells what
it could not end; processes without the mark are never signalled, nor the one that asks.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

MARK = "OCTAVO_BENCHMARK_RUN"
TERM_S, KILL_S = 5.0, 10.0
ROOT = Path(__file__).parents[3]


class SideError(RuntimeError):
    """A side didn't do its run; ``hung``: it had to be ended."""

    def __init__(self, message: str, *, hung: bool = False) -> None:
        super().__init__(message)
        self.hung = hung


def new_mark() -> str:
    """A mark that no other run has. Within a run of another mark it begins with that one, whose
    ``end_all`` ends it too."""
    return "-".join(filter(None, (os.environ.get(MARK), uuid.uuid4().hex)))


def environment(mark: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Of a side's programs: one thread a process, our packages to be found, the mark."""
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), MARK: mark}
    return {**os.environ, **own, **(more or {})}


def interrupt_on_signals() -> None:
    """SIGTERM and SIGINT, which a shell has its background programs ignore, interrupt this process
    as Ctrl-C does, so that what it started is ended. For the start of a program."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)


class Program:
    """One program of a side; its output goes to a file."""

    def __init__(
        self,
        command: Sequence[str],
        mark: str,
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.log = log
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment(mark, env),
                start_new_session=True,
            )

    def poll(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.poll()

    def tail(self, lines: int = 15) -> str:
        """The end of what it printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


def run_to_end(
    command: Sequence[str], log: Path, limit_s: float, env: Mapping[str, str] | None = None
) -> None:
    """Run a program to its end, and end what it leaves behind. Raises SideError."""
    mark = new_mark()
    try:
        program = Program(command, mark, log=log, env=env)
        deadline = time.monotonic() + limit_s
        while (code := program.poll()) is None:
            if time.monotonic() > deadline:
                raise SideError(
                    f"{command[0]} was not over after {limit_s:.0f} s, and was ended; its output "
                    f"ends:\n{program.tail()}",
                    hung=True,
                )
            time.sleep(0.2)
        if code != 0:
            raise SideError(f"{command[0]} exited {code}; its output ends:\n{program.tail()}")
    finally:
        end_all(mark)


def of_mark(mark: str) -> list[psutil.Process]:
    """All processes that carry it, or one that began within it; never this one."""
    found = []
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            known = process.environ().get(MARK, "")
            within = known == mark or known.startswith(f"{mark}-")
            if within and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def end_all(mark: str) -> None:
    """SIGTERM, then SIGKILL, to all that carry it. Raises SideError for what is left even so."""
    _signal(mark, "terminate", TERM_S)
    left = _signal(mark, "kill", KILL_S)
    if left:
        raise SideError(f"processes {[p.pid for p in left]} did not end within {KILL_S} s")


def _signal(mark: str, how: str, bound_s: float) -> list[psutil.Process]:
    """Signal until there are none or time is over; those that are left."""
    deadline = time.monotonic() + bound_s
    signalled: set[int] = set()
    while left := of_mark(mark):
        for process in left:
            if process.pid not in signalled:
                signalled.add(process.pid)
                try:
                    getattr(process, how)()
                except psutil.Error:
                    continue
        if time.monotonic() > deadline:
            break
        time.sleep(0.1)
    return left
