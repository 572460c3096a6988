"""Following a job on screen: a live view on a terminal, lines everywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from monitoring.records import StepRecord
from orchestrator.api.client import Client
from orchestrator.cli.following import Following
from orchestrator.cli.show import EventLines, print_json_line

REFRESH_S = 0.5
LINE_S = 1.0
"""Seconds between two lines of steps where there is no terminal."""


def follow(
    client: Client,
    job: str,
    *,
    to: TextIO | None = None,
    live: bool | None = None,
    each: Callable[[], None] = lambda: None,
) -> str:
    """Show a job on ``to`` (stdout) until it is settled; its last state.

    ``live``: a panel that redraws; None: where ``to`` is a terminal. ``each`` is called
    after every poll, and may raise to end.
    """
    out = to or sys.stdout
    following = Following(client, job, whole=False)
    if out.isatty() if live is None else live:
        _follow_live(following, out, each)
    else:
        _follow_lines(following, out, each)
    return following.state


def follow_json(client: Client, job: str) -> str:
    """Every event and step as an object a line until the job is settled; its last state."""
    following = Following(client, job)
    while not following.settled:
        news = following.poll(REFRESH_S)
        for event in news.events:
            print_json_line({"event": event})
        for step in news.steps:
            print_json_line({"step": step.to_json()})
    return following.state


def _follow_live(following: Following, out: TextIO, each: Callable[[], None]) -> None:
    """A panel on a screen of its own, which leaves the terminal as it was, however it ends; the
    last one stays."""
    from rich.console import Console
    from rich.live import Live

    from monitoring.watch import watch_panel

    console = Console(file=out)
    try:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while not following.settled:
                following.poll(REFRESH_S, patient=False)
                # The terminal's size of this moment: it may have changed.
                width, height = console.size
                live.update(watch_panel(following.view(), width, height), refresh=True)
                each()
    finally:
        console.print(watch_panel(following.view(), console.width))


def _follow_lines(following: Following, out: TextIO, each: Callable[[], None]) -> None:
    from monitoring.watch import plain_line

    lines = EventLines()
    shown_at = -LINE_S
    newest: StepRecord | None = None
    while not following.settled:
        news = following.poll(REFRESH_S)
        for event in news.events:
            print(lines.of(event), file=out, flush=True)
        newest = news.steps[-1] if news.steps else newest
        if newest is not None and (time.monotonic() - shown_at >= LINE_S or following.settled):
            print(plain_line(newest), file=out, flush=True)
            shown_at, newest = time.monotonic(), None
        each()
