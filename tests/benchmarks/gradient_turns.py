"""Training steps of all sides between two hosts, in turns: seconds and bytes on the wire.

    measured = measure("demo", "100mbit", sides, turns=5, steps=4, limit_s=900)
    measured.turns[side], measured.failed[side]

Hosts are network namespaces of this machine (root and iproute2), one rank and one thread each.
Promises: a step's seconds are the slowest rank's, its bytes what the hosts' interfaces counted; a
side whose ranks die or hang is counted, with why, and the others begin anew without it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from tests.benchmarks.gradient_sides import REPLICAS, Side
from tests.benchmarks.peers.turns import Failed, rotated
from tests.hosts.exchanges import answer, bounded, hear, line_of, start_one_each
from tests.hosts.network import Network

PROGRAM = "tests.benchmarks.gradient_rank"


@dataclass(frozen=True, slots=True)
class Turn:
    """Of one side; means over its steps."""

    seconds: float
    """A step, on the slowest rank."""
    sent_bytes: float
    """A step, by one host, headers and all; mean over the hosts."""


@dataclass(frozen=True, slots=True)
class Measured:
    """All turns at one rate."""

    turns: dict[Side, list[Turn]] = field(default_factory=dict)
    failed: dict[Side, Failed] = field(default_factory=dict)


def measure(
    shape: str, rate: str, sides: Sequence[Side], *, turns: int, steps: int, limit_s: float
) -> Measured:
    """``turns`` of ``steps`` steps of each side; ``rate`` as ``tc`` writes it, or ``none``.

    ``limit_s``: for all of one attempt. Where it fails before any side was on, as when hosts don't
    come up, all of them have failed so.
    """
    found = Measured()
    left = list(sides)
    while left:
        current: list[Side] = []
        told: dict[Side, list[Turn]] = {side: [] for side in left}
        case = {
            "shape": shape,
            "sides": [asdict(side) for side in left],
            "turns": turns,
            "steps": steps,
            "limit_s": limit_s,
        }
        try:
            with Network(REPLICAS) as network, bounded(network, limit_s):
                network.shape(rate=None if rate == "none" else rate)
                _take_turns(network, case, left, told, current.append)
        except (RuntimeError, TimeoutError) as error:
            blamed = current[-1:] or list(left)
            why = Failed(str(error), isinstance(error, TimeoutError))
            found.failed.update(dict.fromkeys(blamed, why))
            left = [side for side in left if side not in blamed]
            continue
        found.turns.update(told)
        break
    return found


def _take_turns(
    network: Network,
    case: dict[str, object],
    sides: Sequence[Side],
    told: dict[Side, list[Turn]],
    is_on: Callable[[Side], None],
) -> None:
    """One attempt; ``is_on(side)`` before each thing that a side does."""
    hosts = network.hosts
    turns, steps = int(str(case["turns"])), int(str(case["steps"]))
    ranks = start_one_each(network, PROGRAM, json.dumps(case))
    for side in sides:
        hear(ranks, "make")
        is_on(side)
        answer(ranks)
    for turn in range(turns):
        for side in rotated(list(sides), turn):
            hear(ranks, "begin")
            is_on(side)
            before = sum(host.sent_bytes() for host in hosts)
            answer(ranks)
            hear(ranks, "end")
            sent = sum(host.sent_bytes() for host in hosts) - before
            answer(ranks)
            seconds = max(float(line_of(rank)) for rank in ranks)
            told[side].append(Turn(seconds, sent / len(hosts) / steps))
