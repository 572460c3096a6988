"""Inline SVG charts: lines over steps, a heat map, bars of intervals.

Promises: a chart is a string of SVG with ``viewBox``, no script, no reference outside;
every text is escaped; colours are CSS classes, so that the page decides on light or dark.
Non-finite values leave a gap.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

LABEL_CHARACTER = 6.8
"""Width of a character of an axis' label, rather more than less."""
MOST_POINTS = 1500
"""Points a line is drawn from; more are thinned to the extremes of equal stretches."""


def number(value: float) -> str:
    """A coordinate with a tenth of a unit."""
    return f"{value:.1f}".rstrip("0").rstrip(".")


def short(value: float) -> str:
    """A value for a label: three digits that matter."""
    if not math.isfinite(value):
        return str(value)
    if value != 0 and (abs(value) >= 1e5 or abs(value) < 1e-3):
        return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def whole(value: float) -> str:
    """A number of which all digits before the point matter, as tokens a second: ``102,044``."""
    if not math.isfinite(value) or abs(value) < 999.5:
        return short(value)
    return f"{value:,.0f}"


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round values within [low, high], roughly ``about`` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten within [low, high], with 2 and 5 between them when there are few."""
    span = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = [10.0**e for e in span]
    if sum(low <= m <= high for m in marks) < 3:
        marks = [m * 10.0**e for e in span for m in (1, 2, 5)]
    return [m for m in marks if low * 0.999 <= m <= high * 1.001]


def duration(seconds: float) -> str:
    """``0.42 s``, ``42 s``, ``3 m 05 s``, ``2 h 10 m``, ``3 d 4 h``."""
    if 0 < seconds < 9.95 and round(seconds, 1) != round(seconds):
        return f"{seconds:.1f} s" if seconds >= 0.95 else f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} m {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} m"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


_TIME_STEPS = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 3 * 3600, 6 * 3600, 12 * 3600, 86_400, 2 * 86_400, 7 * 86_400),
)


def time_ticks(seconds: float, about: int) -> list[float]:
    """Round times from 0 to ``seconds``, roughly ``about`` of them."""
    wanted = seconds / max(1, about)
    step = next((s for s in _TIME_STEPS if s >= wanted), None)
    if step is None:
        step = _TIME_STEPS[-1] * math.ceil(wanted / _TIME_STEPS[-1])
    return [i * step for i in range(math.floor(seconds / step + 1e-9) + 1)]


@dataclass(frozen=True, slots=True)
class Frame:
    """A plot's place in its picture and the ranges it shows."""

    width: float
    height: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    left: float = 46.0
    right: float = 14.0
    top: float = 14.0
    bottom: float = 30.0
    log: bool = False

    def x(self, value: float) -> float:
        low, high = self.x_range
        share = (value - low) / (high - low) if high > low else 0.5
        return self.left + share * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        """Where a value lies; beyond the range it is held at the edge."""
        low, high = self.y_range
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, 1e-300))
        share = (value - low) / (high - low) if high > low else 0.5
        share = min(1.0, max(0.0, share))
        return self.height - self.bottom - share * (self.height - self.top - self.bottom)

    @property
    def floor(self) -> float:
        return self.height - self.bottom

    def axes(self, x_title: str = "step") -> str:
        """Grid lines and labels."""
        parts = []
        low, high = self.y_range
        for mark in log_ticks(low, high) if self.log else ticks(low, high, 5):
            y = number(self.y(mark))
            parts.append(f'<path class="grid" d="M{self.left} {y}H{self.width - self.right}"/>')
            parts.append(text(self.left - 7, self.y(mark) + 4, short(mark), "axis end"))
        parts.append(self.x_axis(x_title))
        return "".join(parts)

    def below(self, mark: float, label: str, drop: float) -> str:
        """A label below the axis at ``mark``, which stays in the picture at its right end."""
        x, half = self.x(mark), LABEL_CHARACTER / 2 * len(label)
        if x + half > self.width:
            return text(self.width, self.floor + drop, label, "axis end")
        return text(x, self.floor + drop, label, "axis mid")

    def x_axis(self, title: str = "step") -> str:
        parts = []
        for mark in ticks(*self.x_range, int(max(3, self.width // 110))):
            parts.append(self.below(mark, short(mark), 18.0))
        parts.append(
            f'<path class="rule" d="M{self.left} {number(self.floor)}H{self.width - self.right}"/>'
        )
        if title:
            parts.append(text(self.left - 7, self.floor + 18, title, "axis end"))
        return "".join(parts)


def text(x: float, y: float, content: str, classes: str = "") -> str:
    """A text element; the content is escaped, control characters (no XML has them) dropped."""
    kind = f' class="{classes}"' if classes else ""
    content = "".join(c for c in content if c.isprintable())
    return f'<text x="{number(x)}" y="{number(y)}"{kind}>{escape(content)}</text>'


def thinned(points: Sequence[Point], limit: int = MOST_POINTS) -> list[Point]:
    """At most about ``limit`` points: of each stretch its lowest and highest."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(2 * len(points) / limit)
    kept: list[Point] = []
    for start in range(0, len(points), size):
        part = [p for p in points[start : start + size] if math.isfinite(p[1])]
        if part:
            extremes = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
            kept += sorted(extremes)
    return kept


def line(frame: Frame, points: Sequence[Point], classes: str) -> str:
    """A line through the points, broken where a value is not finite."""
    commands: list[str] = []
    pen = "M"
    for x, y in thinned(points):
        if not math.isfinite(y):
            pen = "M"
            continue
        commands.append(f"{pen}{number(frame.x(x))} {number(frame.y(y))}")
        pen = "L"
    return f'<path class="{classes}" d="{"".join(commands)}"/>' if commands else ""


def dots(frame: Frame, points: Iterable[Point], classes: str, radius: float = 2.2) -> str:
    """A circle a point, with its values as tooltip."""
    return "".join(
        f'<circle class="{classes}" cx="{number(frame.x(x))}" cy="{number(frame.y(y))}" '
        f'r="{radius}"><title>step {x:.0f}: {short(y)}</title></circle>'
        for x, y in points
        if math.isfinite(y)
    )


def badge(x: float, y: float, label: str, classes: str, tip: str = "") -> str:
    """A filled circle with a short label."""
    title = f"<title>{escape(tip)}</title>" if tip else ""
    return (
        f'<g class="badge {classes}">{title}<circle cx="{number(x)}" cy="{number(y)}" r="9"/>'
        f"{text(x, y + 4, label, 'mid')}</g>"
    )


Mark = tuple[float, str, str, str]
"""A badge to be: x, label, classes, tip."""


def badges(marks: Sequence[Mark], y: float) -> str:
    """Badges in one row; those that would overlap become one, with the first and the last label
    and all tips."""
    groups = [[mark] for mark in sorted(marks, key=lambda m: m[0])]
    i = 0
    while i + 1 < len(groups):
        if _extent(groups[i])[1] + BADGE_GAP > _extent(groups[i + 1])[0]:
            groups[i] += groups.pop(i + 1)
            # It is wider now, and may reach the one before.
            i = max(0, i - 1)
        else:
            i += 1
    return "".join(_pill(group, y) for group in groups)


BADGE_GAP = 2.0
"""Between two badges that don't touch."""


def _extent(group: Sequence[Mark]) -> tuple[float, float]:
    """From where to where one badge for all of ``group`` reaches."""
    first, last = group[0], group[-1]
    if len(group) == 1:
        return first[0] - 9.0, first[0] + 9.0
    middle = (first[0] + last[0]) / 2
    half = max(9.0 + 3.4 * len(f"{first[1]}–{last[1]}"), (last[0] - first[0]) / 2 + 9.0)
    return middle - half, middle + half


def _pill(group: Sequence[Mark], y: float) -> str:
    x, label, classes, tip = group[0]
    if len(group) == 1:
        return badge(x, y, label, classes, tip)
    left, right = _extent(group)
    # Trouble is what a group is coloured by.
    kind = classes if all(mark[2] == classes for mark in group) else ""
    tips = escape("\n".join(mark[3] for mark in group))
    return (
        f'<g class="badge {kind}"><title>{tips}</title><rect x="{number(left)}" '
        f'y="{number(y - 9)}" width="{number(right - left)}" height="18" rx="9"/>'
        f"{text((left + right) / 2, y + 4, f'{label}–{group[-1][1]}', 'mid')}</g>"
    )


def arc_back(frame: Frame, from_step: float, to_step: float, lane: float) -> str:
    """An arrow from one step back to an earlier one, bowed upward from height ``lane``."""
    start, end = frame.x(from_step), frame.x(to_step)
    if start - end < 4:
        end = start - 4
    rise = min(24.0, 8 + (start - end) / 4)
    bow = f"M{number(start)} {number(lane)}C{number(start)} {number(lane - rise)} "
    bow += f"{number(end)} {number(lane - rise)} {number(end)} {number(lane)}"
    head = f"M{number(end - 4)} {number(lane - 6)}L{number(end)} {number(lane)}"
    head += f"L{number(end + 4)} {number(lane - 6)}"
    return f'<path class="back" d="{bow}"/><path class="back" d="{head}"/>'


def picture(width: float, height: float, label: str, body: str, classes: str = "") -> str:
    """The svg element around a chart, with its description for screen readers."""
    kind = f' class="{classes}"' if classes else ""
    return (
        f'<svg{kind} viewBox="0 0 {number(width)} {number(height)}" role="img" '
        f'aria-label="{escape(label, quote=True)}" xmlns="http://www.w3.org/2000/svg">{body}</svg>'
    )


def heat_map(
    frame: Frame,
    rows: Sequence[str],
    cells: Mapping[str, Mapping[int, int]],
    hatched: Mapping[str, Sequence[tuple[float, float]]],
) -> str:
    """Rows of coloured cells over steps.

    ``cells``: row → step → colour, 0 (class ``h0``) being the worst; several steps that fall
    on one column show the worst. ``hatched``: row → [from, to) striped beneath (BF16).
    """
    labels: list[str] = []
    stripes: list[str] = []
    paths: dict[int, list[str]] = {}
    height = (frame.floor - frame.top) / max(1, len(rows))
    low, high = frame.x_range
    inner = frame.width - frame.left - frame.right
    columns = max(1, min(int(high - low) + 1, int(inner) // 3))
    wide = inner / columns
    for i, row in enumerate(rows):
        top = frame.top + i * height
        labels.append(text(frame.left - 7, top + height / 2 + 4, row, "axis end"))
        for begin, end in hatched.get(row, ()):
            x, until = frame.x(begin), min(frame.x(end), frame.width - frame.right)
            stripes.append(
                f'<rect class="hatched" x="{number(x)}" y="{number(top + 1)}" '
                f'width="{number(max(1.5, until - x))}" height="{number(height - 2)}"/>'
            )
        worst: dict[int, int] = {}
        for step, value in cells.get(row, {}).items():
            column = min(columns - 1, int((step - low) * columns / (high - low + 1)))
            worst[column] = min(value, worst.get(column, value))
        for start, length, colour in _runs(worst):
            paths.setdefault(colour, []).append(
                f"M{number(frame.left + start * wide)} {number(top + 1)}"
                f"h{number(length * wide)}v{number(height - 2)}h{number(-length * wide)}z"
            )
    # The page's style fills those of trouble with patterns.
    coloured = [f'<path class="h{c}" d="{"".join(d)}"/>' for c, d in sorted(paths.items())]
    return "".join([*labels, *stripes, *coloured]) + frame.x_axis()


def _runs(worst: Mapping[int, int]) -> list[tuple[int, int, int]]:
    """(first column, columns, colour) of stretches of one colour."""
    runs: list[tuple[int, int, int]] = []
    for column in sorted(worst):
        colour = worst[column]
        if runs and runs[-1][2] == colour and runs[-1][0] + runs[-1][1] == column:
            start, length, _ = runs[-1]
            runs[-1] = (start, length + 1, colour)
        else:
            runs.append((column, 1, colour))
    return runs


def swatch(name: str, body: str, back: str, size: int = 6) -> str:
    """A pattern ``name`` of ``body`` on a ground of class ``back``."""
    return (
        f'<pattern id="{name}" width="{size}" height="{size}" patternUnits="userSpaceOnUse">'
        f'<rect class="{back}" width="{size}" height="{size}"/>{body}</pattern>'
    )


PATTERNS = "".join(
    [
        "<defs>",
        swatch("p0", '<path class="on" d="M0 0L6 6M6 0L0 6"/>', "h0"),
        swatch("p1", '<path class="on" d="M0 6L6 0M-1 1L1 -1M5 7L7 5"/>', "h1"),
        swatch("p2", '<circle class="dot" cx="3" cy="3" r="1.2"/>', "h2"),
        swatch("lost", '<path class="on" d="M0 6L6 0M-1 1L1 -1M5 7L7 5"/>', "lost-back"),
        swatch("recovering", '<path class="on" d="M0 0L6 6M6 0L0 6"/>', "recovering-back"),
        swatch("waiting", '<circle class="dot" cx="3" cy="3" r="1"/>', "waiting-back"),
        "</defs>",
    ]
)
"""Patterns for those who don't tell the colours apart: clamped values, and uses of time."""


HATCH = (
    '<defs><pattern id="stripes" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect class="stripe-back" width="6" height="6"/>'
    '<path class="stripe" d="M0 0V6"/></pattern></defs>'
)
"""Pattern that ``.hatched`` is filled with; once a picture."""
