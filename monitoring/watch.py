"""The live view of a job in a terminal, and its one-line form for everything else.

Promises: pure renderables made of a ``JobView``; nothing is printed here. Text of users and
runs is never read as markup. Fits any width from 40 columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from monitoring.charts import duration, short, whole
from monitoring.clock import clock, day, zone
from monitoring.detectors.baseline import median
from monitoring.episodes import Episode, episodes
from monitoring.job_view import JobView, split_steps
from monitoring.records import StepRecord
from monitoring.summary import tally
from monitoring.utilization import mfu_pct, peaks_of
from monitoring.watch_layers import layer_bars, precision_lines, visible, with_statistics
from monitoring.wording import counted, place

BLOCKS = "▁▂▃▄▅▆▇█"
MOST_BARS = 8
"""Layers with a bar of their headroom, on a terminal that is high enough."""
LAST_EVENTS, MOST_EVENTS = 5, 10
"""Events shown on a terminal of few lines, and of many."""
MOST_LINES = 22
"""Below the head, where nobody says how high the terminal is."""
ROUTINE = frozenset({"checkpoint_written"})
"""Events that come again and again while all is well."""
GRAPH_WIDTH = 8
"""Columns of a graph at least."""
RECENT_STEPS = 50
"""Steps whose median time makes the ETA."""
NO_PACE = frozenset({"queued", "paused", "succeeded", "failed", "cancelled"})
"""States of a job that takes no steps."""

STATE_STYLE = {
    "running": "green",
    "succeeded": "bold green",
    "recovering": "bold yellow",
    "paused": "bold yellow",
    "failed": "bold red",
    "cancelled": "magenta",
}


def watch_panel(view: JobView, width: int, height: int | None = None) -> RenderableType:
    """The whole job in one panel of ``width`` columns; of at most ``height`` lines where there are
    so few that something has to be left out."""
    inner = max(36, width - 4)
    kept, _ = split_steps(view)
    head = _head(view, kept, inner, None if height is None else max(3, height - 6))
    free = MOST_LINES if height is None else max(4, height - len(head) - 2)
    # Each part has a line between it and the one above. What happened comes first, then the
    # layers that are in trouble, then all others'.
    most = min(LAST_EVENTS if free < 24 else MOST_EVENTS, max(1, free - 1))
    told = _told(view, most)
    free -= len(told) + 1
    parts = list(head)
    if kept:
        bars = layer_bars(view, kept, inner, min(MOST_BARS, max(free - 6, min(2, free - 2))))
        free -= len(bars) + 1
        parts += [Text(), *bars] if bars else []
        grid = precision_lines(with_statistics(kept), inner, free - 1)
        parts += [Text(), *grid] if grid else []
    parts += [Text(), *_events(told, inner)] if told else []
    style = STATE_STYLE.get(view.state, "cyan")
    title = Text.assemble((visible(view.job), "bold"), "  ", (visible(view.state), style))
    absent = float(view.extra.get("absent_s") or 0.0)
    if absent > 0:
        title.append(f"  the controller doesn't answer, for {duration(absent)}", "bold red")
    below = Text(f"times in {zone(told[-1][0])}", "dim") if told else None
    return Panel(
        Group(*parts),
        title=title,
        title_align="left",
        subtitle=below,
        subtitle_align="right",
        width=max(40, width),
    )


def _head(
    view: JobView, kept: Sequence[StepRecord], width: int, most: int | None
) -> list[RenderableType]:
    """What is said of the whole job, in at most that many lines."""
    lines: list[tuple[int, RenderableType | None]] = [
        (0, _progress(view, kept, width)),
        (5, _ranks(view, width)),
        (7, _nodes(view, width)),
    ]
    if kept:
        lines += [
            (1, _loss(kept, width)),
            (4, _pace(view, kept, width)),
            (6, _now(kept[-1], width)),
        ]
    lines += [(3, _so_far(view, width)), (2, _why(view, width))]
    there = [line for line in lines if line[1] is not None]
    # The first number says what goes last, where there is little room.
    limit = sorted(rank for rank, _ in there)[: len(there) if most is None else most][-1]
    return [line for rank, line in there if rank <= limit and line is not None]


def _why(view: JobView, width: int) -> RenderableType | None:
    """Why a job that goes no further doesn't."""
    reason = visible(str(view.extra.get("reason") or ""))
    if view.state not in ("paused", "failed", "cancelled") or not reason:
        return None
    line = Text(reason, STATE_STYLE[view.state], no_wrap=True, overflow="ellipsis")
    line.truncate(width, overflow="ellipsis")
    return line


def plain_line(record: StepRecord) -> str:
    """One step in one line without control characters, for pipes and logs."""
    parts = [
        f"step {record.step:>5}",
        f"loss {_fixed(record.loss, 4)}",
        f"grad norm {short(record.grad_norm)}",
        f"lr {record.lr:.2e}",
        f"{whole(_tokens_per_s(record))} tokens/s",
    ]
    if record.high_precision_layers:
        parts.append(f"{counted(len(record.high_precision_layers), 'linear')} in BF16")
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
    """Seconds to the end at the recent pace; None before the second step, and where nothing is on
    its way there: done, or at rest."""
    total = view.section("training", "steps")
    if view.state in NO_PACE or not isinstance(total, int) or len(kept) < 2:
        return None
    left = total - 1 - kept[-1].step
    recent = [r.step_time_s for r in kept[-RECENT_STEPS:]]
    return left * median(recent) if left > 0 else None


def _fitting(parts: Sequence[str], width: int) -> str:
    """As many of ``parts`` as fit, from the first on. None is cut: its number would be another."""
    shown = ""
    for part in parts:
        longer = f"{shown}  {part}" if shown else part
        if len(longer) > width:
            break
        shown = longer
    return shown


def _beside(drawn: Callable[[int], str], parts: Sequence[str], width: int, style: str) -> Text:
    """A small graph with words beside it; ``drawn``: of so many columns."""
    label = _fitting(parts, width - GRAPH_WIDTH - 2) or _fitting(parts, width)
    room = width - len(label) - 2
    line = Text(no_wrap=True, overflow="ellipsis")
    if room >= GRAPH_WIDTH:
        line.append(drawn(room), style).append("  ")
    return line.append(label, "bold")


def _progress(view: JobView, kept: Sequence[StepRecord], width: int) -> RenderableType:
    total = view.section("training", "steps")
    done = kept[-1].step + 1 if kept else 0
    if not isinstance(total, int):
        return Text(counted(done, "step"))
    left = eta_s(view, kept)
    parts = [f"{done}/{total} steps"] + ([f"{duration(left)} left"] if left is not None else [])
    label = _fitting(parts, width - GRAPH_WIDTH - 2) or _fitting(parts, width)
    room = width - len(label) - 2
    if room < GRAPH_WIDTH:
        return Text(label)
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_row(ProgressBar(total=total, completed=done, width=room), Text(label, no_wrap=True))
    return row


def _loss(kept: Sequence[StepRecord], width: int) -> RenderableType:
    losses = [r.loss for r in kept]
    best = min((x for x in losses if math.isfinite(x)), default=math.nan)
    parts = [f"loss {_fixed(losses[-1], 4)}", f"best {_fixed(best, 4)}"]
    return _beside(lambda room: sparkline(losses, room), parts, width, "cyan")


def _now(record: StepRecord, width: int) -> RenderableType:
    parts = [
        ("grad norm", short(record.grad_norm)),
        ("lr", f"{record.lr:.2e}"),
        ("step", f"{record.step_time_s:.3g} s"),
    ]
    line = Text(no_wrap=True, overflow="ellipsis")
    for name, value in parts:
        line.append(f"{name} ", "dim").append(f"{value}  ")
    if record.skipped:
        line.append("update left out", "bold red")
    line.truncate(width, overflow="ellipsis")
    return line


def _pace(view: JobView, kept: Sequence[StepRecord], width: int) -> RenderableType:
    """Throughput of the newest steps, and the newest one's MFU where it is known."""
    speeds = [_tokens_per_s(record) for record in kept]
    parts = [f"tokens/s {whole(speeds[-1])}", f"median {whole(median(speeds[-RECENT_STEPS:]))}"]
    mfu = mfu_pct(kept[-1], peaks_of(view).get(kept[-1].attempt))
    if mfu is not None:
        parts.insert(1, f"MFU {mfu:.1f} %")
    return _beside(lambda room: sparkline(speeds[-4 * room :], room), parts, width, "blue")


def _so_far(view: JobView, width: int) -> RenderableType | None:
    """What recovery came to, so that who looks an hour later sees that there was any."""
    if not view.incidents and not view.actions:
        return None
    totals = tally(view)
    troubles = {(i.get("attempt"), i.get("timeline"), i["step"]) for i in view.incidents}
    found = (
        (len(troubles), "trouble"),
        (totals.rollbacks, "rollback"),
        (totals.restarts, "restart"),
        (totals.steps_lost, "step"),
    )
    parts = [counted(number, word) for number, word in found if number]
    if totals.steps_lost:
        parts[-1] += " lost"
    if not parts:
        return None
    words = [f"so far {parts[0]}", *parts[1:]]
    label = _fitting(words, width)
    if label != "  ".join(words):
        # What is left out is not to read as what there was not.
        label = f"{_fitting(words, width - 2)} …"
    return Text.assemble(("so far ", "dim"), label.removeprefix("so far "))


def _ranks(view: JobView, width: int) -> RenderableType | None:
    """How the ranks divide the work, and which attempt they are in."""
    degrees = view.section("parallelism")
    if not isinstance(degrees, Mapping):
        return None
    sizes = {name: int(degrees.get(name) or 1) for name in ("pipeline", "tensor", "data")}
    ranks = math.prod(sizes.values())
    told = " × ".join(f"{size} {name}" for name, size in sizes.items() if size > 1)
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append("ranks ", "dim").append(f"{ranks}").append(f"  {told}" if told else "")
    attempt = view.extra.get("attempt")
    if attempt:
        line.append("  attempt ", "dim").append(str(attempt))
    line.truncate(width, overflow="ellipsis")
    return line


def _nodes(view: JobView, width: int) -> RenderableType | None:
    """The nodes that the job holds, with their ranks."""
    nodes = view.extra.get("nodes")
    if not nodes:
        return None
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append("nodes ", "dim").append(str(len(nodes)))
    for node in nodes:
        use = "spare" if node.get("spare") else counted(int(node["slots"]), "rank")
        line.append(f"  {visible(str(node['node_ip']))} ").append(use, "dim")
    line.truncate(width, overflow="ellipsis")
    return line


def _told(view: JobView, most: int) -> list[tuple[float, str, str]]:
    """(time, words, style) of the last few things that happened, by time.

    Of what comes again and again the newest alone is told, and the newest trouble always is.
    """
    told: list[tuple[float, str, str]] = []
    seen: set[str] = set()
    for event in reversed(view.events):
        kind = str(event.get("kind"))
        if kind in ROUTINE and kind in seen:
            continue
        seen.add(kind)
        told.append((float(event["time"]), str(event["message"]), ""))
        if len(told) >= most:
            break
    for episode in episodes(view):
        told.append((episode.time, _story(episode), "yellow" if episode.incidents else "green"))
    told.sort(key=lambda entry: entry[0])
    troubles = [entry for entry in told if entry[2] == "yellow"]
    shown = told[-most:]
    if troubles and most > 1 and troubles[-1] not in shown:
        shown[0] = troubles[-1]
    return shown


def _events(told: Sequence[tuple[float, str, str]], width: int) -> list[RenderableType]:
    """A line each; with the date where they are not all of one day."""
    dated = len({day(at) for at, _, _ in told}) > 1
    rows: list[RenderableType] = []
    for at, message, style in told:
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append(f"{clock(at, date=dated)[5 if dated else 0 :]} ", "dim")
        line.append(visible(message), style)
        line.truncate(width, overflow="ellipsis")
        rows.append(line)
    return rows


def _story(episode: Episode) -> str:
    if not episode.incidents:
        return f"{_place(episode)}: {episode.answer}"
    return f"{_place(episode)}: {episode.trouble} → {episode.answer}"


def _place(episode: Episode) -> str:
    told = place(episode.step)
    return told[0].upper() + told[1:]


def _tokens_per_s(record: StepRecord) -> float:
    return record.tokens / record.step_time_s if record.step_time_s > 0 else 0.0


def _fixed(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else str(value)
