"""The live view of a job in a terminal, and its one-line form for everything else.

Promises: pure renderables made of a ``JobView``; nothing is printed here. Text of users and
runs is never read as markup. Fits any width from 40 columns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from monitoring.amax import split_name, worst_by_headroom
from monitoring.charts import duration, short
from monitoring.detectors.baseline import median
from monitoring.episodes import Episode, episodes
from monitoring.job_view import JobView, split_steps
from monitoring.records import StepRecord

BLOCKS = "▁▂▃▄▅▆▇█"
MOST_BARS = 8
"""Layers with a bar of their headroom, on a terminal that is high enough."""
LAST_EVENTS, MOST_EVENTS = 5, 10
"""Events shown on a terminal of few lines, and of many."""
MOST_LINES = 22
"""Below the head, where nobody says how high the terminal is."""
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


def watch_panel(view: JobView, width: int, height: int | None = None) -> RenderableType:
    """The whole job in one panel of ``width`` columns; of at most ``height`` lines where there are
    so few that something has to be left out."""
    inner = max(36, width - 4)
    kept, _ = split_steps(view)
    head: list[RenderableType] = [_progress(view, kept, inner)]
    head += [line for line in (_ranks(view, inner), _nodes(view, inner)) if line is not None]
    if kept:
        head += [_loss(kept, inner), _pace(kept, inner), _now(kept[-1], inner)]
    events = _events(view, inner, MOST_EVENTS)
    free = MOST_LINES if height is None else max(4, height - len(head) - 2)
    # Each part has a line between it and the one above. What happened comes first, then the
    # layers that are in trouble, then all others'.
    told = events[-min(len(events), LAST_EVENTS if free < 24 else MOST_EVENTS, max(1, free - 1)) :]
    free -= len(told) + 1
    parts = list(head)
    if kept:
        bars = _headroom(view, kept[-1], inner, min(MOST_BARS, max(free - 6, min(2, free - 2))))
        free -= len(bars) + 1
        parts += [Text(), *bars] if bars else []
        grid = _precision(kept[-1], inner, free - 1)
        parts += [Text(), *grid] if grid else []
    parts += [Text(), *told] if told else []
    style = STATE_STYLE.get(view.state, "cyan")
    title = Text.assemble((_visible(view.job), "bold"), "  ", (_visible(view.state), style))
    absent = float(view.extra.get("absent_s") or 0.0)
    if absent > 0:
        title.append(f"  the controller doesn't answer, for {duration(absent)}", "bold red")
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
        ("step", f"{record.step_time_s:.3g} s"),
    ]
    line = Text(no_wrap=True, overflow="ellipsis")
    for name, value in parts:
        line.append(f"{name} ", "dim").append(f"{value}  ")
    if record.skipped:
        line.append("update left out", "bold red")
    line.truncate(width, overflow="ellipsis")
    return line


def _pace(kept: Sequence[StepRecord], width: int) -> RenderableType:
    """Throughput of the newest steps."""
    speeds = [_tokens_per_s(record) for record in kept]
    label = f"tokens/s {short(speeds[-1])}  median {short(median(speeds[-RECENT_STEPS:]))}"
    room = max(8, width - len(label) - 2)
    line = sparkline(speeds[-4 * room :], room)
    return Text.assemble((line, "blue"), "  ", (label, "bold"), no_wrap=True)


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
        use = "spare" if node.get("spare") else f"{node['slots']} ranks"
        line.append(f"  {_visible(str(node['node_ip']))} ").append(use, "dim")
    line.truncate(width, overflow="ellipsis")
    return line


def _headroom(view: JobView, record: StepRecord, width: int, most: int) -> list[RenderableType]:
    """A bar each for the layers nearest to their format's maximum, by their worst operand."""
    fp8_format = str(view.section("fp8", "format") or "HYBRID")
    away = record.high_precision_layers
    worst = worst_by_headroom(record.tensors, len(record.tensors), fp8_format, away)
    by_layer: dict[str, tuple[str, float]] = {}
    for name, room in worst:
        by_layer.setdefault(split_name(name)[0], (name, room))
        if len(by_layer) >= most:
            break
    shown = list(by_layer.values())[: max(0, most)]
    if not shown:
        return []
    rows: list[RenderableType] = [Text("layers nearest to the FP8 maximum", "dim")]
    names = max(len(name) for name, _ in shown)
    bar = max(0, min(BAR_WIDTH, width - names - 18))
    for name, room in shown:
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
    return rows


def _precision(record: StepRecord, width: int, most: int) -> list[RenderableType]:
    """A letter each for all linears, 8 in FP8 and B in BF16, block by block."""
    away = record.high_precision_layers
    layers = dict.fromkeys([*(split_name(name)[0] for name in record.tensors), *away])
    if not layers or most < 1:
        return []
    blocks: dict[str, list[str]] = {}
    for layer in layers:
        blocks.setdefault(_block(layer), []).append(layer)
    moved = set(away)
    head = Text(no_wrap=True, overflow="ellipsis")
    head.append(f"precision: {len(layers) - len(moved)} linears in FP8 (8)", "dim")
    head.append(f", {len(moved)} in BF16 (B)", "magenta" if moved else "dim")
    head.truncate(width, overflow="ellipsis")
    rows: list[RenderableType] = [head]
    ordered = sorted(blocks, key=_number)
    wide = max(len(b) for b in ordered) + 2 + max(map(len, blocks.values()))
    each = max(1, width // wide)
    lines = max(0, most - (2 if moved else 1))
    if math.ceil(len(ordered) / each) > lines:
        # Where there is no room for all: those that are not as they began.
        ordered = [b for b in ordered if not moved.isdisjoint(blocks[b])]
        ordered = ordered[: each * lines]
    for start in range(0, len(ordered), each):
        line = Text(no_wrap=True, overflow="ellipsis")
        for block in ordered[start : start + each]:
            own = blocks[block]
            line.append(f"{_visible(block)} ", "dim")
            for layer in own:
                there = layer in moved
                line.append("B" if there else "8", "bold magenta" if there else "green")
            line.append(" " * (wide - len(block) - 1 - len(own)))
        line.truncate(width, overflow="ellipsis")
        rows.append(line)
    if away and most > 1:
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append("in BF16 ", "dim").append(_visible(", ".join(away)), "magenta")
        line.truncate(width, overflow="ellipsis")
        rows.append(line)
    return rows


def _block(layer: str) -> str:
    """``3`` of ``layers.3.mlp.down``: what stands together in the grid."""
    return next((word for word in layer.split(".") if word.isdigit()), "")


def _number(block: str) -> tuple[int, str]:
    return (int(block), "") if block.isdigit() else (-1, block)


def _events(view: JobView, width: int, most: int) -> list[RenderableType]:
    """The last few things that happened: events, troubles and answers, by time."""
    told: list[tuple[float, str, str]] = [
        (float(e["time"]), str(e["message"]), "") for e in view.events[-most:]
    ]
    for episode in episodes(view):
        told.append((episode.time, _story(episode), "yellow" if episode.incidents else "green"))
    told.sort(key=lambda entry: entry[0])
    rows: list[RenderableType] = []
    for at, message, style in told[-most:]:
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
