"""Runs a gradient exchange between the hosts of a network and says what it took."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.hosts.network import INTERFACE, Host, Network

ROOT = Path(__file__).parents[2]
PORT = 29_500


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What one exchange took."""

    seconds: dict[str, float]
    """By dtype, the median of the slowest rank's."""
    sent_bytes: float
    """By one host in a round of all dtypes, mean over hosts, as their interfaces count."""


def exchange(
    network: Network,
    dtypes: Sequence[str],
    numel: int,
    repeats: int = 3,
    *,
    scattered: bool = False,
) -> Exchanged:
    """Average ``numel`` gradients over the network's hosts, one rank a host, dtypes in turn.

    ``scattered``: each host takes the mean of its own part alone, as under ZeRO 1.
    """
    case = json.dumps(
        {"numel": numel, "dtypes": list(dtypes), "scattered": scattered, "repeats": repeats}
    )
    hosts = network.hosts
    program = "tests.hosts.exchange_rank"
    ranks = [
        _start(host, program, case, rank=i, local=(0, 1), master=hosts[0].address, world=len(hosts))
        for i, host in enumerate(hosts)
    ]
    _hear(ranks, "begin")
    before = [host.sent_bytes() for host in hosts]
    _answer(ranks)
    _hear(ranks, "end")
    after = [host.sent_bytes() for host in hosts]
    _answer(ranks)
    times = [json.loads(_line(rank)) for rank in ranks]
    for rank in ranks:
        rank.wait(timeout=60)
    sent = sum(after) - sum(before)
    seconds = {
        dtype: statistics.median(map(max, zip(*(t[dtype] for t in times), strict=True)))
        for dtype in dtypes
    }
    return Exchanged(seconds, sent / len(hosts) / repeats)


@dataclass(frozen=True, slots=True)
class Trained:
    """What training steps sent, by all hosts together."""

    sent_bytes: int
    """As their interfaces count."""
    reported_bytes: float
    """As the exchanges of all ranks say."""


def train(
    network: Network,
    hosts_of: Sequence[int],
    cases: Sequence[Mapping[str, Any]],
    *,
    tied: bool = False,
    steps: int = 3,
) -> list[Trained]:
    """Train steps of each case, rank i on host ``hosts_of[i]``; the same of all cases but what
    they say themselves."""
    told = json.dumps({"cases": cases, "tied": tied, "steps": steps})
    hosts = network.hosts
    ranks = [
        _start(
            hosts[host],
            "tests.hosts.training_rank",
            told,
            rank=i,
            local=(list(hosts_of[:i]).count(host), hosts_of.count(host)),
            master=hosts[hosts_of[0]].address,
            world=len(hosts_of),
        )
        for i, host in enumerate(hosts_of)
    ]
    results = []
    for _ in cases:
        _hear(ranks, "begin")
        before = sum(host.sent_bytes() for host in hosts)
        _answer(ranks)
        _hear(ranks, "end")
        sent = sum(host.sent_bytes() for host in hosts) - before
        _answer(ranks)
        results.append(Trained(sent, sum(float(_line(rank)) for rank in ranks)))
    for rank in ranks:
        rank.wait(timeout=60)
    return results


def _start(
    host: Host,
    program: str,
    case: str,
    *,
    rank: int,
    local: tuple[int, int],
    master: str,
    world: int,
) -> subprocess.Popen[Any]:
    env = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(local[0]),
        "LOCAL_SIZE": str(local[1]),
        "DS_ACCELERATOR": "cpu",
        "MASTER_ADDR": master,
        "MASTER_PORT": str(PORT),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }
    command = [sys.executable, "-m", program, case]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return host.popen(command, env=env, cwd=ROOT, **pipes)


def _hear(ranks: list[subprocess.Popen[Any]], word: str) -> None:
    for rank in ranks:
        if (line := _line(rank)) != word:
            raise RuntimeError(f"a rank said {line!r} where {word!r} was expected")


def _answer(ranks: list[subprocess.Popen[Any]]) -> None:
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()


def _line(rank: subprocess.Popen[Any]) -> str:
    assert rank.stdout is not None
    line: str = rank.stdout.readline()
    if not line:
        raise RuntimeError(f"a rank ended with {rank.wait(timeout=60)} before it had answered")
    return line.strip()
