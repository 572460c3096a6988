"""What a job asks of the queue: few small values of a spec, which a pass keeps for every job that
waits. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.placement.placement import Need, need_of
from orchestrator.placement.regroup import counts_of
from orchestrator.spec.job import JobSpec


@dataclass(frozen=True, slots=True)
class Asks:
    """Of one completed spec."""

    need: Need
    counts: tuple[int, ...]
    """Numbers of nodes that it may run on, the most first."""
    preemptible: bool


def asks_of(spec: JobSpec) -> Asks:
    """What a completed spec asks for."""
    return Asks(need_of(spec), counts_of(spec), spec.resources.preemptible)
