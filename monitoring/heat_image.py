"""A layer × step heat map of a whole run as one small page, for W&B.

The report draws its own as SVG; this one is a picture of a byte a cell, so that its size is bounded
whatever a run does: at most ``COLUMNS`` columns, of more steps each the longer the run.

Promises: pure but for its own state; a column shows the worst of its steps; the same in words
below.
"""

from __future__ import annotations

import base64
import struct
import zlib
from html import escape

import numpy as np
import numpy.typing as npt

from monitoring.amax_trend import UsualAmax
from monitoring.records import StepRecord
from monitoring.report_layers import COLOURS, NO_CELL, LayerFacts, look_at

COLUMNS = 128
MOST_LABELS = 48
"""Rows with a name beside them; of more layers every second, third, … has one."""
WORST = 12
"""Layers told of in words."""

PALETTE = (
    *("#7f1d1d", "#d55e00", "#f0b35a", "#4f8fba", "#8ab5cf", "#bcd3e0", "#e3e8ed"),
    *("#7b61c4", "#ffffff"),
)
"""Colours of the report's heat map; then BF16, and nothing known."""
assert len(PALETTE) == NO_CELL + 1


class HeatImage:
    """Cells of all layers, filled as steps come."""

    def __init__(self) -> None:
        self._usual = UsualAmax()
        self._names: dict[str, int] = {}
        self._cells = np.full((0, COLUMNS), NO_CELL, dtype=np.uint8)
        self._facts: dict[str, LayerFacts] = {}
        self._first: int | None = None
        self._stride = 1
        self._last = 0

    def add(self, record: StepRecord) -> float | None:
        """Take in a step; how far above its usual the amax of a layer is at most, in octaves, and
        None where there are no statistics."""
        seen = look_at(record, self._usual)
        if seen is None:
            return None
        if self._first is None:
            self._first = record.step
        where = np.array([self._row(name) for name in seen.layers])
        offset = max(0, record.step - self._first)
        while offset // self._stride >= COLUMNS:
            half = np.minimum(self._cells[:, 0::2], self._cells[:, 1::2])
            self._cells = np.full_like(self._cells, NO_CELL)
            self._cells[:, : COLUMNS // 2] = half
            self._stride *= 2
        column = offset // self._stride
        self._cells[where, column] = np.minimum(self._cells[where, column], seen.colours)
        self._last = max(self._last, record.step)
        for i, name in enumerate(seen.layers):
            self._facts[name].add(record.step, float(seen.clamped[i]), float(seen.rise[i]))
        return float(seen.rise.max())

    def html(self) -> str:
        """The page; empty before there is a cell."""
        if self._first is None:
            return ""
        names = list(self._names)
        used = (self._last - self._first) // self._stride + 1
        picture = base64.b64encode(_png(self._cells[:, :used])).decode()
        high = max(3, min(16, 640 // max(1, len(names))))
        every = -(-len(names) // MOST_LABELS)
        labels = "".join(
            f'<i style="height:{high * every}px">{escape(name)}</i>' for name in names[::every]
        )
        steps = "a step" if self._stride == 1 else f"{self._stride} steps, the worst of them"
        legend = "".join(
            f'<b style="background:{PALETTE[i]}"></b>{word} '
            for i, word in enumerate((*COLOURS, "in BF16"))
        )
        told = f"FP8 range of {len(names)} layers, steps {self._first} to {self._last}"
        return (
            "<!doctype html><meta charset=utf-8><style>body{font:12px system-ui,sans-serif}"
            ".map{display:flex}.map i{display:block;overflow:hidden;line-height:1;"
            "font-style:normal;font-size:9px;white-space:nowrap;text-align:right;padding-right:4px}"
            f"img{{image-rendering:pixelated;width:100%;height:{high * len(names)}px;flex:1;"
            "min-width:0}b{display:inline-block;width:12px;height:10px;margin:0 3px 0 8px}</style>"
            f"<p>{told}; a column is {steps}</p><div class=map><div>{labels}</div>"
            f'<img alt="{told}; the worst in words below" src="data:image/png;base64,{picture}">'
            f"</div><p>{legend}</p><ul>{self._worst()}</ul>"
        )

    def _row(self, name: str) -> int:
        row = self._names.get(name)
        if row is None:
            row = self._names[name] = len(self._names)
            self._facts[name] = LayerFacts()
            empty = np.full((1, COLUMNS), NO_CELL, dtype=np.uint8)
            self._cells = np.concatenate([self._cells, empty])
        return row

    def _worst(self) -> str:
        ranked = sorted(self._facts.items(), key=lambda f: (-f[1].clamped_pct, -f[1].rise))
        return "".join(
            f"<li>{escape(name)}: clamped {facts.clamped_text}, amax above its usual "
            f"{facts.rise_text}"
            for name, facts in ranked[:WORST]
        )


def _png(cells: npt.NDArray[np.uint8]) -> bytes:
    """A picture of a pixel a cell, in the colours of ``PALETTE``."""
    height, width = cells.shape
    palette = b"".join(bytes.fromhex(colour[1:]) for colour in PALETTE)
    # Each row with a filter type in front: none.
    rows = np.concatenate([np.zeros((height, 1), dtype=np.uint8), cells], axis=1)
    head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    parts = ((b"IHDR", head), (b"PLTE", palette), (b"IDAT", zlib.compress(rows.tobytes(), 9)))
    chunks = b"".join(_chunk(kind, data) for kind, data in (*parts, (b"IEND", b"")))
    return b"\x89PNG\r\n\x1a\n" + chunks


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
