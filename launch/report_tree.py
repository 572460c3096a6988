"""The relays of a job on Ray: one a node, and above those as many as it takes.

A supervisor that is called by every rank of a large job does little else. From
``RunConfig.merge_reports_from`` ranks on it is called by ``FAN_IN`` relays at most: a node's puts
its ranks' reports together, one above up to ``FAN_IN`` of those puts theirs together, and so on.
They are the supervisor's, and end with it. Promises: nobody waits for a relay to start; what one
doesn't take goes straight to the supervisor (``launch.delivery``), so that a relay that is lost
costs the time it saved, and no report.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from launch.commands import Report
from launch.relay import Relay
from launch.reporter import Outbox
from launch.step_part import Sent

FAN_IN = 32
"""Relays that one above them hears at most."""
RECEIVED_S = 30.0
"""Seconds that the place above may take to say that it has received something."""
RELAYED_S = 120.0
"""Seconds that reports may take to the supervisor by way of a relay that lives."""
LOOK_S = 3.0
"""Seconds between two looks at whether it does, and those that it may take to say so."""


@dataclass(frozen=True, slots=True)
class Junction:
    """One relay's place."""

    level: int
    """0: of a node's own ranks."""
    node: int
    """Where it runs: number of a node, in order."""
    above: int | None
    """Number of the junction it sends to; None: to the supervisor."""
    ranks: int
    """Whose reports go through it."""


def junctions(ranks: Sequence[int], fan_in: int = FAN_IN) -> list[Junction]:
    """Those of a job with so many ``ranks`` on each node; first one a node, in order, and each
    before the one above it. Pure."""
    places = [(node, count) for node, count in enumerate(ranks)]
    found: list[Junction] = []
    level = 0
    while True:
        top = len(places) <= fan_in
        first_above = len(found) + len(places)
        found += [
            Junction(level, node, None if top else first_above + number // fan_in, count)
            for number, (node, count) in enumerate(places)
        ]
        if top:
            return found
        groups = [places[i : i + fan_in] for i in range(0, len(places), fan_in)]
        places = [(group[0][0], sum(count for _, count in group)) for group in groups]
        level += 1


class NotReceivedError(RuntimeError):
    """The place above did not say that it received what was sent; the message says why."""


class RelayActor:
    """``launch.relay.Relay`` as a Ray actor, whose calls all run in one event loop."""

    def __init__(self) -> None:
        self._relay = Relay()

    async def begin(self, attempt: int, ranks: int, above: Any, *, at_top: bool) -> None:
        """See Relay.begin; ``above``: the supervisor's handle ``at_top``, another relay's below."""

        async def forward(sent: Sequence[Sent]) -> None:
            if at_top:
                call = above.report.remote(list(sent))
            else:
                call = above.take.remote(attempt, list(sent))
            try:
                async with asyncio.timeout(RECEIVED_S):
                    await call
            except Exception as error:  # noqa: BLE001 - whatever it is, the sender hears of it
                # Ray's own errors are of classes that can't be sent on.
                what = f"{type(error).__name__}: {error}".partition("\n")[0]
                raise NotReceivedError(what) from None

        await self._relay.begin(attempt, ranks, forward)

    async def take(self, attempt: int, sent: Sequence[Sent]) -> None:
        """See Relay.take."""
        await self._relay.take(attempt, sent)

    async def ping(self) -> bool:
        """True, at once: it waits for nobody."""
        return True


def through(relay: Any, attempt: int) -> Outbox:
    """Delivers by a relay's actor. It raises soon where the relay itself doesn't answer, for a job
    that tells of no step looks as if it hung; a supervisor that takes its time is waited for."""

    def deliver(batch: Sequence[Report]) -> None:
        import ray

        taken = relay.take.remote(attempt, list(batch))
        deadline = time.monotonic() + RELAYED_S
        while not ray.wait([taken], timeout=LOOK_S)[0] and time.monotonic() < deadline:
            ray.get(relay.ping.remote(), timeout=LOOK_S)
        ray.get(taken, timeout=0)

    return deliver


class ReportTree:
    """A job's relays, of the process that its ranks report to."""

    def __init__(self, owner: Any, fan_in: int = FAN_IN) -> None:
        """``owner``: handle of this process' actor, which has ``report``."""
        self._owner = owner
        self._fan_in = fan_in
        self._relays: dict[tuple[int, str], Any] = {}
        """By level and Ray's node id."""

    def begin(self, attempt: int, nodes: Sequence[tuple[str, int]]) -> dict[str, Any]:
        """Relays for an attempt on ``nodes``, each its id and how many ranks it has; by node id,
        whom those ranks report to. Waits for nothing."""
        places = junctions([ranks for _, ranks in nodes], self._fan_in)
        named = [(place.level, nodes[place.node][0]) for place in places]
        for name in self._relays.keys() - set(named):
            _kill(self._relays.pop(name))
        for name in named:
            if name not in self._relays:
                self._relays[name] = _create(name[1])
        relays = [self._relays[name] for name in named]
        for place, relay in zip(places, relays, strict=True):
            above = self._owner if place.above is None else relays[place.above]
            relay.begin.remote(attempt, place.ranks, above, at_top=place.above is None)
        return {node_id: self._relays[0, node_id] for node_id, _ in nodes}

    def close(self) -> None:
        """End them."""
        for relay in self._relays.values():
            _kill(relay)
        self._relays = {}


def _create(node_id: str) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return (
        ray.remote(RelayActor)
        .options(
            num_cpus=0,
            max_concurrency=1000,
            # One that died starts again, and is told of the next attempt.
            max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote()
    )


def _kill(relay: Any) -> None:
    import ray

    with contextlib.suppress(Exception):  # it may be gone already
        ray.kill(relay, no_restart=True)
