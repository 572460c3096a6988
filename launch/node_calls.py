"""Calls on the nodes of a group, made on all of them at once, with one bound for all.

A node is reached through its keeper, which runs there anyway: a Ray task would first have to
start a process. Promises: a node that doesn't answer costs ``SILENCE_S``, however many of them
there are; it is told, never raised.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

NAMESPACE = "octavo"
SILENCE_S = 3.0
"""Seconds after which a node that has not even said that it lives counts as out of reach."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Call:
    """What is to be done on one node."""

    node_id: str
    """Ray's node id, hex."""
    keeper: Any
    """The node's keeper; None: a task of Ray's is started there."""
    function: Callable[..., Any]
    """Ours, and at the top level of its module."""
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Answers:
    """What came back, by node."""

    values: Mapping[str, Any]
    silent: Mapping[str, str]
    """Nodes that did not answer, or where the function raised, with why."""


def named_actor(name: str) -> Any:
    """The actor of that name, None if there is none."""
    import ray

    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def names_of_actors(prefix: str) -> list[str]:
    """Those of living actors that begin so."""
    import ray

    entries = ray.util.list_named_actors(all_namespaces=True)
    ours = [entry["name"] for entry in entries if entry["namespace"] == NAMESPACE]
    return [name for name in ours if name.startswith(prefix)]


def call_all(calls: Sequence[Call], timeout_s: float, *, here: str = "") -> Answers:
    """Make all calls at once. A call may take ``timeout_s`` on a node that is there.

    ``here``: the node that this process is on, where it needs nobody's help.
    """
    import ray

    here = here or ray.get_runtime_context().get_node_id()
    started = time.monotonic()
    waiting: dict[Any, Call] = {}
    signs: dict[str, Any] = {}
    silent: dict[str, str] = {}
    values: dict[str, Any] = {}
    for call in calls:
        if call.node_id != here:
            waiting[_begin(call)] = call
            signs[call.node_id] = call.keeper.ping.remote() if call.keeper is not None else None
    # The others are on their way meanwhile.
    for call in calls:
        if call.node_id == here:
            try:
                values[call.node_id] = call.function(*call.arguments)
            except Exception as error:  # noqa: BLE001 - as another node's would be
                silent[call.node_id] = _line(error)
    while waiting:
        left = started + timeout_s - time.monotonic()
        done, _ = ray.wait(list(waiting), timeout=max(0.0, min(0.1, left)))
        for reference in done:
            call = waiting.pop(reference)
            try:
                values[call.node_id] = ray.get(reference)
            except ray.exceptions.ActorDiedError:
                # The keeper alone may have died, of want of memory; of a dead node Ray says so.
                alone = replace(call, keeper=None)
                waiting[_begin(alone)] = alone
                signs[call.node_id] = None
            except ray.exceptions.RayError as error:
                silent[call.node_id] = _line(error)
        waited = time.monotonic() - started
        for reference, call in list(waiting.items()):
            if waited > timeout_s or (waited > SILENCE_S and not _lives(signs[call.node_id])):
                del waiting[reference]
                silent[call.node_id] = f"no answer for {waited:.1f} s"
    return Answers(values, silent)


def _begin(call: Call) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if call.keeper is not None:
        return call.keeper.call.remote(call.function, *call.arguments)
    place = NodeAffinitySchedulingStrategy(call.node_id, soft=False)
    task = ray.remote(call.function).options(num_cpus=0, scheduling_strategy=place, max_retries=0)
    return task.remote(*call.arguments)


def _lives(sign: Any) -> bool:
    """Whether a node has answered; one that nobody was there to ask may still be at it."""
    import ray

    return sign is None or bool(ray.wait([sign], timeout=0)[0])


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
