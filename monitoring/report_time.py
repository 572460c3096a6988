"""The report's account of a job's time: shares, a table, and incidents and actions by the clock.

Promises: pure; what a colour says a pattern and a word say too; the shares shown are those of
``monitoring.goodput``, and add up to the wall time.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from monitoring.charts import Frame, badges, duration, number, picture, text, time_ticks
from monitoring.clock import moment
from monitoring.episodes import Episode
from monitoring.goodput import WAITING, Goodput, Use
from monitoring.job_view import JobView
from monitoring.wording import place

USES: dict[str, tuple[Use, ...]] = {
    "productive": ("productive",),
    "lost": ("lost",),
    "recovering": ("recovering",),
    "waiting": WAITING,
}
"""What is drawn alike, by its word."""
MEANINGS = {
    "productive": "steps that led to the present state",
    "lost": "steps that a rollback or restart undid",
    "recovering": "from the last step before a trouble to the first after it",
    "waiting": "everything else",
    "queued": "in the queue",
    "starting": "nodes held, before the first step",
    "paused": "paused, or ended and resumed later",
    "between": "between two steps",
}
BANDS: dict[Use, str] = {use: word for word, uses in USES.items() for use in uses}
RARE = ("recovering", "lost")
"""Shown wherever a column of the picture has any of it, however little."""


def share_bar(told: Goodput, width: float) -> str:
    """One bar, a part a use."""
    inner, x = width - 2.0, 1.0
    parts: list[str] = []
    for word, uses in USES.items():
        wide = inner * told.seconds(*uses) / told.wall_s
        if wide > 0:
            parts.append(
                f'<rect class="u-{word}" x="{number(x)}" y="1" width="{number(max(1.0, wide))}" '
                f'height="24"><title>{word}: {_share(told, *uses)}</title></rect>'
            )
        x += wide
    label = "Where the time went: " + ", ".join(
        f"{word} {_share(told, *uses)}" for word, uses in USES.items()
    )
    return picture(width, 26.0, label, "".join(parts))


def time_table(told: Goodput) -> str:
    """Seconds and shares, and what was waited for."""
    rows = []
    for word, uses in USES.items():
        rows.append(_row(told, word, uses, swatch=True))
        if word == "waiting":
            rows += [_row(told, use, (use,)) for use in WAITING if told.seconds(use) >= 0.05]
    rows.append(
        f"<tr><th>wall time</th><td></td><td>{duration(told.wall_s)}</td><td>100 %</td></tr>"
    )
    head = "<tr><th>use</th><th>what it is</th><th>time</th><th>share</th></tr>"
    return f'<table class="time">{head}{"".join(rows)}</table>'


def clock_chart(view: JobView, told: Goodput, episodes: Sequence[Episode], width: float) -> str:
    """What each moment was used for, attempts, and the numbered troubles and answers."""
    begin, end = told.spans[0].begin, told.spans[-1].end
    frame = Frame(width, 150.0, (0.0, end - begin), (0, 1), left=14.0, top=44.0, bottom=34.0)
    band, height = frame.top, 30.0
    parts = [
        f'<rect class="u-{word}" x="{number(x)}" y="{number(band)}" '
        f'width="{number(wide)}" height="{number(height)}"/>'
        for x, wide, word in _columns(told, frame)
    ]
    parts += _attempts(view, frame, begin, band + height + 4)
    marks = []
    for episode in episodes:
        x = frame.x(min(max(episode.time, begin), end) - begin)
        good = not episode.incidents
        kind = "mark-good" if good else "mark"
        parts.append(f'<path class="{kind}" d="M{number(x)} 27V{number(band + height)}"/>')
        tip = f"{place(episode.step)}: {episode.trouble or episode.answer}"
        marks.append((x, str(episode.number), "good" if good else "", tip))
    parts.append(badges(marks, 18.0))
    for mark in time_ticks(end - begin, int(max(3, width // 120))):
        parts.append(frame.below(mark, duration(mark), 20.0))
        parts.append(f'<path class="rule" d="M{number(frame.x(mark))} {frame.floor}v4"/>')
    parts.append(
        f'<path class="rule" d="M{frame.left} {frame.floor}H{number(width - frame.right)}"/>'
    )
    label = (
        f"What each moment since {moment(begin)} was used for, with {len(episodes)} troubles and "
        "answers"
    )
    return picture(width, 150.0, label, "".join(parts))


def legend() -> str:
    """The patterns, by name."""
    keys = (
        f'<span><svg viewBox="0 0 22 12" aria-hidden="true"><rect class="u-{word}" width="22" '
        f'height="12" rx="2"/></svg>{word}</span>'
        for word in USES
    )
    return f'<div class="legend">{"".join(keys)}<span>numbers: as above</span></div>'


def _share(told: Goodput, *uses: Use) -> str:
    seconds = told.seconds(*uses)
    return f"{duration(seconds)} ({100 * seconds / told.wall_s:.1f} %)"


def _row(told: Goodput, word: str, uses: tuple[Use, ...], *, swatch: bool = False) -> str:
    seconds = told.seconds(*uses)
    mark = (
        f'<svg viewBox="0 0 14 14" aria-hidden="true"><rect class="u-{word}" width="14" '
        'height="14" rx="2"/></svg>'
        if swatch
        else ""
    )
    kind = "" if swatch else ' class="part"'
    name = f"{mark}{escape(word)}" if swatch else escape(MEANINGS[word])
    meaning = escape(MEANINGS[word]) if swatch else ""
    return (
        f"<tr{kind}><th>{name}</th><td>{meaning}</td><td>{duration(seconds)}</td>"
        f"<td>{100 * seconds / told.wall_s:.1f} %</td></tr>"
    )


def _columns(told: Goodput, frame: Frame) -> list[tuple[float, float, str]]:
    """(x, width, word) of stretches of columns of a pixel and a half."""
    inner = frame.width - frame.left - frame.right
    count = max(1, int(inner / 1.5))
    begin, wide = told.spans[0].begin, inner / count
    each = told.wall_s / count
    seconds: list[dict[str, float]] = [{} for _ in range(count)]
    for span in told.spans:
        word = BANDS[span.use]
        first = min(count - 1, int((span.begin - begin) / each))
        last = min(count - 1, int((span.end - begin) / each))
        for column in range(first, last + 1):
            low = max(span.begin, begin + column * each)
            high = min(span.end, begin + (column + 1) * each)
            own = seconds[column]
            own[word] = own.get(word, 0.0) + max(0.0, high - low)
    runs: list[tuple[float, float, str]] = []
    for column, own in enumerate(seconds):
        # A hair of it at a column's edge is none.
        rare = next((word for word in RARE if own.get(word, 0.0) > 1e-3 * each), None)
        word = rare or max(own, key=own.__getitem__, default="waiting")
        if runs and runs[-1][2] == word:
            x, so_far, _ = runs[-1]
            runs[-1] = (x, so_far + wide, word)
        else:
            runs.append((frame.left + column * wide, wide, word))
    return runs


def _attempts(view: JobView, frame: Frame, begin: float, y: float) -> list[str]:
    """A bracket and a number below the band for each attempt."""
    spans: dict[int, list[float]] = {}
    for record in view.steps:
        own = spans.setdefault(record.attempt, [record.time - record.step_time_s, record.time])
        own[1] = max(own[1], record.time)
    parts = []
    for attempt, (first, last) in spans.items():
        x, until = frame.x(first - begin), frame.x(last - begin)
        parts.append(f'<path class="bracket" d="M{number(x)} {number(y)}v5H{number(until)}v-5"/>')
        word = f"attempt {attempt}" if until - x > 64 else str(attempt)
        if until - x > 7 * len(word):
            parts.append(text((x + until) / 2, y + 18, word, "axis mid"))
    return parts
