"""Runs a gradient exchange between the hosts of a network and says what it took."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.hosts.network import INTERFACE, Host, Network

ROOT = Path(__file__).parents[2]
PORT = 29_500
END_S = 300.0
"""Seconds that a rank has to end after its last word, on a machine with better things to do."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """What one exchange took."""

    repeats: dict[str, list[float]]
    """Seconds of each, the slowest rank's, by dtype."""
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
    hear(ranks, "begin")
    before = [host.sent_bytes() for host in hosts]
    answer(ranks)
    hear(ranks, "end")
    after = [host.sent_bytes() for host in hosts]
    answer(ranks)
    times = [json.loads(line_of(rank)) for rank in ranks]
    for rank in ranks:
        rank.wait(timeout=END_S)
    sent = sum(after) - sum(before)
    slowest = {
        dtype: [max(each) for each in zip(*(t[dtype] for t in times), strict=True)]
        for dtype in dtypes
    }
    return Exchanged(slowest, sent / len(hosts) / repeats)


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
        hear(ranks, "begin")
        before = sum(host.sent_bytes() for host in hosts)
        answer(ranks)
        hear(ranks, "end")
        sent = sum(host.sent_bytes() for host in hosts) - before
        answer(ranks)
        results.append(Trained(sent, sum(float(line_of(rank)) for rank in ranks)))
    for rank in ranks:
        rank.wait(timeout=END_S)
    return results


@contextmanager
def bounded(network: Network, limit_s: float) -> Iterator[None]:
    """Exchanges inside end within ``limit_s`` seconds, or TimeoutError: by then the hosts'
    processes are killed, so that nobody waits for a word from them."""
    expired = threading.Event()

    def end() -> None:
        expired.set()
        for host in network.hosts:
            host.kill()

    timer = threading.Timer(limit_s, end)
    timer.start()
    try:
        yield
    except RuntimeError as error:
        if expired.is_set():
            raise TimeoutError(f"the hosts' ranks were not done within {limit_s:g} s") from error
        raise
    finally:
        timer.cancel()
        timer.join()


def start_one_each(network: Network, program: str, case: str) -> list[subprocess.Popen[Any]]:
    """Start one rank on every host."""
    hosts = network.hosts
    return [
        _start(host, program, case, rank=i, local=(0, 1), master=hosts[0].address, world=len(hosts))
        for i, host in enumerate(hosts)
    ]


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


def hear(ranks: list[subprocess.Popen[Any]], word: str) -> None:
    """Wait until each has said ``word``; RuntimeError for anything else, and for one that ended."""
    for rank in ranks:
        if (line := line_of(rank)) != word:
            raise RuntimeError(f"a rank said {line!r} where {word!r} was expected")


def answer(ranks: list[subprocess.Popen[Any]]) -> None:
    """Let them go on after a word."""
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()


def line_of(rank: subprocess.Popen[Any]) -> str:
    """What it says next; RuntimeError where it has ended."""
    assert rank.stdout is not None
    line: str = rank.stdout.readline()
    if not line:
        raise RuntimeError(f"a rank ended with {rank.wait(timeout=END_S)} before it had answered")
    return line.strip()
