"""A cluster's nodes, asked for their facts through Ray: ``python -m orchestrator.doctor.nodes``.

A process of its own, so that whoever asks has a bound whatever Ray does. Promises: a line of JSON
on standard output, which ``read`` understands; a node that doesn't answer in time is told as such
and costs the others nothing; no slot is taken: nodes are looked at while they train.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from launch.machine_facts import Interface, MachineFacts, gather
from orchestrator.doctor.comparison import NodeAnswer

NODE_S = 150.0
"""Seconds that nodes have, all at once: their own probes have less each."""
TOGETHER_S = NODE_S + 60.0
CONNECT_S = 5.0
GROUP_LABEL = "ray.io/node-group"


class ClusterUnreachableError(ConnectionError):
    """Ray can't be asked; the message says why."""


class UnknownGroupError(LookupError):
    """No node is of the group; the message has the groups that there are."""

    def __init__(self, group: str, known: Sequence[str]) -> None:
        near = difflib.get_close_matches(group, known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]!r}? " * bool(near)
        there = f"{hint}there are {', '.join(known)}" if known else "no node is of any"
        super().__init__(f"no node is of the group {group!r}: {there}")


def ask(
    address: str, group: str | None, folder: str, seen: str, *, wandb: bool = True
) -> list[NodeAnswer]:
    """The answers of the nodes of ``group``, None: of all.

    Raises ClusterUnreachableError, and UnknownGroupError where no node is of the group.
    """
    host, _, port = address.rpartition(":")
    try:
        # Ray itself would try for minutes.
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
    except (OSError, ValueError) as error:
        told = f"nothing listens at {address}, where Ray's head is to be: {error}"
        raise ClusterUnreachableError(told) from None
    asked = {"address": address, "group": group, "folder": folder, "seen": seen, "wandb": wandb}
    command = [sys.executable, "-m", "orchestrator.doctor.nodes", json.dumps(asked)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=TOGETHER_S
        )
    except subprocess.TimeoutExpired:
        told = f"Ray at {address} did not answer in {TOGETHER_S:.0f} s"
        raise ClusterUnreachableError(told) from None
    said = done.stdout.decode(errors="replace").strip().splitlines()
    if done.returncode != 0 or not said:
        why = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise ClusterUnreachableError(f"Ray at {address} can't be asked: {why[-1]}")
    told = json.loads(said[-1])
    if group is not None and not told["answers"]:
        raise UnknownGroupError(group, told["groups"])
    return read(told["answers"])


def read(rows: Sequence[Mapping[str, Any]]) -> list[NodeAnswer]:
    """The answers that ``main`` has written."""
    found = []
    for row in rows:
        facts = row["facts"]
        if facts is not None:
            faces = tuple(
                Interface(**{**face, "addresses": tuple(face["addresses"])})
                for face in facts["interfaces"]
            )
            more = {"interfaces": faces, "rdma": tuple(facts["rdma"])}
            facts = MachineFacts(**{**facts, **more})
        found.append(NodeAnswer(**{**row, "facts": facts}))
    return found


def _all(asked: Mapping[str, Any]) -> tuple[list[NodeAnswer], list[str]]:
    """The nodes' answers, and the names of all groups."""
    from orchestrator.cluster.environment import CLUSTER_ENVIRONMENT
    from orchestrator.cluster.on_ray import address_towards

    # Before Ray is imported: it reads then that there is a token to send.
    os.environ.update({k: v for k, v in CLUSTER_ENVIRONMENT.items() if k not in os.environ})
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray.init(
        address=asked["address"],
        log_to_driver=False,
        configure_logging=False,
        _node_ip_address=address_towards(asked["address"]),
    )
    task = ray.remote(gather)
    groups: set[str] = set()
    references: dict[Any, NodeAnswer] = {}
    answers: list[NodeAnswer] = []
    for node in ray.nodes():
        group = str(node.get("Labels", {}).get(GROUP_LABEL, ""))
        address = str(node["NodeManagerAddress"])
        if not node["Alive"]:
            # Ray remembers every node that it ever lost.
            continue
        groups.add(group)
        if asked["group"] is not None and group != asked["group"]:
            continue
        here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        placed = task.options(num_cpus=0, max_retries=0, scheduling_strategy=here)
        reference = placed.remote(asked["folder"], asked["seen"], wandb=asked["wandb"])
        references[reference] = NodeAnswer(address, group, None, asked=time.time())
    deadline = time.monotonic() + NODE_S
    pending = list(references)
    while pending and (left := deadline - time.monotonic()) > 0:
        ready, pending = ray.wait(pending, timeout=left)
        for reference in ready:
            answers.append(_answer(references[reference], reference))
    for reference in pending:
        begun = references[reference]
        told = f"nothing in {NODE_S:.0f} s"
        answers.append(NodeAnswer(begun.node, begun.group, None, error=told))
    return sorted(answers, key=lambda answer: answer.node), sorted(groups - {""})


def _answer(begun: NodeAnswer, reference: Any) -> NodeAnswer:
    import ray

    try:
        facts = ray.get(reference, timeout=5.0)
    except ray.exceptions.RayError as error:
        line = (str(error).strip().splitlines() or [""])[-1]
        told = f"{type(error).__name__}: {line}"
        return NodeAnswer(begun.node, begun.group, None, error=told)
    # The probes' own time is no uncertainty about its clock.
    answered = time.time() - facts.seconds
    return NodeAnswer(begun.node, begun.group, facts, begun.asked, max(begun.asked, answered))


def main() -> None:
    """Entry."""
    out, sys.stdout = sys.stdout, sys.stderr
    try:
        answers, groups = _all(json.loads(sys.argv[1]))
        told = {"answers": [asdict(answer) for answer in answers], "groups": groups}
    except Exception as error:  # noqa: BLE001 — whatever Ray raises, it is told in a line
        lines = str(error).strip().splitlines() or [type(error).__name__]
        print(lines[-1], file=sys.stderr)
        sys.exit(1)
    print(json.dumps(told), file=out, flush=True)
    with contextlib.suppress(BaseException):
        out.close()
    # Ray's own farewell may wait for a cluster that hangs.
    os._exit(0)


if __name__ == "__main__":
    main()
