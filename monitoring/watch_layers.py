"""The layers in the live view: a bar for those in or near trouble, and the precision of all.

Promises: pure renderables, each line as wide as it is told at most. A layer with clamped values
comes first, then those whose amax grows: the room below the maximum says little, for a scale that
is made from amax leaves next to none (``monitoring.amax_trend``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rich.console import RenderableType
from rich.text import Text

from monitoring.amax import split_name, worst_by_headroom
from monitoring.amax_trend import growth, octaves
from monitoring.job_view import JobView
from monitoring.records import StepRecord
from monitoring.tensor_stats import TensorStats
from monitoring.wording import counted

BAR_WIDTH = 16
BAR_OCTAVES = 4.0
TREND_STEPS = 500
"""Newest steps over which growth is told."""


def with_statistics(kept: Sequence[StepRecord]) -> StepRecord:
    """The newest step, with the newest statistics of tensors that there are: not every step has
    its own."""
    tensors = next((r.tensors for r in reversed(kept) if r.tensors), kept[-1].tensors)
    return kept[-1] if kept[-1].tensors else replace(kept[-1], tensors=tensors)


def layer_bars(
    view: JobView, kept: Sequence[StepRecord], width: int, most: int
) -> list[RenderableType]:
    """A bar each for the layers in most trouble, by their worst operand: its share of clamped
    values, else how many octaves its amax grew; before that is known, how near it is to the FP8
    maximum."""
    record = with_statistics(kept)
    away = frozenset(record.high_precision_layers)
    grown = growth([r for r in kept[-TREND_STEPS:] if r.tensors])
    if grown is None:
        fp8_format = str(view.section("fp8", "format") or "HYBRID")
        rated = worst_by_headroom(record.tensors, len(record.tensors), fp8_format, away)
        # Full at the maximum, empty from BAR_OCTAVES below it.
        found = {name: (room, 1.0 - room / BAR_OCTAVES) for name, room in rated}
        head = "layers nearest to the FP8 maximum"
    else:
        told = zip(grown.names, grown.octaves.tolist(), strict=True)
        # Where nothing is known nothing grew.
        growing = sorted((0.0 if math.isnan(by) else -by, name) for name, by in told)
        found = {name: (-by, -by / BAR_OCTAVES) for by, name in growing}
        head = f"layers whose amax grew most in {counted(grown.steps, 'step')}"
    clamped = [n for n in found if record.tensors[n].saturated_pct >= 0.1]
    clamped.sort(key=lambda n: -record.tensors[n].saturated_pct)
    by_layer: dict[str, str] = {}
    for name in [*clamped, *found]:
        layer = split_name(name)[0]
        if layer not in away:
            by_layer.setdefault(layer, name)
    shown = list(by_layer.values())[: max(0, most)]
    if not shown:
        return []
    bar = max(0, min(BAR_WIDTH, width - max(map(len, shown)) - 18))
    rows: list[RenderableType] = [Text(head, "dim", no_wrap=True, overflow="ellipsis")]
    rows += [_bar(name, found[name], record.tensors, bar, width) for name in shown]
    return rows


def _bar(
    name: str,
    told: tuple[float, float],
    tensors: Mapping[str, TensorStats],
    bar: int,
    width: int,
) -> Text:
    by, share = told
    clamped = tensors[name].saturated_pct
    style = "red" if clamped >= 1 else "yellow" if clamped >= 0.1 or share >= 0.5 else "green"
    full = round(bar * min(1.0, max(0.0, share)))
    line = Text(no_wrap=True, overflow="ellipsis")
    if clamped >= 0.1:
        line.append(f"{clamped:5.1f} % clamped ", style)
        full = bar
    else:
        line.append(f"{octaves(by):>5} octaves   ", style)
    line.append("█" * full, style).append("·" * (bar - full), "dim")
    line.append(visible(f" {name}" if bar else name))
    line.truncate(width, overflow="ellipsis")
    return line


def precision_lines(record: StepRecord, width: int, most: int) -> list[RenderableType]:
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
    head.append(f"precision: {counted(len(layers) - len(moved), 'linear')} in FP8 (8)", "dim")
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
            line.append(f"{visible(block)} ", "dim")
            for layer in own:
                there = layer in moved
                line.append("B" if there else "8", "bold magenta" if there else "green")
            line.append(" " * (wide - len(block) - 1 - len(own)))
        line.truncate(width, overflow="ellipsis")
        rows.append(line)
    if away and most > 1:
        line = Text(no_wrap=True, overflow="ellipsis")
        line.append("in BF16 ", "dim").append(visible(", ".join(away)), "magenta")
        line.truncate(width, overflow="ellipsis")
        rows.append(line)
    return rows


def _block(layer: str) -> str:
    """``3`` of ``layers.3.mlp.down``: what stands together in the grid."""
    return next((word for word in layer.split(".") if word.isdigit()), "")


def _number(block: str) -> tuple[int, str]:
    return (int(block), "") if block.isdigit() else (-1, block)


def visible(content: str) -> str:
    """Without control characters: a message must not steer the reader's terminal."""
    return "".join(c if c.isprintable() else " " for c in content)
