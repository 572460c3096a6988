"""Tables for people: columns that fit the terminal, whatever stands in them.

Promises: on a terminal no line is wider than it is; in a pipe nothing is cut. What a command takes
as an argument (a job's id, a node's name) is never cut: where it is too long it has a line of its
own, with the rest below. Control characters are shown as blanks: what users and ranks wrote can't
move the cursor or change colours. No colours are used.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence

LEAST = 10
"""Columns that a flexible cell keeps."""


def print_table(
    rows: Sequence[Sequence[str]], flexible: Sequence[str] = (), width: int | None = None
) -> None:
    """Print rows under the heading that is the first one; ``width`` columns wide, by default the
    terminal's, in a pipe any number. The first column is never cut, ``flexible`` ones are."""
    if width is None and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    for line in table_lines(rows, flexible, width):
        print(line)


def table_lines(
    rows: Sequence[Sequence[str]], flexible: Sequence[str] = (), width: int | None = None
) -> list[str]:
    """The lines that ``print_table`` prints; ``width`` None: of any width."""
    cells = [[plain(cell) for cell in row] for row in rows]
    sizes = [max(map(columns, column)) for column in zip(*cells, strict=True)]
    if width is not None:
        _shrink(sizes, [i for i, name in enumerate(rows[0]) if name in flexible], cells, width)
    lines: list[str] = []
    for row in cells:
        first, rest = row[0], row[1:]
        if columns(first) > sizes[0]:
            lines.append(first)
            first = ""
        shown = [fitted(cell, size) for cell, size in zip((first, *rest), sizes, strict=True)]
        line = " ".join(shown).rstrip()
        # Narrower than the fixed columns are, nothing can be done but to end there.
        lines.append(line if width is None else fitted(line, max(width, 1)).rstrip())
    return lines


def _shrink(sizes: list[int], flexible: list[int], cells: list[list[str]], width: int) -> None:
    """Make flexible columns narrower, the widest first, and then the first one."""
    over = sum(sizes) + len(sizes) - 1 - width
    while over > 0:
        widest = max(flexible, key=lambda i: sizes[i], default=None)
        if widest is None or sizes[widest] <= LEAST:
            break
        sizes[widest] -= 1
        over -= 1
    if over > 0:
        # Long ids stand alone; the others are as wide as the widest that fits.
        room = max(columns(cells[0][0]), sizes[0] - over)
        fitting = [columns(row[0]) for row in cells if columns(row[0]) <= room]
        sizes[0] = max(fitting, default=room)


def plain(text: str) -> str:
    """In one line, and without control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[PX^_][^\x1b]*(?:\x1b\\)?|.?)"
)
"""Sequences of ECMA-48: colours, titles, whatever steers a terminal; cut off ones too."""


def as_text(text: str) -> str:
    """What a rank wrote, tabs and lines as they are, without what steers a terminal."""
    shown = ESCAPES.sub("", text)
    return "".join(
        c if c.isprintable() or c in "\t\n" else "\N{REPLACEMENT CHARACTER}" for c in shown
    )


def fitted(text: str, size: int) -> str:
    """``text`` in exactly ``size`` columns: filled with blanks, or cut with "…"."""
    taken = columns(text)
    if taken <= size:
        return text + " " * (size - taken)
    if text.isascii():
        return f"{text[: size - 1]}…"
    from rich.cells import set_cell_size

    return f"{set_cell_size(text, size - 1)}…"


def columns(text: str) -> int:
    """How many columns of a terminal it takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
