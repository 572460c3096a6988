"""The report's charts of one job: loss, gradient norm, FP8 range, layers in BF16, a picture.

Promises: pure; each takes a ``Story`` (a view, read once) and a width in pixels, and gives
SVG. Abandoned steps are drawn paler and dashed beside those that were kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import zip_longest

from monitoring.charts import (
    HATCH,
    Frame,
    Point,
    arc_back,
    badges,
    dots,
    heat_map,
    line,
    number,
    picture,
    short,
    text,
)
from monitoring.episodes import Episode, bf16_stretches, episodes
from monitoring.job_view import JobView, split_steps
from monitoring.records import StepRecord
from monitoring.report_layers import Layers
from monitoring.report_style import PICTURE
from monitoring.wording import at_step, counted, place

MOST_LAYERS = 24
"""Rows of the heat map; with more layers the worst are shown."""
GOOD_KINDS = frozenset({"return_to_fp8", "exchange_fp8", "exchange_chosen"})
"""Decisions that are good news."""


@dataclass(frozen=True, slots=True)
class Story:
    """A view with what the charts share of it."""

    view: JobView
    kept: list[StepRecord]
    lost: list[list[StepRecord]]
    """Abandoned records, one list a stretch of one attempt and timeline."""
    episodes: list[Episode]
    bf16: dict[str, list[tuple[int, int]]]
    layers: Layers

    @classmethod
    def of(cls, view: JobView) -> Story:
        kept, abandoned = split_steps(view)
        stretches: list[list[StepRecord]] = []
        for record in abandoned:
            newest = stretches[-1][-1] if stretches else None
            if newest is None or (newest.attempt, newest.timeline, newest.step + 1) != (
                record.attempt,
                record.timeline,
                record.step,
            ):
                stretches.append([])
            stretches[-1].append(record)
        layers = Layers.of(kept, abandoned)
        return cls(view, kept, stretches, episodes(view), bf16_stretches(kept), layers)

    @property
    def x_range(self) -> tuple[float, float]:
        """Steps shown: all there are, abandoned ones included."""
        every = [r.step for r in self.kept] + [r.step for part in self.lost for r in part]
        return (float(min(every, default=0)), float(max(max(every, default=1), 1)))


def is_good(episode: Episode) -> bool:
    """Whether an episode is good news, drawn in the colour of recovery."""
    return not episode.incidents and episode.action is not None and (
        episode.action["kind"] in GOOD_KINDS
    )  # fmt: skip


def _finite(values: list[float]) -> list[float]:
    return [v for v in values if math.isfinite(v)]


def _loss_range(story: Story) -> tuple[float, float]:
    """Room for the kept losses, and for the abandoned ones unless they dwarf those."""
    kept = _finite([r.loss for r in story.kept]) or [0.0, 1.0]
    lost = _finite([r.loss for part in story.lost for r in part])
    low, high = min(kept + lost), max(kept)
    highest = max([high, *lost])
    high = highest if highest <= 1.7 * high else 1.25 * high
    pad = 0.05 * max(high - low, 1e-3)
    return (low - pad, high + pad)


def _marks(story: Story, frame: Frame, lane: float) -> str:
    """Dashed lines and numbered badges of the episodes, arrows back where steps were redone."""
    parts, marks = [], []
    for episode in story.episodes:
        good = is_good(episode)
        x = frame.x(max(0, episode.step))
        kind = "mark-good" if good else "mark"
        parts.append(f'<path class="{kind}" d="M{number(x)} {number(lane + 9)}V{frame.floor}"/>')
        if episode.to_step is not None:
            parts.append(arc_back(frame, episode.step, episode.to_step, lane - 11))
        tip = f"{place(episode.step)}: {episode.trouble or episode.answer}"
        marks.append((x, str(episode.number), "good" if good else "", tip))
    return "".join([*parts, badges(marks, lane)])


def _lines(story: Story, frame: Frame, value: str) -> str:
    parts = []
    for stretch in story.lost:
        points: list[Point] = [(r.step, getattr(r, value)) for r in stretch]
        before = [r for r in story.kept if r.step == stretch[0].step - 1]
        joined = [(float(r.step), float(getattr(r, value))) for r in before] + points
        parts.append(line(frame, joined, "ghost"))
        if len(points) <= 120:
            parts.append(dots(frame, points, "ghost-dot"))
    kept = [(float(r.step), float(getattr(r, value))) for r in story.kept]
    parts.append(line(frame, kept, "kept"))
    skipped = [(float(r.step), float(getattr(r, value))) for r in story.kept if r.skipped]
    parts.append(dots(frame, skipped, "skip-dot", 4))
    return "".join(parts)


def _beyond(story: Story, frame: Frame) -> str:
    """Arrowheads at the upper edge for losses that lie above the picture."""
    parts = []
    for stretch in story.lost:
        above = [r for r in stretch if math.isfinite(r.loss) and r.loss > frame.y_range[1]]
        if above:
            worst = max(above, key=lambda r: r.loss)
            x, y = frame.x(worst.step), frame.top
            parts.append(f'<path class="over" d="M{number(x - 5)} {y + 9}h10l-5 -9z"/>')
            parts.append(text(x - 9, y + 9, short(worst.loss), "note soft end"))
    return "".join(parts)


def loss_chart(story: Story, width: float) -> str:
    """Loss over steps with incidents, the way back, and the abandoned steps."""
    height = 330.0 if width > 500 else 290.0
    lane = 40.0
    frame = Frame(width, height, story.x_range, _loss_range(story), top=62.0)
    body = frame.axes() + _lines(story, frame, "loss") + _beyond(story, frame)
    body += _marks(story, frame, lane)
    return picture(width, height, _told(story, "loss", "Training loss in nats a token"), body)


def grad_norm_chart(story: Story, width: float) -> str:
    """Gradient norm over steps on a logarithmic scale."""
    height = 190.0
    every = story.kept + [r for part in story.lost for r in part]
    values = [r.grad_norm for r in every if math.isfinite(r.grad_norm) and r.grad_norm > 0]
    low, high = (min(values), max(values)) if values else (0.1, 1.0)
    frame = Frame(width, height, story.x_range, (low / 1.2, high * 1.2), log=True)
    body = frame.axes() + "".join(
        f'<path class="{"mark-good" if is_good(e) else "mark"}" '
        f'd="M{number(frame.x(max(0, e.step)))} {frame.top}V{frame.floor}"/>'
        for e in story.episodes
    )
    body += _lines(story, frame, "grad_norm")
    label = _told(story, "grad_norm", "Gradient norm, logarithmic")
    return picture(width, height, label, body)


def _told(story: Story, value: str, what: str) -> str:
    """A line in words: where it begins, ends, and was at most and least."""
    points = [(r.step, getattr(r, value)) for r in story.kept if math.isfinite(getattr(r, value))]
    if not points:
        return f"{what}: never finite"
    (first, begin), (last, end) = points[0], points[-1]
    low, high = min(points, key=lambda p: p[1]), max(points, key=lambda p: p[1])
    told = f"{what}: {short(begin)} at step {first}, {short(end)} at step {last}"
    told += f"; lowest {short(low[1])} at step {low[0]}, highest {short(high[1])} at step {high[0]}"
    lost = _finite([getattr(r, value) for part in story.lost for r in part])
    if lost:
        told += f"; {counted(len(lost), 'undone step')} reached {short(max(lost))}"
    return told


def precision_chart(story: Story, width: float) -> str:
    """Heat map layer × step: clamped values and rise of amax, BF16 stretches striped."""
    rows = story.layers.worst(MOST_LAYERS)
    height = 8 + 15.0 * max(1, len(rows)) + 30
    left = min(16 + 6.6 * max((len(name) for name in rows), default=4), 0.42 * width)
    frame = Frame(width, height, story.x_range, (0, 1), left=left, top=8.0)
    hatched = {k: [(float(a), float(b)) for a, b in v] for k, v in story.bf16.items()}
    body = heat_map(frame, rows, story.layers.cells, hatched)
    label = (
        f"Clamped values and rise of amax of {counted(len(rows), 'layer')} by step; in words below"
    )
    return picture(width, height, label, body)


def bf16_chart(story: Story, width: float) -> str:
    """Bars of the stretches that layers spent in BF16; empty when none did."""
    rows = sorted(story.bf16)
    height = 8 + 20.0 * len(rows) + 30
    left = min(16 + 6.6 * max((len(name) for name in rows), default=4), 0.42 * width)
    frame = Frame(width, height, story.x_range, (0, 1), left=left, top=8.0)
    parts = []
    for i, row in enumerate(rows):
        y = frame.top + 20 * i
        parts.append(text(left - 7, y + 14, row, "axis end"))
        parts.append(f'<path class="grid" d="M{number(left)} {y + 10}H{width - frame.right}"/>')
        for begin, end in story.bf16[row]:
            x, until = frame.x(begin), min(frame.x(end), width - frame.right)
            parts.append(
                f'<rect class="hatched" x="{number(x)}" y="{y + 3}" rx="3" height="14" '
                f'width="{number(max(3.0, until - x))}">'
                f"<title>steps {begin} to {end - 1}</title></rect>"
            )
    label = f"When {counted(len(rows), 'layer')} computed in BF16; in words below"
    return picture(width, height, label, "".join(parts) + frame.x_axis())


def recovery_picture(view: JobView) -> str:
    """A picture of the job's first recovery that stands alone, as for a README."""
    story = Story.of(view)
    width, height, lane = 860.0, 400.0, 96.0
    frame = Frame(width, height, story.x_range, _loss_range(story), 58, 26, 116, 66)
    back = next((e for e in story.episodes if e.to_step is not None), None)
    body = "".join(
        [
            f"<style>{PICTURE}</style>{HATCH}",
            '<rect class="paper" x=".5" y=".5" width="859" height="399" rx="12"/>',
            text(24, 32, _headline(story, back), "title"),
            text(24, 52, "Training loss in nats a token; orange: steps that were undone", "soft"),
            frame.axes(),
            _lines(story, frame, "loss"),
            _beyond(story, frame),
            _marks(story, frame, lane),
            _calls(story, frame, lane),
            _bf16_bar(story, frame, height - 34),
        ]
    )
    return picture(width, height, _headline(story, back), body)


def _calls(story: Story, frame: Frame, lane: float) -> str:
    """What each badge stands for, beside it where there is room."""
    parts = []
    for episode, following in zip_longest(story.episodes, story.episodes[1:]):
        words = episode.trouble if not is_good(episode) else episode.answer
        x = frame.x(max(0, episode.step)) + 14
        until = frame.width - 12 if following is None else frame.x(following.step) - 12
        if x + 7.3 * len(words) <= until:
            parts.append(text(x, lane + 4, words, f"call {'good' if is_good(episode) else 'bad'}"))
    return "".join(parts)


def _bf16_bar(story: Story, frame: Frame, y: float) -> str:
    """One bar below the axis for all layers that were in BF16 for a while."""
    if not story.bf16:
        return ""
    names = sorted(story.bf16)
    begin = min(a for own in story.bf16.values() for a, _ in own)
    end = max(b for own in story.bf16.values() for _, b in own)
    x, until = frame.x(begin), min(frame.x(end), frame.width - frame.right)
    others = len(names) - 1
    label = names[0] + (f" and {others} more" if others else "") + " in BF16"
    fits = 6.4 * len(label) < x - frame.left
    return (
        f'<rect class="hatched" x="{number(x)}" y="{number(y)}" rx="4" height="16" '
        f'width="{number(until - x)}"/>'
        + (text(x - 8, y + 13, label, "call end") if fits else text(until + 8, y + 13, label))
    )


def _headline(story: Story, back: Episode | None) -> str:
    if back is None:
        return f"{story.view.job}: {counted(len(story.kept), 'step')}"
    trouble = back.trouble or "trouble"
    answer = back.answer
    return (
        f"{trouble[0].upper()}{trouble[1:]} {at_step(back.step)}: {answer[0].lower()}{answer[1:]}"
    )
