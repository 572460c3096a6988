"""One self-contained HTML report of a job.

Promises: no script, no reference to anything outside the file, every text from a user or a
run escaped; readable on a phone, on paper, in light and dark mode, and without colour
vision. Works for a job of any length and any state, one without a step included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

import yaml

from monitoring.charts import HATCH, PATTERNS, duration, short
from monitoring.clock import clock, zone
from monitoring.environment import environment_of
from monitoring.episodes import Episode
from monitoring.goodput import goodput
from monitoring.job_view import JobView, Row
from monitoring.report_charts import (
    MOST_LAYERS,
    Story,
    bf16_chart,
    grad_norm_chart,
    is_good,
    loss_chart,
    precision_chart,
    recovery_picture,
)
from monitoring.report_layers import COLOURS, LayerFacts
from monitoring.report_lead import CALLS, lead, measure
from monitoring.report_style import PAGE
from monitoring.report_time import clock_chart, legend, share_bar, time_table
from monitoring.secrets import masked
from monitoring.summary import summarize
from monitoring.wording import counted, place

__all__ = ["recovery_picture", "render_report"]

WIDE, NARROW = 930.0, 370.0
"""Widths in which each chart is drawn, for a screen and for a phone."""

TABLE_STEPS, TABLE_LAYERS = 12, 12
"""Rows of the tables that say in words what a chart shows."""


def render_report(view: JobView) -> str:
    """The page as text, to be written as UTF-8."""
    story = Story.of(view)
    summary = summarize(view)
    body = _header(view, summary) + _tiles(summary)
    if story.kept:
        body += _loss(story) + _story(story) + _time(story) + _grad_norm(story)
        body += _range(story) + _precision(story)
    else:
        body += "<section><h2>No step was recorded</h2></section>" + _story(story) + _time(story)
    body += _summary(summary) + _environment(view) + _configuration(view)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(view.job)} · {escape(view.state)}</title><style>{PAGE}</style></head>"
        # Not display:none, which would take the pattern away from those who refer to it.
        f'<body><svg class="defs" aria-hidden="true">{HATCH}{PATTERNS}</svg>'
        f"<main>{body}</main></body></html>"
    )


def _header(view: JobView, summary: Row) -> str:
    state = escape(view.state)
    kind = "".join(c for c in view.state if c.isalnum())
    return (
        f"<header><h1>{escape(view.job)}</h1>"
        f'<span class="state {kind}">{state}</span></header>'
        f'<p class="lead">{escape(lead(view, summary))}</p>'
    )


def _tiles(summary: Row) -> str:
    # As in "Where the time went": starts, pauses and the queue are part of it.
    told = summary["goodput"]
    useful = told["productive_s"] / told["wall_s"] if told["wall_s"] > 0 else None
    tiles = [
        ("final loss", measure(summary["final_loss"], 4)),
        ("steps", f"{summary['steps']:,}"),
        ("step time", measure(summary["step_time_s"], 3, " s")),
        ("tokens a second", measure(summary["tokens_per_s"], 3)),
        *([("MFU", measure(summary["mfu_pct"], 3, " %"))] if summary["mfu_pct"] else []),
        ("incidents", str(len(summary["incidents"]))),
        ("rollbacks · restarts", f"{summary['rollbacks']} · {summary['restarts']}"),
        ("steps lost", str(summary["steps_lost"])),
        ("time to recover", measure(summary["time_to_recover_s"], 3, " s")),
        ("useful time", "–" if useful is None else f"{100 * useful:.1f} %"),
    ]
    cells = "".join(f'<div class="tile"><b>{escape(v)}</b><span>{k}</span></div>' for k, v in tiles)
    return f'<section class="tiles">{cells}</section>'


def _both(chart: Any, story: Story) -> str:
    """A chart in two widths; the style sheet shows the one that fits."""
    return (
        f'<div class="wide">{chart(story, WIDE)}</div>'
        f'<div class="narrow">{chart(story, NARROW)}</div>'
    )


def _key(body: str, label: str) -> str:
    return f'<span><svg viewBox="0 0 22 12" aria-hidden="true">{body}</svg>{escape(label)}</span>'


def _loss(story: Story) -> str:
    keys = _key('<path class="kept" d="M0 6H22"/>', "kept")
    if story.lost:
        keys += _key('<path class="ghost" d="M0 6H22"/>', "undone by a rollback or restart")
    if any(e.to_step is not None for e in story.episodes):
        keys += _key('<path class="back" d="M20 10C20 1 4 1 4 9M1 5L4 9L8 6"/>', "the way back")
    if story.episodes:
        keys += "<span>numbers: see below</span>"
    return (
        '<section><h2>Loss</h2><p class="sub">nats a token</p>'
        f'{_both(loss_chart, story)}<div class="legend">{keys}</div>{_steps_table(story)}</section>'
    )


def _grad_norm(story: Story) -> str:
    return (
        '<section><h2>Gradient norm</h2><p class="sub">before clipping, logarithmic</p>'
        f"{_both(grad_norm_chart, story)}</section>"
    )


def _steps_table(story: Story) -> str:
    """The kept steps in words, about a dozen of them."""
    kept = story.kept
    chosen = sorted({round(i * (len(kept) - 1) / TABLE_STEPS) for i in range(TABLE_STEPS + 1)})
    head = "".join(f"<th>{w}</th>" for w in ("step", "loss", "gradient norm", "in BF16", "update"))
    rows = "".join(
        f"<tr><td>{r.step:,}</td><td>{short(r.loss)}</td><td>{short(r.grad_norm)}</td>"
        f"<td>{counted(len(r.high_precision_layers), 'linear')}</td>"
        f"<td>{'left out' if r.skipped else 'made'}</td></tr>"
        for r in (kept[i] for i in chosen)
    )
    return _table("As a table", head, rows)


def _table(name: str, head: str, rows: str) -> str:
    return (
        f"<details><summary>{name}</summary>"
        f'<div class="scroll" tabindex="0"><table><tr>{head}</tr>{rows}</table></div></details>'
    )


def _time(story: Story) -> str:
    told = goodput(story.view)
    if told.wall_s <= 0:
        return ""
    share = 100 * told.seconds("productive") / told.wall_s

    def bar(_: Story, width: float) -> str:
        return share_bar(told, width)

    def clock(story: Story, width: float) -> str:
        return clock_chart(story.view, told, story.episodes, width)

    return (
        f'<section><h2>Where the time went</h2><p class="sub">{share:.1f} % of '
        f"{duration(told.wall_s)} made steps that were kept</p>{_both(bar, story)}{legend()}"
        f'{time_table(told)}<h3 class="chart">Troubles and answers by the clock</h3>'
        f"{_both(clock, story)}</section>"
    )


def _range(story: Story) -> str:
    if not any(record.tensors for record in story.kept):
        return ""
    keys = "".join(
        _key(f'<rect class="h{i}" width="22" height="12" rx="2"/>', name)
        for i, name in enumerate(COLOURS)
    )
    keys += _key('<rect class="hatched" width="22" height="12" rx="2"/>', "in BF16")
    facts = story.layers.facts
    shown = sorted(facts.items(), key=lambda f: (-f[1].clamped_pct, -f[1].rise))[:TABLE_LAYERS]
    head = "".join(
        f"<th>{w}</th>"
        for w in ("layer", "most clamped", "amax above its usual", "colours of its steps")
    )
    rows = "".join(_layer_row(name, own, story.layers.cells[name]) for name, own in shown)
    hidden = len(facts) - MOST_LAYERS
    more = f"; {hidden} calmer layers are not shown" if hidden > 0 else ""
    return (
        "<section><h2>FP8 range by layer and step</h2>"
        '<p class="sub">share of values clamped to the FP8 maximum, and where there is next '
        "to none how far amax is above its usual; worst operand, trouble of undone steps "
        f'included{more}</p>{_both(precision_chart, story)}<div class="legend">{keys}</div>'
        f"{_table('In words, the worst layers first', head, rows)}</section>"
    )


def _layer_row(name: str, facts: LayerFacts, cells: Mapping[int, int]) -> str:
    colours = list(cells.values())
    told = ", ".join(
        f"{word}: {colours.count(i)}" for i, word in enumerate(COLOURS) if i in colours
    )
    return (
        f"<tr><td><code>{escape(name)}</code></td><td>{facts.clamped_text}</td>"
        f"<td>{facts.rise_text}</td>"
        f"<td>{told or '–'}</td></tr>"
    )


def _precision(story: Story) -> str:
    linears = len(story.layers.cells)
    head = '<section><h2>Precision map</h2><p class="sub">'
    if not story.bf16:
        every = f"all {counted(linears, 'linear')}" if linears > 1 else counted(linears, "linear")
        every = every if linears else "no linear"
        return f"{head}{every} computed in FP8 in every step that was kept</p></section>"
    others = linears - len(story.bf16)
    rest = f"; the other {counted(others, 'linear')} in FP8 all the time" if others > 0 else ""
    rows = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>"
        + ", ".join(f"{a:,} to {b - 1:,}" for a, b in story.bf16[name])
        + "</td></tr>"
        for name in sorted(story.bf16)
    )
    words = _table("In words", "<th>linear</th><th>steps in BF16</th>", rows)
    return (
        f"{head}striped: the linear computed in BF16{rest}</p>"
        f"{_both(bf16_chart, story)}{words}</section>"
    )


def _story(story: Story) -> str:
    if not story.episodes:
        return ""
    cards = "".join(_card(episode) for episode in story.episodes)
    times = escape(zone(story.episodes[-1].time))
    return (
        '<section><h2>What happened</h2><p class="sub">each trouble with its evidence, '
        f"the answer, and the remedies passed over; times in {times}</p>{cards}</section>"
    )


def _card(episode: Episode) -> str:
    good = " good" if is_good(episode) else ""
    title = episode.trouble or episode.answer
    title = title[:1].upper() + title[1:]
    when = f"{place(episode.step)} · {clock(episode.time)}"
    body = f'<h3>{escape(title)} <span class="when">{when}</span></h3>'
    body += "".join(_incident(incident) for incident in episode.incidents)
    if episode.action is not None:
        body += _action(episode, episode.action)
    return f'<article><div class="num{good}">{episode.number}</div><div>{body}</div></article>'


def _incident(incident: Row) -> str:
    body = f"<p>{escape(str(incident.get('message', '')))}</p>"
    body += _facts(incident.get("evidence", {}))
    suspects = incident.get("suspects", ())
    if suspects:
        columns = list(dict.fromkeys(k for s in suspects for k in s.get("evidence", {})))
        head = "".join(f"<th>{escape(_words(c))}</th>" for c in ("layer", "operand", *columns))
        rows = "".join(
            f"<tr><td><code>{escape(str(s['layer']))}</code></td><td>{escape(str(s['tensor']))}</td>"
            + "".join(
                f'<td class="num-cell">{escape(measure(s.get("evidence", {}).get(c), 3))}</td>'
                for c in columns
            )
            + "</tr>"
            for s in suspects
        )
        told = counted(len(suspects), "suspect layer")
        body += (
            f"<details><summary>{told}, likeliest first</summary>"
            f'<div class="scroll"><table><tr>{head}</tr>{rows}</table></div></details>'
        )
    return body


def _action(episode: Episode, action: Row) -> str:
    done = escape(f"{episode.answer}.")
    kind = "undone" if action["kind"] in CALLS and not action.get("asked") else "done"
    body = f'<p><span class="{kind}">{done}</span> {escape(str(action["reason"]))}</p>'
    facts: dict[str, Any] = {}
    if action.get("precision"):
        facts["precision"] = ", ".join(f"{k} → {v}" for k, v in action["precision"].items())
    if action.get("skip_batches"):
        facts["batches skipped"] = _ranges(action["skip_batches"])
    if action.get("lr_scale") is not None:
        facts["learning rate"] = f"× {action['lr_scale']:g}"
    if action.get("exchange") is not None:
        facts["gradients travel in"] = str(action["exchange"]).upper()
    body += _facts(facts)
    passed = action.get("passed_over", ())
    if passed:
        rows = "".join(
            f"<tr><th>{escape(_words(str(p['rung'])))}</th><td>{escape(str(p['why']))}</td></tr>"
            for p in passed
        )
        body += f"<details><summary>Passed over</summary><table>{rows}</table></details>"
    return body


def _ranges(numbers: Iterable[int]) -> str:
    """``80–93, 95`` of whole numbers."""
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)


def _facts(facts: Mapping[str, Any]) -> str:
    if not facts:
        return ""
    items = "".join(
        f"<div><dt>{escape(_words(k))}</dt><dd>"
        f"{escape(short(v) if isinstance(v, (int, float)) else str(v))}</dd></div>"
        for k, v in facts.items()
    )
    return f'<dl class="facts">{items}</dl>'


def _words(name: str) -> str:
    return name.replace("_pct", " %").replace("_", " ")


def _summary(summary: Row) -> str:
    plain = {k: v for k, v in summary.items() if not isinstance(v, (list, dict))}
    plain["high_precision_layers"] = ", ".join(summary["high_precision_layers"]) or "none"
    plain |= {f"exchange {name}, a step": number for name, number in summary["comm"].items()}
    rows = "".join(
        f'<tr><th>{escape(_words(k))}</th><td class="num-cell">'
        f"{escape('–' if v is None else f'{v:.6g}' if isinstance(v, float) else str(v))}</td></tr>"
        for k, v in plain.items()
    )
    return f"<section><h2>Summary</h2><table>{rows}</table></section>"


def _environment(view: JobView) -> str:
    told = dict(environment_of(view))
    start = next((e for e in reversed(view.events) if e["kind"] == "attempt_started"), None)
    detail = (start or {}).get("detail") or {}
    degrees = view.section("parallelism") or {}
    facts = {
        "ranks": detail.get("ranks"),
        "nodes": view.section("num_nodes"),
        **{f"{name} degree": degrees.get(name) for name in ("pipeline", "tensor", "data")},
        "ZeRO stage": degrees.get("zero_stage"),
        "linears run on": detail.get("backend"),
        "because": detail.get("backend_reason"),
        **told,
    }
    rows = "".join(
        f"<tr><th>{escape(str(k))}</th><td>{escape(str(v))}</td></tr>"
        for k, v in facts.items()
        if v not in (None, "")
    )
    return f"<section><h2>Environment</h2><table>{rows}</table></section>" if rows else ""


def _configuration(view: JobView) -> str:
    text = yaml.safe_dump(_plain(masked(view.spec)), sort_keys=False, allow_unicode=True)
    return (
        "<section><h2>Configuration</h2><details><summary>the completed job file</summary>"
        f"<pre>{escape(text)}</pre></details></section>"
        "<footer>Written by Octavo.</footer>"
    )


def _plain(value: Any) -> Any:
    """Builtin containers, for YAML."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
