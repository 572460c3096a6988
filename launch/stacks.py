"""What the processes of ranks are doing: their Python stacks, taken from outside.

py-spy reads another process' memory and stops nobody; where it may not (no ptrace in a
container), each rank's own faulthandler writes its stacks at a signal, which a stopped process
can't. Promises: never raises, and takes no longer than ``TAKE_S`` on a node; what could be had,
by which of the two, and why not the other, is said; sizes are bounded.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

TAKE_S = 8.0
"""Seconds that the stacks of a node may take, all its ranks at once."""
SIGNAL = signal.SIGUSR2
"""At which a rank writes its own stacks."""
MOST_TEXT = 64 * 1024
"""Characters kept of one process."""

_DUMP_S = 3.0
_TRIES = 3
"""py-spy reads while the process runs on, so that what it reads may not fit together."""
_FAULT_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.+)$')


@dataclass(frozen=True, slots=True)
class Frame:
    """One call, as a stack shows it."""

    name: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.name} ({Path(self.file).name}:{self.line})"


@dataclass(frozen=True, slots=True)
class Stack:
    """What one process was doing."""

    tool: Literal["py-spy", "faulthandler", "none"]
    """What it was taken with."""
    threads: tuple[tuple[str, tuple[Frame, ...]], ...] = ()
    """Name and frames of each thread, the innermost call first."""
    stopped: bool = False
    """The process is stopped, by SIGSTOP or a debugger, and does nothing at all."""
    why: str = ""
    """Why not with py-spy."""
    ready: bool = True
    """False: its worker has yet to say that it can be given a rank."""

    def text(self) -> str:
        """For a file; at most ``MOST_TEXT`` characters."""
        state = ", the process is stopped" if self.stopped else ""
        lines = [f"(taken with {self.tool}{state}{f'; {self.why}' if self.why else ''})"]
        for name, frames in self.threads:
            lines.append(f"Thread {name}")
            lines += [f"    {f.name} ({f.file}:{f.line})" for f in frames]
        return "\n".join(lines)[:MOST_TEXT]


def write_stacks_at_signal() -> None:
    """Let this process write its stacks to its standard error at ``SIGNAL``."""
    # By its number: a rank's goes to its log, and at times elsewhere.
    faulthandler.register(SIGNAL, 2, all_threads=True)


def stacks_of(pids: Sequence[int], logs: Sequence[str]) -> dict[int, Stack]:
    """The stacks of processes of this node, all taken at once; run there, under their user.

    ``logs``: where each writes its standard error; "" where that isn't known.
    """
    with ThreadPoolExecutor(max_workers=max(1, len(pids))) as pool:
        return dict(zip(pids, pool.map(stack_of, pids, logs), strict=True))


def stack_of(pid: int, log: str = "") -> Stack:
    """The stacks of one process."""
    stopped = _is_stopped(pid)
    threads, why = _from_outside(pid)
    if threads:
        return Stack("py-spy", threads, stopped)
    if stopped:
        return Stack("none", stopped=True, why=f"py-spy: {why}; it can't answer a signal")
    threads, why_neither = _by_signal(pid, Path(log) if log else None)
    if threads:
        return Stack("faulthandler", threads, why=f"py-spy: {why}")
    return Stack("none", why=f"py-spy: {why}; faulthandler: {why_neither}")


def _from_outside(pid: int) -> tuple[tuple[tuple[str, tuple[Frame, ...]], ...], str]:
    beside = Path(sys.executable).with_name("py-spy")
    tool = str(beside) if beside.exists() else shutil.which("py-spy")
    if tool is None:
        return (), "is not installed"
    why = ""
    for _ in range(_TRIES):
        try:
            done = subprocess.run(
                [tool, "dump", "--nonblocking", "--json", "--pid", str(pid)],
                capture_output=True,
                text=True,
                timeout=_DUMP_S,
            )
            if done.returncode == 0:
                return tuple(map(_thread, json.loads(done.stdout))), ""
            why = _reason(done.stderr)
        except subprocess.TimeoutExpired:
            return (), f"took more than {_DUMP_S:g} s"
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = f"{type(error).__name__}: {error}"
    return (), why


def _thread(row: dict[str, Any]) -> tuple[str, tuple[Frame, ...]]:
    frames = [Frame(f["name"], f["filename"], int(f["line"])) for f in row["frames"]]
    return str(row.get("thread_name") or row["thread_id"]), tuple(frames)


def _reason(errors: str) -> str:
    """The innermost cause that py-spy gives."""
    told = errors.split("Stack backtrace")[0].strip().splitlines()
    return told[-1].strip() if told else "it failed without a word"


def _by_signal(pid: int, log: Path | None) -> tuple[tuple[tuple[str, tuple[Frame, ...]], ...], str]:
    if log is None or not _handles_signal(pid):
        return (), "the process did not prepare for it"
    try:
        before = size = log.stat().st_size
        os.kill(pid, SIGNAL)
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            time.sleep(0.1)
            size, last = log.stat().st_size, size
            if size == last > before:
                break
        with log.open(errors="replace") as stream:
            stream.seek(before)
            found = parse_faulthandler(stream.read(MOST_TEXT))
    except OSError as error:
        return (), f"{type(error).__name__}: {error}"
    return found, "" if found else "the process did not answer the signal"


def _handles_signal(pid: int) -> bool:
    """Whether the process catches it: others would end by it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = next((line for line in status.splitlines() if line.startswith("SigCgt:")), "SigCgt: 0")
    return bool(int(caught.split()[1], 16) >> (SIGNAL - 1) & 1)


def parse_faulthandler(text: str) -> tuple[tuple[str, tuple[Frame, ...]], ...]:
    """The threads of one of faulthandler's dumps."""
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if line.startswith(("Thread ", "Current thread ")):
            threads.append((line.split(" (most recent")[0].removeprefix("Current thread "), []))
        elif threads and (match := _FAULT_FRAME.match(line)):
            threads[-1][1].append(Frame(match["name"], match["file"], int(match["line"])))
    return tuple((name, tuple(frames)) for name, frames in threads if frames)


def _is_stopped(pid: int) -> bool:
    import psutil

    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return False
    return bool(status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP))
