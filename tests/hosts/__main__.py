"""A cluster of several hosts on this machine, by hand. Needs root and iproute2.

    python -m tests.hosts --nodes 3            start it, say how to use it, wait for Ctrl-C
    python -m tests.hosts --nodes 3 --redis    the same with Ray's tables in a Redis: n0 may be lost

and, from another shell, while it runs:

    python -m tests.hosts octavo submit job.yaml     any octavo command, on the head
    python -m tests.hosts status                     nodes, their addresses and processes
    python -m tests.hosts kill n2                    end all of a node's processes; restart n2
    python -m tests.hosts freeze n2                  stop them where they are; thaw n2
    python -m tests.hosts cut n2                     pull its cable; heal n2
    python -m tests.hosts shape n2 delay=0.2 loss=0.05 rate=100mbit        shape n2: plain again
    python -m tests.hosts fill                       no byte free on the jobs' disk; free
    python -m tests.hosts shell n2 COMMAND…          a command on a node

Where several run, say which: python -m tests.hosts --cluster PID kill n2
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.hosts.cluster import Cluster, interruptible
from tests.hosts.network import ROOT

NODE_ORDERS = ("kill", "restart", "freeze", "thaw", "cut", "heal")


def main() -> int:
    """Entry of ``python -m tests.hosts``; the exit code."""
    words = sys.argv[1:]
    try:
        match words:
            case ["--cluster", pid, *rest]:
                return order(rest, which(Cluster.running(), pid))
            case [word, *_] if not word.startswith("-"):
                return order(words, which(Cluster.running()))
        return hold()
    except (RuntimeError, KeyError, ValueError) as error:
        print(f"tests.hosts: {error.args[0] if error.args else error}", file=sys.stderr)
        return 1


def hold() -> int:
    """Start a cluster and keep it until told to end."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.hosts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--slots", type=int, default=2, help="CPU slots a node")
    parser.add_argument("--standby", type=int, default=0, help="idle, imported workers a node")
    parser.add_argument("--redis", action="store_true", help="Ray's tables in a Redis")
    given = parser.parse_args()
    slots, standby, redis = given.slots, given.standby, given.redis
    try:
        with (
            interruptible(),
            Cluster(given.nodes, slots=slots, standby=standby, redis=redis) as cluster,
        ):
            print(told(cluster), flush=True)
            while True:
                time.sleep(3600)
    except KeyboardInterrupt:
        print("all of it is gone")
    return 0


def told(cluster: Cluster) -> str:
    """What a person does next."""
    me = "python -m tests.hosts"
    two = f"num_nodes: 2, slots_per_node: {cluster.layout.slots[0]}"
    return "\n".join(
        [
            f"{len(cluster.nodes)} hosts of process {cluster.layout.pid}, "
            f"{cluster.layout.slots[0]} slots each; the controller is "
            f"on n0, {cluster.home.server().url if cluster.home.server() else '?'}",
            *(
                f"  {node.name}  {node.address}  namespace {node.host.name}"
                for node in cluster.nodes
            ),
            f"  jobs' disk {cluster.storage}, logs {cluster.folder}/nX",
            "",
            f"A job on two of them has {two}; from another shell, in {ROOT}:",
            f"  {me} octavo submit deploy/jobs/two-hosts.yaml",
            f"  {me} octavo events -f two-hosts",
            "Break it:",
            f"  {me} kill n2 | restart n2 | freeze n2 | thaw n2 | cut n2 | heal n2",
            f"  {me} shape n2 delay=0.2 loss=0.05 rate=100mbit | fill | free | status",
            "Ctrl-C here ends and removes everything.",
        ]
    )


def which(running: Sequence[Cluster], pid: str | None = None) -> Cluster:
    """The cluster that is meant. Raises RuntimeError where that can't be known."""
    if not running:
        raise RuntimeError("no cluster runs here; start one: python -m tests.hosts --nodes 3")
    found = [cluster for cluster in running if pid in (None, str(cluster.layout.pid))]
    if len(found) == 1:
        return found[0]
    there = ", ".join(str(cluster.layout.pid) for cluster in running)
    asked = f"no cluster is of process {pid}" if pid else f"{len(running)} clusters run here"
    raise RuntimeError(f"{asked}: --cluster PID before the order names one of {there}")


def order(words: list[str], cluster: Cluster) -> int:
    """One command to a cluster that runs."""
    match words:
        case ["octavo", *rest]:
            _run_on(cluster, "n0", [str(Path(sys.executable).with_name("octavo")), *rest])
        case ["shell", node, *rest]:
            _run_on(cluster, node, rest or [os.environ.get("SHELL", "/bin/sh")])
        case ["status"]:
            for node in cluster.nodes:
                workers, all_of_it = len(node.processes("ray::Worker")), len(node.host.pids())
                print(f"{node.name}  {node.address}  {all_of_it} processes, {workers} workers")
        case ["fill"]:
            cluster.fill_disk()
        case ["free"]:
            cluster.free_disk()
        case ["shape", node, *how]:
            asked = dict(word.split("=", 1) for word in how)
            cluster.node(node).shape(
                rate=asked.get("rate"),
                delay_s=float(asked.get("delay", 0)),
                loss=float(asked.get("loss", 0)),
            )
        case ["restart", "n0"]:
            cluster.restart_head()
        case [word, node] if word in NODE_ORDERS:
            getattr(cluster.node(node), word)()
        case _:
            raise ValueError(f"{' '.join(words)!r} is no order; see python -m tests.hosts --help")
    return 0


def _run_on(cluster: Cluster, node: str, command: list[str]) -> None:
    """Become the command, on that node."""
    os.environ.update(cluster.environment)
    name = cluster.node(node).host.name
    os.execvp("ip", ["ip", "netns", "exec", name, *command])


if __name__ == "__main__":
    sys.exit(main())
