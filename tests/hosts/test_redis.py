"""Ray's head may be lost on a cluster whose tables are in a real Redis (root, redis-server)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.cluster import Cluster
from tests.hosts.faults.outcome import Outcome
from tests.hosts.faults.rows import ROWS
from tests.hosts.faults.runs import run_rows
from tests.hosts.redis_host import why_no_redis

pytestmark = [
    pytest.mark.usefixtures("_hosts_work"),
    pytest.mark.skipif(bool(why_no_redis()), reason=why_no_redis()),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "attempts"), [("gcs", 1), ("head", 1), ("head_and_controller", 2)]
)
def test_a_job_goes_on_and_no_bit_is_different(name: str, attempts: int) -> None:
    outcomes: list[Outcome] = []
    run_rows([(row, 1) for row in ROWS if row.name == name], print, outcomes.append)
    (outcome,) = outcomes
    assert outcome.ok, outcome
    assert outcome.attempts == attempts and outcome.differing == 0


@pytest.mark.timeout(300)
def test_the_password_is_in_no_list_of_processes() -> None:
    with Cluster(1, redis=True) as cluster:
        pids = cluster.nodes[0].host.pids()
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids]
        assert any(b"--redis_address=" in line for line in lines), "the tables are in the Redis"
        assert not any(cluster.layout.token.encode() in line for line in lines)
