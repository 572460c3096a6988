"""What the matrix has shown so far: one line of JSON a run of a row, appended as it ends.

Promises: what was appended stays, whatever ends the run; a line that was cut in its middle is
left out. A row that is run anew takes the place of its own old runs only, from its first new
outcome on; a matrix that was interrupted goes on with the same ``session``.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tests.hosts.faults.outcome import Outcome
from tests.hosts.network import ROOT


@dataclass(frozen=True, slots=True)
class Record:
    """An outcome and the session that it was seen in."""

    session: str
    outcome: Outcome


class Records:
    """The file at ``path``; ``resume``: go on with the session that it ends with."""

    def __init__(self, path: Path, *, resume: bool = False) -> None:
        self.path = path
        self._records = _read(path)
        newest = self._records[-1].session if self._records else ""
        self.session = newest if resume and newest else _new_session()

    def add(self, outcome: Outcome) -> None:
        """Append it, durably."""
        self._records.append(Record(self.session, outcome))
        line = {
            "session": self.session,
            "commit": _commit(),
            "time": time.time(),
            **outcome.to_json(),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as out:
            # A line that was cut is not to spoil the next one.
            if out.tell() and not _ends_a_line(self.path):
                out.write(b"\n")
            out.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            out.flush()
            os.fsync(out.fileno())

    def done(self, row: str) -> int:
        """How often the row was run in this session."""
        return sum(r.session == self.session and r.outcome.row == row for r in self._records)

    def ours(self) -> list[Outcome]:
        """Outcomes of this session."""
        return [r.outcome for r in self._records if r.session == self.session]

    def newest(self) -> list[Outcome]:
        """Each row's outcomes, of the last session that ran it."""
        last = {record.outcome.row: record.session for record in self._records}
        return [r.outcome for r in self._records if last[r.outcome.row] == r.session]


def _read(path: Path) -> list[Record]:
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().splitlines():
        try:
            value: dict[str, Any] = json.loads(line)
            found.append(Record(value["session"], _outcome(value)))
        except (ValueError, KeyError, TypeError):
            continue
    return found


def _outcome(value: dict[str, Any]) -> Outcome:
    known = {field.name for field in fields(Outcome)}
    given = {key: item for key, item in value.items() if key in known}
    given["notes"] = tuple(given.get("notes", ()))
    given["progress"] = tuple((step, after) for step, after in given.get("progress", ()))
    return Outcome(**given)


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) == b"\n"


def _new_session() -> str:
    """When it began, of which commit."""
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return f"{began} {_commit() or 'no commit'} {secrets.token_hex(2)}"


def _commit() -> str:
    """What is checked out now: a session that is gone on with may have another than it began with;
    "" outside a checkout."""
    asked = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def left_to_do(rows: Sequence[tuple[str, int]], records: Records) -> list[tuple[str, int]]:
    """(row, times) still to be run in this session, of what was asked for."""
    left = [(row, times - records.done(row)) for row, times in rows]
    return [(row, times) for row, times in left if times > 0]
