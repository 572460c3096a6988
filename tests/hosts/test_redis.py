"""Ray's head may be lost on a cluster whose tables are in a real Redis (root, redis-server).

The matrix has more of it: a head that is lost where the controller lives on, and all hosts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.cluster import Cluster
from tests.hosts.faults.outcome import Outcome
from tests.hosts.faults.rows import ROWS
from tests.hosts.faults.runs import run_rows
from tests.hosts.redis_host import why_no_redis

ATTEMPTS = {"gcs": 1, "head_and_controller": 2}


@pytest.mark.usefixtures("_hosts_work")
@pytest.mark.skipif(bool(why_no_redis()), reason=why_no_redis())
@pytest.mark.timeout(900)
def test_a_job_goes_on_and_no_bit_is_different() -> None:
    outcomes: list[Outcome] = []

    def told(outcome: Outcome) -> None:
        outcomes.append(outcome)
        if outcome.ok:
            password_is_in_no_list_of_processes()

    run_rows([(row, 1) for row in ROWS if row.name in ATTEMPTS], print, told)
    assert all(outcome.ok for outcome in outcomes), outcomes
    assert {outcome.row: outcome.attempts for outcome in outcomes} == ATTEMPTS
    assert not any(outcome.differing for outcome in outcomes)


def password_is_in_no_list_of_processes() -> None:
    cluster = Cluster.running()[-1]
    pids = [pid for node in cluster.nodes for pid in node.host.pids()]
    lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids]
    assert any(b"--redis_address=" in line for line in lines), "the tables are in the Redis"
    assert not any(cluster.layout.token.encode() in line for line in lines)
