"""What a job gets of idle workers while some of them still import. Ray is replaced at its edge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from launch import standby

HERE = "n0"


class RayError(Exception):
    pass


class GetTimeoutError(RayError):
    pass


class Answer:
    """Of an actor, as soon as it has time."""

    def __init__(self, at: float, answer: Callable[[], Any]) -> None:
        self.at, self._answer = at, answer
        self.given = False

    def value(self) -> Any:
        if not self.given:
            self._value, self.given = self._answer(), True
        return self._value


class StandbyWorker:
    """Answers once its imports are done, in the order in which it was asked."""

    def __init__(self, cluster: Cluster, imported_at: float, *, idle: bool = True) -> None:
        self._cluster, self._imported_at = cluster, imported_at
        self.owner: str | None = None if idle else "another"
        self.idle = self._call(lambda: self.owner is None)
        self.claim = self._call(self._claim)
        self.freezes_after_idle = False
        self.killed = False

    def _call(self, function: Callable[..., Any]) -> Any:
        def remote(*arguments: Any) -> Answer:
            at = self._imported_at
            if function == self._claim and self.freezes_after_idle:
                at = 100.0
            return self._cluster.ask(at, lambda: function(*arguments))

        return SimpleNamespace(remote=remote)

    def _claim(self, owner: str) -> bool:
        if self.owner is not None:
            return False
        self.owner = owner
        return True


class Cluster:
    """Workers and a clock by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.workers: dict[str, StandbyWorker] = {}
        self._asked: list[Answer] = []

    def start(self, count: int, imported_at: float = 0.0, **how: Any) -> list[StandbyWorker]:
        made = [StandbyWorker(self, imported_at, **how) for _ in range(count)]
        for worker in made:
            self.workers[f"{standby.POOLED}{HERE}-{len(self.workers)}"] = worker
        return made

    def ask(self, at: float, answer: Callable[[], Any]) -> Answer:
        self._asked.append(Answer(at, answer))
        return self._asked[-1]

    def pass_until(self, now: float) -> None:
        self.now = max(self.now, now)
        for answer in self._asked:
            if answer.at <= self.now:
                answer.value()

    def wait(
        self, answers: list[Answer], num_returns: int, timeout: float
    ) -> tuple[list[Answer], list[Answer]]:
        if sum(answer.at <= self.now for answer in answers) < num_returns:
            self.pass_until(self.now + timeout)
        self.pass_until(self.now)
        done = [answer for answer in answers if answer.given]
        return done, [answer for answer in answers if not answer.given]

    def get(self, answer: Answer, timeout: float | None = None) -> Any:
        if timeout is None:
            self.pass_until(answer.at)
        if not answer.given:
            raise GetTimeoutError("nothing yet")
        return answer.value()

    def kill(self, actor: StandbyWorker, no_restart: bool = True) -> None:
        actor.killed = True

    def idle(self) -> int:
        return sum(worker.owner is None for worker in self.workers.values())


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    made = Cluster()
    ray: Any = ModuleType("ray")
    ray.exceptions = SimpleNamespace(RayError=RayError, GetTimeoutError=GetTimeoutError)
    ray.wait, ray.get, ray.kill = made.wait, made.get, made.kill
    ray.get_actor = lambda name, namespace: made.workers[name]
    ray.util = SimpleNamespace(
        list_named_actors=lambda all_namespaces: [
            {"name": name, "namespace": standby.NAMESPACE} for name in made.workers
        ]
    )
    monkeypatch.setitem(__import__("sys").modules, "ray", ray)
    clock = SimpleNamespace(monotonic=lambda: made.now, sleep=lambda seconds: None)
    monkeypatch.setattr(standby, "time", clock)
    return made


def test_workers_that_still_import_stay_in_the_pool_and_are_waited_for_once(
    cluster: Cluster,
) -> None:
    cluster.start(8, imported_at=60.0)
    assert standby.claim({HERE: 2}, "a job") == {HERE: []}
    assert cluster.now == pytest.approx(standby.CLAIM_S)
    cluster.pass_until(61.0)
    assert cluster.idle() == 8, "nobody has claimed what nobody knows of"


def test_those_that_are_ready_are_taken_without_waiting_for_the_others(cluster: Cluster) -> None:
    cluster.start(2, imported_at=60.0)
    ready = cluster.start(3)
    assert standby.claim({HERE: 2}, "a job") == {HERE: ready[:2]}
    assert cluster.now == 0.0
    cluster.pass_until(61.0)
    assert cluster.idle() == 3


def test_another_jobs_worker_is_not_taken_and_the_next_one_is(cluster: Cluster) -> None:
    cluster.start(1, idle=False)
    mine, late, spare = cluster.start(3)
    # Another job is faster, between its answer and our claim.
    late.claim = late._call(lambda owner: False)
    assert standby.claim({HERE: 2}, "a job") == {HERE: [mine, spare]}


def test_one_whose_yes_comes_too_late_is_ended_and_one_that_says_no_is_not(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AtOnce:
        def __init__(self, target: Any, args: Any, daemon: bool) -> None:
            self.start = lambda: target(*args)

    monkeypatch.setattr(standby.threading, "Thread", AtOnce)
    frozen, other = cluster.start(2)
    frozen.freezes_after_idle = other.freezes_after_idle = True
    other.claim = SimpleNamespace(remote=lambda owner: cluster.ask(100.0, lambda: False))
    assert standby.claim({HERE: 2}, "a job") == {HERE: []}
    assert frozen.killed and not other.killed
