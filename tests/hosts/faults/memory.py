"""Damage in another process' memory, as a failing DIMM does it."""

from __future__ import annotations

import re
import struct
from pathlib import Path

_HEADER = re.compile(rb'\{"__metadata__"')
"""A state block's beginning (``launch.state_block``), eight bytes after its own."""
BEYOND = 5000
"""Bytes into the tensors."""


def flip_copies(pid: int) -> int:
    """Flip one bit in every state block that the process holds; how many were flipped."""
    flipped = 0
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        for start, end in _writable(pid):
            memory.seek(start)
            try:
                held = memory.read(end - start)
            except OSError:
                continue
            for found in _HEADER.finditer(held):
                if found.start() < 8:
                    continue
                (length,) = struct.unpack_from("<Q", held, found.start() - 8)
                place = found.start() + length + BEYOND
                # What isn't a block has no such length before it.
                if length > 1 << 24 or place >= len(held):
                    continue
                memory.seek(start + place)
                memory.write(bytes([held[place] ^ 4]))
                flipped += 1
    return flipped


def _writable(pid: int) -> list[tuple[int, int]]:
    ranges = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, mode = line.split()[:2]
        if mode.startswith("rw"):
            start, end = (int(word, 16) for word in span.split("-"))
            ranges.append((start, end))
    return ranges
