"""The live view of a job in a terminal, and its one-line form for everything else.

Promises: pure renderables made of a ``JobView``; nothing is printed here. Text of users and
runs is never read as markup. Fits any width from 40 columns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from monitoring.amax import worst_by_headroom
from monitoring.charts import duration, short
from monitoring.detectors.baseline import median
from monitoring.episodes import Episode, episodes
from monitoring.job_view import JobView, split_timelines
from monitoring.records import StepRecord

BLOCKS = "▁▂▃▄▅▆▇█"
WORST_LAYERS = 3
LAST_EVENTS = 5
BAR_WIDTH = 16
BAR_OCTAVES = 4.0
RECENT_STEPS = 50
"""Steps whose median time makes the ETA."""

STATE_STYLE = {
    "running": "green",
    "succeeded": "bold green",
    "recovering": "bold yellow",
    "paused": "bold yellow",
    "failed": "bold red",
    "cancelled": "magenta",
}


def watch_panel(view: JobView, width: int) -> RenderableType:
    """The whole job in one panel of ``width`` columns."""
    inner = max(36, width - 4)
    kept, _ = split_timelines(view.steps)
    parts: list[RenderableType] = [_progress(view, kept, inner)]
    if kept:
        parts += [Text(), _loss(kept, inner), _now(kept[-1], inner)]
        parts += _precision(view, kept[-1], inner)
    told = _events(view, inner)
    if told:
        parts += [Text(), *told]
    style = STATE_STYLE.get(view.state, "cyan")
    title = Text.assemble((_visible(view.job), "bold"), "  ", (_visible(view.state), style))
    return Panel(Group(*parts), title=title, title_align="left", width=max(40, width))


def plain_line(record: StepRecord) -> str:
    """One step in one line without control characters, for pipes and logs."""
    parts = [
        f"step {record.step:>5}",
        f"loss {_fixed(record.loss, 4)}",
        f"grad norm {short(record.grad_norm)}",
        f"lr {record.lr:.2e}",
        f"{short(_tokens_per_s(record))} tokens/s",
    ]
    if record.high_precision_layers:
        parts.append(f"{len(record.high_precision_layers)} linears in BF16")
    if record.skipped:
        parts.append("update left out")
    if record.timeline or record.attempt > 1:
        parts.append(f"attempt {record.attempt}, timeline {record.timeline}")
    return "  ".join(parts)


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as a row of blocks, the newest at the right; gaps where not finite."""
    if not values or width < 1:
        return ""
    size = max(1, math.ceil(len(values) / width))
    groups = [values[i : i + size] for i in range(0, len(values), size)]
    # The largest of each stretch, so that a single bad step stays visible.
    peaks = [max((v for v in g if math.isfinite(v)), default=math.nan) for g in groups]
    finite = [p for p in peaks if math.isfinite(p)]
    if not finite:
        return " " * len(peaks)
    low, high = min(finite), max(finite)
    top = len(BLOCKS) - 1
    return "".join(
        " "
        if not math.isfinite(p)
        else BLOCKS[round((p - low) / (high - low) * top) if high > low else 0]
        for p in peaks
    )


def eta_s(view: JobView, kept: Sequence[StepRecord]) -> float | None:
    """Seconds to the end at the recent pace; None before the second step and when done."""
    total = view.section("training", "steps")
    if not isinstance(total, int) or len(kept) < 2:
        return None
    left = total - 1 - kept[-1].step
    recent = [r.step_time_s for r in kept[-RECENT_STEPS:]]
    return left * median(recent) if left > 0 else None


def _progress(view: JobView, kept: Sequence[StepRecord], width: int) -> RenderableType:
    total = view.section("training", "steps")
    done = kept[-1].step + 1 if kept else 0
    if not isinstance(total, int):
        return Text(f"{done} steps")
    left = eta_s(view, kept)
    eta = f"{duration(left)} left" if left is not None else ""
    label = f"{done}/{total} steps" + (f"  {eta}" if eta else "")
    bar = ProgressBar(total=total, completed=done, width=max(8, width - len(label) - 2))
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_row(bar, Text(label, no_wrap=True))
    return row


def _loss(kept: Sequence[StepRecord], width: int) -> RenderableType:
    losses = [r.loss for r in kept]
    best = min((x for x in losses if math.isfinite(x)), default=math.nan)
    label = f"loss {_fixed(losses[-1], 4)}  best {_fixed(best, 4)}"
    line = sparkline(losses, max(8, width - len(label) - 2))
    return Text.assemble((line, "cyan"), "  ", (label, "bold"), no_wrap=True)


def _now(record: StepRecord, width: int) -> RenderableType:
    parts = [
        ("grad norm", short(record.grad_norm)),
        ("lr", f"{record.lr:.2e}"),
        ("tokens/s", short(_tokens_per_s(record))),
        ("step", f"{record.step_time_s:.3g} s"),
    ]
    line = Text(no_wrap=True, overflow="ellipsis")
    for name, value in parts:
        line.append(f"{name} ", "dim").append(f"{value}  ")
    if record.skipped:
        line.append("update left out", "bold red")
    line.truncate(width, overflow="ellipsis")
    return line


def _precision(view: JobView, record: StepRecord, width: int) -> list[RenderableType]:
    """Headroom of the worst tensors as bars, and the layers in BF16."""
    fp8_format = str(view.section("fp8", "format") or "HYBRID")
    away = record.high_precision_layers
    worst = worst_by_headroom(record.tensors, WORST_LAYERS, fp8_format, away)
    rows: list[RenderableType] = []
    if worst:
        rows.append(Text("\nnearest to the FP8 maximum", "dim"))
    names = max((len(name) for name, _ in worst), default=0)
    bar = max(0, min(BAR_WIDTH, width - names - 34))
    for name, room in worst:
        clamped = record.tensors[name].saturated_pct
        style = "red" if clamped >= 1 else "yellow" if clamped >= 0.1 else "green"
        # Full at the maximum, empty from BAR_OCTAVES below it.
        full = round(bar * min(1.0, max(0.0, 1.0 - room / BAR_OCTAVES)))
        line = Text(no_wrap=True, overflow="ellipsis")
        if clamped >= 0.1:
            line.append(f"{clamped:5.1f} % clamped ", style)
        else:
            line.append(f"{room:+5.1f} octaves   ", style)
        line.append("█" * full, style).append("·" * (bar - full), "dim")
        line.append(_visible(f" {name}" if bar else name))
        line.truncate(width, overflow="ellipsis")
        rows.append(line)
    if away:
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append("in BF16 ", "dim").append(_visible(", ".join(away)), "magenta")
        line.truncate(width, overflow="ellipsis")
        rows.append(line)
    return rows


def _events(view: JobView, width: int) -> list[RenderableType]:
    """The last few things that happened: events, troubles and answers, by time."""
    told: list[tuple[float, str, str]] = [
        (float(e["time"]), str(e["message"]), "") for e in view.events
    ]
    for episode in episodes(view):
        told.append((episode.time, _story(episode), "yellow" if episode.incidents else "green"))
    told.sort(key=lambda entry: entry[0])
    rows: list[RenderableType] = []
    for at, message, style in told[-LAST_EVENTS:]:
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(time.strftime("%H:%M:%S ", time.localtime(at)), "dim").append(
            _visible(message), style
        )
        line.truncate(width, overflow="ellipsis")
        rows.append(line)
    return rows


def _story(episode: Episode) -> str:
    if not episode.incidents:
        return f"Step {episode.step}: {episode.answer}"
    return f"Step {episode.step}: {episode.trouble} → {episode.answer}"


def _tokens_per_s(record: StepRecord) -> float:
    return record.tokens / record.step_time_s if record.step_time_s > 0 else 0.0


def _visible(content: str) -> str:
    """Without control characters: a message must not steer the reader's terminal."""
    return "".join(c if c.isprintable() else " " for c in content)


def _fixed(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else str(value)
