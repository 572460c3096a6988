"""Standby workers of no job: claimed once, refilled later, ended with their owner."""

from __future__ import annotations

import time

import pytest

from launch.standby import REFILL_AFTER_S, StandbyPool, claim

pytestmark = pytest.mark.usefixtures("local_ray")


class StubWorker:
    """The part of a Worker that the pool calls, without torch's imports."""

    def __init__(self, owner: object) -> None:
        self.owner: object = owner
        self.claimed = False

    def idle(self) -> bool:
        return not self.claimed

    def claim(self, owner: object) -> bool:
        first, self.claimed = not self.claimed, True
        return first


def _node() -> str:
    import ray

    return ray.get_runtime_context().get_node_id()


def test_a_pool_is_filled_once_and_each_worker_is_claimed_by_one_claimer_only() -> None:
    import ray

    pool = StandbyPool("owner", 2, worker_class=StubWorker)
    now = time.monotonic() + REFILL_AFTER_S
    assert pool.refill(now) == 2
    assert pool.refill(now + 1) == 0

    here = _node()
    ((first,), (second,)) = (claim({here: 1}, "a")[here], claim({here: 2}, "b")[here])
    assert first._actor_id != second._actor_id
    # None is left, and another node's are not this one's.
    assert claim({here: 1, "f" * 56: 1}, "c") == {here: [], "f" * 56: []}

    # Right after a claim the cores belong to the job that starts.
    assert pool.refill(now + 2) == 0
    assert pool.refill(now + 2 + REFILL_AFTER_S) == 2
    # A controller that was restarted finds them again.
    assert StandbyPool("owner", 2, worker_class=StubWorker).refill(now + 99) == 0
    assert len(claim({here: 5}, "d")[here]) == 2
    ray.kill(first)
