"""The report in a few sentences: how far the job came, what was done without a person, what wasn't.

Promises: pure, plain text; nothing counts as handled that a person was called for, or that ended
the job.
"""

from __future__ import annotations

import math
from typing import Any

from monitoring.episodes import Episode, episodes
from monitoring.job_view import JobView, Row
from monitoring.wording import counted

CALLS = frozenset({"pause", "fail"})
"""Answers of the policy that leave the rest to a person."""
AT_REST = {"paused": "It is paused", "failed": "It failed", "cancelled": "It was cancelled"}


def lead(view: JobView, summary: Row) -> str:
    """``12 of 40 steps, loss 4.14. 1 trouble is left to a person. It is paused: …``"""
    planned = summary["steps_planned"]
    of = f" of {planned:,}" if isinstance(planned, int) else ""
    steps = int(summary["steps"])
    told = f"{steps:,}{of} steps" if of else counted(steps, "step")
    if summary["final_loss"] is not None:
        told += f", loss {measure(summary['final_loss'], 3)}"
    found = [episode for episode in episodes(view) if episode.incidents]
    calls = [episode for episode in found if _calls(episode)]
    troubles, called = _places(found), _places(calls)
    sentences = [f"{told}." if troubles else f"{told}, without an incident."]
    if handled := len(troubles - called):
        seconds = summary["time_to_recover_s"]
        speed = f", back in training after {measure(seconds, 3)} s" if seconds is not None else ""
        cost = f"{_cost(view, summary)}{speed}"
        sentences.append(f"{counted(handled, 'trouble')} handled without a person: {cost}.")
    if called:
        sentences.append(_left(len(called), calls[-1], view.state))
        if not handled and summary["steps_lost"]:
            sentences.append(f"{_lost(view, summary)}.")
    if by_hand := sum(a.get("asked_by") is not None for a in summary["actions"]):
        sentences.append(f"{counted(by_hand, 'order')} by a person.")
    if view.state in AT_REST:
        reason = str(view.extra.get("reason") or "").strip().rstrip(".")
        sentences.append(f"{AT_REST[view.state]}{f': {reason}' if reason else ''}.")
    return " ".join(sentences)


def measure(value: Any, digits: int, unit: str = "") -> str:
    """A number of a summary for a person, ``–`` for none."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    number = float(value)
    if not math.isfinite(number):
        return str(number)
    return (f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.{digits}g}") + unit


def _calls(episode: Episode) -> bool:
    """Whether the answer was to call a person, or to give up."""
    action = episode.action
    return action is not None and action["kind"] in CALLS and not action.get("asked")


def _left(number: int, last: Episode, state: str) -> str:
    """What became of the troubles that were not handled."""
    troubles = counted(number, "trouble")
    if last.action is not None and last.action["kind"] == "fail":
        return f"{troubles} not handled: the job gave up."
    if state == "paused":
        return f"{troubles} not handled: paused for a person."
    return f"{troubles} not handled: paused for a person, and resumed."


def _cost(view: JobView, summary: Row) -> str:
    back = summary["rollbacks"] + summary["restarts"]
    return _lost(view, summary) if back else "no step redone"


def _lost(view: JobView, summary: Row) -> str:
    # Of a job at rest, nobody knows whether they will be done again.
    what = "lost" if view.state in AT_REST else "redone"
    return f"{counted(summary['steps_lost'], 'step')} {what}"


def _places(found: list[Episode]) -> set[tuple[Any, ...]]:
    """Where troubles were seen: what several detectors see in one step is one."""
    return {(i["attempt"], i["timeline"], i["step"]) for e in found for i in e.incidents}
