"""Who did not come to the collective that the others wait in: read from the ranks' stacks.

Promises: pure but for ``write``, whose failure is told and never raised; a rank is named when
its worker never became ready or its process is stopped, or when it is anywhere else than in
communication while others are.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from launch.rank_group import RankGroup
from launch.stacks import Frame, Stack
from monitoring.records import Incident
from orchestrator.supervision.attempt import ranks_told

logger = logging.getLogger(__name__)

MOST_BYTES = 4 * 1024 * 1024
"""Of the file that has all stacks."""
MOST_GROUPS = 6
"""Places that a message tells."""

_COMMUNICATES = re.compile(r"torch/distributed/|deepspeed/comm/|launch/process_group\.py$")
_EXCHANGE = re.compile(r"parallel/(gradients|exchange_choice)\.py$")
_OURS = re.compile(r"/(launch|parallel)/[^/]+\.py$|/(launch|parallel)/.*/[^/]+\.py$")
UNKNOWN = "a place that could not be seen"
_NEAR = 4
"""Innermost frames that are looked at: a wait is inside wrappers and context managers."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank was."""

    words: str
    """Its innermost frame, and whose call of ours it is part of."""
    waits: bool
    """In communication, for others."""
    stopped: bool = False
    ready: bool = True
    """Whether its worker could be given a rank."""


def place_of(stack: Stack) -> Place:
    """Where the rank's training thread was; ``UNKNOWN`` where there is no stack."""
    if not stack.ready:
        return Place("its start", waits=False, ready=False)
    frames = training_thread(stack)
    if stack.stopped:
        where = f" in {frames[0]}" if frames else ""
        return Place(f"stopped{where}", waits=False, stopped=True)
    if not frames:
        return Place(UNKNOWN, waits=False)
    innermost = frames[0]
    near = frames[:_NEAR]
    waits = any(_COMMUNICATES.search(f.file) for f in near) or any(
        _EXCHANGE.search(f.file) and f.name.split(".")[-1] == "_wait" for f in near
    )
    ours = next((f for f in frames if _OURS.search(f.file)), None)
    by = f", called by {ours}" if ours is not None and ours != innermost else ""
    return Place(f"{innermost}{by}", waits)


def training_thread(stack: Stack) -> tuple[Frame, ...]:
    """The frames of the thread that trains, else of the main thread, the innermost first."""
    for _, frames in stack.threads:
        if any(
            f.file.endswith(("launch/training.py", "launch/worker.py")) and _runs(f) for f in frames
        ):
            return frames
    main = next((frames for name, frames in stack.threads if "MainThread" in name), None)
    if main is not None:
        return main
    return stack.threads[0][1] if stack.threads else ()


def _runs(frame: Frame) -> bool:
    return frame.name.split(".")[-1] == "run"


def culprits(places: Mapping[int, Place]) -> tuple[int, ...]:
    """Ranks that the others wait for; () where the stacks don't tell."""
    # None is given its rank before all are ready: the others are idle, and have done nothing.
    if late := tuple(rank for rank, place in places.items() if not place.ready):
        return late if len(late) < len(places) else ()
    stopped = tuple(rank for rank, place in places.items() if place.stopped)
    if stopped:
        return stopped
    away = tuple(r for r, place in places.items() if not place.waits and place.words != UNKNOWN)
    return away if len(away) < len(places) else ()


def with_stacks(incident: Incident, stacks: Mapping[int, Stack], file: Path | None) -> Incident:
    """The incident of a hang, with what the stacks tell; ``file`` has all of them."""
    places = {rank: place_of(stack) for rank, stack in sorted(stacks.items())}
    blamed = culprits(places)
    groups: dict[str, list[int]] = {}
    for rank in sorted(places, key=lambda rank: (rank not in blamed, rank)):
        groups.setdefault(places[rank].words, []).append(rank)
    told = []
    for words, ranks in list(groups.items())[:MOST_GROUPS]:
        many = len(ranks) > 1
        if not places[ranks[0]].ready:
            told.append(f"{ranks_told(ranks)} never became ready to start")
            continue
        if ranks[0] in blamed:
            verb = "did not come to the collective:"
        elif places[ranks[0]].waits:
            verb = "wait in" if many else "waits in"
        else:
            verb = "are in" if many else "is in"
        told.append(f"{ranks_told(ranks)} {verb} {words}")
    if len(groups) > MOST_GROUPS:
        told.append(f"and {len(groups) - MOST_GROUPS} other places")
    tools = ", ".join(sorted({stack.tool for stack in stacks.values()}))
    where = f"; all stacks ({tools}): {file}" if file is not None else f" ({tools})"
    message = f"{incident.message.rstrip('.')}. Where they are: {'; '.join(told)}{where}."
    evidence = {**incident.evidence, "stacks": float(sum(bool(s.threads) for s in stacks.values()))}
    return replace(incident, message=message, ranks=blamed or incident.ranks, evidence=evidence)


def write(folder: Path, attempt: int, step: int, stacks: Mapping[int, Stack]) -> Path | None:
    """``hang-attempt-N-step-S.txt`` with the stacks of all ranks; None if it can't be written."""
    path = folder / f"hang-attempt-{attempt}-step-{step}.txt"
    text = "\n\n".join(f"rank {r} {s.text()}" for r, s in sorted(stacks.items()))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text[:MOST_BYTES] + "\n", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        logger.warning("%s can't be written: %s", path, error)
        return None
    return path


def explained(incident: Incident, group: RankGroup, job_dir: Path) -> Incident:
    """The incident of a hang with the ranks' stacks, as far as they can be had."""
    try:
        stacks = group.stacks()
    except Exception:
        # The ranks are to be ended and replaced whether or not anybody knows why they hang.
        logger.exception("the stacks of the ranks could not be taken")
        return incident
    if not stacks:
        return incident
    file = write(job_dir / "stacks", incident.attempt, incident.step, stacks)
    return with_stacks(incident, stacks, file)
