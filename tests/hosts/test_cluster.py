"""A cluster of several hosts, held by hand as a person holds it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.hosts.__main__ import which
from tests.hosts.cluster import Cluster
from tests.hosts.network import ROOT

HAND = [sys.executable, "-m", "tests.hosts"]


def order(*words: str) -> str:
    done = subprocess.run([*HAND, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_order_goes_to_the_one_cluster_that_runs_or_to_the_one_that_is_named() -> None:
    one, other = (SimpleNamespace(layout=SimpleNamespace(pid=pid)) for pid in (11, 12))
    assert which([one]) is one and which([one, other], "12") is other
    with pytest.raises(RuntimeError, match="no cluster runs here"):
        which([])
    with pytest.raises(RuntimeError, match=r"2 clusters run here: --cluster PID .* 11, 12"):
        which([one, other])
    with pytest.raises(RuntimeError, match=r"no cluster is of process 13: .* 11, 12"):
        which([one, other], "13")


@pytest.mark.usefixtures("_hosts_work")
def test_a_cluster_held_by_hand_takes_orders_and_leaves_nothing_when_it_is_killed() -> None:
    with subprocess.Popen(
        [*HAND, "--nodes", "2"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None
            head = f"2 hosts of process {holder.pid}, 2 slots each"
            assert holder.stdout.readline().startswith(head)
            cluster = next(c for c in Cluster.running() if c.layout.pid == holder.pid)
            mine = ("--cluster", str(holder.pid))
            assert order(*mine, "octavo", "list").startswith("JOB")
            assert order(*mine, "status").count(" processes") == 2
            doctor = json.loads(
                order(*mine, "octavo", "doctor", "--group", "all", "--no-wandb", "-o", "json")
            )
            assert {node.address for node in cluster.nodes} <= {
                finding["node"] for finding in doctor["findings"]
            }
            assert any(f["message"].endswith("on all 2 nodes") for f in doctor["findings"])
            order(*mine, "kill", "n1")
            assert cluster.node("n1").host.pids() == []
            order(*mine, "restart", "n1")
            assert cluster.node("n1").host.pids() != []
            order(*mine, "fill")
            with pytest.raises(OSError, match="No space left"):
                (cluster.storage / "more").write_bytes(bytes(1 << 20))
            order(*mine, "free")
            (cluster.storage / "more").write_bytes(bytes(1 << 20))
        finally:
            # Without a chance to clean up: its reaper does.
            holder.kill()
    deadline = time.monotonic() + 60
    while left := left_of(cluster):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def left_of(cluster: Cluster) -> list[str]:
    shown = subprocess.run("ip netns list; ip link; mount", shell=True, capture_output=True)
    names = [*cluster.layout.names, *cluster.layout.links, str(cluster.storage)]
    left = [name for name in names if name in shown.stdout.decode()]
    return left + [str(cluster.folder)] * Path(cluster.folder).exists()
