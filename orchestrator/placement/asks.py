"""What a job asks of the queue: few small values of a spec, which a pass keeps for every job that
waits. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

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

    @property
    def least(self) -> int:
        """Nodes without which it can't begin."""
        return self.counts[-1]


def asks_of(spec: JobSpec) -> Asks:
    """What a completed spec asks for; of specs that ask for the same it is one object."""
    return _known(Asks(need_of(spec), counts_of(spec), spec.resources.preemptible))


@lru_cache(maxsize=4096)
def _known(asks: Asks) -> Asks:
    return asks
