"""Reading a rank's log of one attempt: in pieces, from any place on, from the end, from a time on.

``rank-R.log`` is written to; ``rank-R.log.0``, ``.1``, … were, before it, and the oldest of them
are gone. A *place* is one whole number, which stays valid while the log grows and is rotated: the
number of the file, and the byte in it. A log that was never rotated has its bytes as places.

Promises: what is read is bounded, however large the files are: a piece, a few blocks for a time
(by halving), the last blocks for the last lines. A line is read once it is complete, or once
nobody writes to its file any more. Files that were begun, renamed or removed meanwhile cost no line
that is still there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launch.log_lines import LogLine, read_line, time_of

KEPT_FILES = 3
"""Files beside the one that is written to."""
PIECE = 256 * 1024
"""Bytes read at once, and of the longest line that is not cut."""
BLOCK = 32 * 1024
"""Bytes read to find a time, or the last lines."""

_BITS = 32
"""Of a place, for the byte."""
_BYTE = (1 << _BITS) - 1
_TRIES = 5


@dataclass(frozen=True, slots=True)
class Read:
    """Lines of a log, and where the next one begins."""

    lines: tuple[LogLine, ...]
    place: int


@dataclass(frozen=True, slots=True)
class RankLogFiles:
    """The log of a rank in an attempt."""

    folder: Path
    """``<job_dir>/logs/attempt-N``."""
    attempt: int
    rank: int

    @property
    def path(self) -> Path:
        """The file that is written to."""
        return self.folder / f"rank-{self.rank}.log"

    def exists(self) -> bool:
        """Whether the rank wrote a log in this attempt."""
        return self.path.exists() or bool(_sealed(self.path))

    def read(self, place: int = 0, limit: int = 1000, *, ended: bool = False) -> Read:
        """At most ``limit`` lines from a place on; none where there are none yet.

        ``ended``: nobody writes to it any more, so that its last line is read without an end.
        """
        files = self._files()
        if not files:
            return Read((), place)
        number, byte = _split(place)
        if number < files[0][0]:
            # What stood there is gone.
            number, byte = files[0][0], 0
        before = LogLine("", attempt=self.attempt, rank=self.rank)
        for own, path in files:
            if own < number:
                continue
            start = byte if own == number else 0
            over = ended or own < files[-1][0]
            lines, end = _piece(path, start, limit, before, over=over)
            if lines or own == files[-1][0]:
                return Read(tuple(lines), _place(own, end))
        return Read((), place)

    def begun(self) -> float | None:
        """When the oldest line that is still there was written; None where none says so."""
        files = self._files()
        return _time_at(files[0][1], 0, _size(files[0][1])) if files else None

    def since(self, moment: float) -> int:
        """The place of the first line written at ``moment`` (seconds since the epoch) or later;
        the end where there is none."""
        files = self._files()
        # The newest file that begins before it; what is before that file is older.
        for own, path in reversed(files):
            begun = _time_at(path, 0, _size(path))
            if own == files[0][0] or (begun is not None and begun < moment):
                found = _found(path, moment)
                if found is not None:
                    return _place(own, found)
                newer = [n for n, _ in files if n > own]
                return _place(newer[0], 0) if newer else _place(own, _size(path))
        return 0

    def last(self, count: int) -> int:
        """The place from which the last ``count`` lines are read; the oldest there is where
        there are fewer."""
        return self.back(count)[0]

    def back(self, count: int) -> tuple[int, int]:
        """``last(count)``, and how many lines there are from there, up to that many."""
        place = found = 0
        for own, path in reversed(self._files()):
            start, more = _back(path, count - found)
            place = _place(own, start)
            found += more
            if found >= count:
                break
        return place, found

    def _files(self) -> list[tuple[int, Path]]:
        """(number, path), oldest first. The last one is written to."""
        for _ in range(_TRIES):
            old = _sealed(self.path)
            number = old[-1][0] + 1 if old else 0
            present = self.path.exists()
            # Renamed between the two looks: the file that we saw is another one.
            if _sealed(self.path) == old:
                return [*old, (number, self.path)] if present or old else []
        return []


def sealed_name(path: Path) -> Path:
    """What the file that is written to is called once it isn't any more."""
    old = _sealed(path)
    return path.with_name(f"{path.name}.{old[-1][0] + 1 if old else 0}")


def dropped(path: Path, kept: int) -> list[Path]:
    """Files beyond the newest ``kept`` beside the one that is written to."""
    return [old for _, old in _sealed(path)[:-kept]]


def attempts_of(logs: Path) -> list[int]:
    """Attempts that have a folder in a job's ``logs``, oldest first."""
    numbers = (folder.name.removeprefix("attempt-") for folder in logs.glob("attempt-*"))
    return sorted(int(number) for number in numbers if number.isascii() and number.isdigit())


def start_since(logs: Path, rank: int, moment: float) -> tuple[int, int]:
    """(attempt, place) of a rank's first line from ``moment`` on, in a job's ``logs``; the end of
    the newest attempt's where there is none, (0, 0) where there is no log."""
    attempt = 0
    for attempt in reversed(attempts_of(logs)):
        begun = RankLogFiles(logs / f"attempt-{attempt}", attempt, rank).begun()
        if begun is not None and begun < moment:
            break
    files = RankLogFiles(logs / f"attempt-{attempt}", attempt, rank)
    return attempt, files.since(moment)


def start_of_last(logs: Path, rank: int, count: int) -> tuple[int, int]:
    """(attempt, place) from which a rank's last ``count`` lines of all attempts are read."""
    start = (0, 0)
    for attempt in reversed(attempts_of(logs)):
        place, found = RankLogFiles(logs / f"attempt-{attempt}", attempt, rank).back(count)
        start, count = (attempt, place), count - found
        if count <= 0:
            break
    return start


def _sealed(path: Path) -> list[tuple[int, Path]]:
    beside = ((f.name.removeprefix(f"{path.name}."), f) for f in path.parent.glob(f"{path.name}.*"))
    return sorted((int(n), f) for n, f in beside if n.isascii() and n.isdigit())


def _place(number: int, byte: int) -> int:
    return (number << _BITS) + min(byte, _BYTE)


def _split(place: int) -> tuple[int, int]:
    return place >> _BITS, place & _BYTE


def _piece(
    path: Path, start: int, limit: int, before: LogLine, *, over: bool
) -> tuple[list[LogLine], int]:
    """Lines of one file from a byte on, and the byte behind them; ``over``: it won't grow."""
    data = _bytes(path, start, PIECE)
    whole = data.rfind(b"\n") + 1
    if whole == 0 and len(data) == PIECE:
        whole = _character_end(data)
    if over and len(data) < PIECE:
        whole = len(data)
    lines: list[LogLine] = []
    end = start
    for raw in _lines(data[:whole]):
        if len(lines) >= limit:
            break
        end += len(raw)
        text = raw.decode("utf-8", "replace").rstrip("\n")
        lines += read_line(text, lines[-1] if lines else before)
    return lines, end


def _lines(data: bytes) -> list[bytes]:
    """Lines by ``\\n`` alone, with it."""
    parts = data.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def _character_end(data: bytes) -> int:
    """Bytes of ``data`` up to its last complete UTF-8 character."""
    for cut in range(1, min(4, len(data)) + 1):
        lead = data[-cut]
        if lead >= 0xC0:
            # A character's first byte; how many follow is in its high bits.
            size = 2 + (lead >= 0xE0) + (lead >= 0xF0)
            return len(data) - cut if size > cut else len(data)
        if lead < 0x80:
            break
    return len(data)


def _found(path: Path, moment: float) -> int | None:
    """Where the first line from ``moment`` on begins; None: all are older."""
    low, high = 0, _size(path)
    size = high
    while high - low > BLOCK:
        middle = (low + high) // 2
        at = _time_at(path, middle, size)
        # Where no time stands, the line sought may be before: earlier is never wrong.
        low, high = (middle, high) if at is not None and at < moment else (low, middle)
    start = 0 if low == 0 else _line_start(path, low)
    while start < size:
        data = _bytes(path, start, BLOCK)
        if not data:
            return None
        lines = _lines(data)
        if len(lines) > 1 and not lines[-1].endswith(b"\n"):
            lines.pop()
        for raw in lines:
            at = time_of(raw.decode("utf-8", "replace"))
            if at is not None and at >= moment:
                return start
            start += len(raw)
    return None


def _line_start(path: Path, byte: int) -> int:
    """Where the first line begins that begins at ``byte`` or later."""
    while True:
        data = _bytes(path, byte - 1, BLOCK)
        end = data.find(b"\n")
        if end >= 0 or not data:
            return byte + end if data else byte
        byte += len(data)


def _time_at(path: Path, byte: int, size: int) -> float | None:
    """When the first line was written that begins at ``byte`` or later and says so, within a
    block."""
    start = byte if byte == 0 else _line_start(path, byte)
    if start >= size:
        return None
    for raw in _lines(_bytes(path, start, BLOCK)):
        at = time_of(raw.decode("utf-8", "replace"))
        if at is not None:
            return at
    return None


def _back(path: Path, count: int) -> tuple[int, int]:
    """Where the last ``count`` lines of a file begin, and how many there are up to that many."""
    size = _size(path)
    if size == 0:
        return 0, 0
    # The end of the last line begins no other.
    at = size - 1 if _bytes(path, size - 1, 1) == b"\n" else size
    lines = 0
    while at > 0:
        begin = max(0, at - BLOCK)
        data = _bytes(path, begin, at - begin)
        here = len(data)
        while (here := data.rfind(b"\n", 0, here)) >= 0:
            lines += 1
            if lines == count:
                return begin + here + 1, count
        at = begin
    return 0, lines + 1


def _bytes(path: Path, start: int, count: int) -> bytes:
    """Empty where there is no such file, or place in it."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(count)
    except OSError:
        return b""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
