"""What a keeper refuses reaches the rank as it was raised, and can be sent on."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, RayTaskError

from launch.keeper_clients import KeeperStore, Parcels, RayPartner
from launch.snapshots import DamagedSnapshotError, SnapshotKey, StoreGoneError

KEY = SnapshotKey("job", 1, 0, 2, 20)


def store_that_raises(error: Exception, patch: pytest.MonkeyPatch) -> KeeperStore:
    def get(reference: Any, timeout: float) -> None:
        raise RayTaskError("get", "the traceback", error).as_instanceof_cause()

    patch.setattr(ray, "get", get)
    keeper = SimpleNamespace(get=SimpleNamespace(remote=lambda _: None))
    return KeeperStore(keeper, Parcels())


def test_a_damaged_copy_is_refused_by_an_error_that_ranks_can_tell_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    damaged = DamagedSnapshotError(2, 20, "memory", "digest differs")
    with pytest.raises(DamagedSnapshotError) as raised:
        store_that_raises(damaged, monkeypatch).get(KEY)
    assert type(raised.value) is DamagedSnapshotError
    assert pickle.loads(pickle.dumps(raised.value)).detail == "digest differs"


def test_any_other_error_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RayTaskError):
        store_that_raises(ValueError("no"), monkeypatch).get(KEY)


def test_a_keeper_that_died_is_told_as_that_and_the_one_of_its_name_is_asked_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def keeper(name: str) -> Any:
        def put(*_: Any, **__: Any) -> str:
            asked.append(name)
            return name

        return SimpleNamespace(put=SimpleNamespace(remote=put))

    def get(reference: str, timeout: float) -> None:
        if reference == "old":
            raise ActorDiedError

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "put", lambda value: value)
    found: list[Any] = [None, keeper("new")]
    monkeypatch.setattr("launch.keeper_clients.named_actor", lambda _: found.pop(0))
    store = KeeperStore(keeper("old"), Parcels(), name="keeper-0")
    for _ in range(2):
        with pytest.raises(StoreGoneError):
            store.put(KEY, b"state", "digest")
    store.put(KEY, b"state", "digest")
    store.put(KEY, b"state", "digest")
    assert asked == ["old", "old", "new", "new"] and not found


def test_a_partner_that_died_is_looked_for_when_the_next_copy_is_sent_and_by_no_thread_of_rays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    futures: list[Future[None]] = []
    looked: list[str] = []

    def keeper(name: str) -> Any:
        def put(*_: Any, **__: Any) -> Any:
            looked.append(f"put to {name}")
            futures.append(Future())
            return SimpleNamespace(future=lambda: futures[-1])

        return SimpleNamespace(put=SimpleNamespace(remote=put))

    def named_actor(name: str) -> Any:
        looked.append(threading.current_thread().name)
        return keeper("new")

    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr("launch.keeper_clients.named_actor", named_actor)
    partner = RayPartner(keeper("old"), Parcels(), "keeper-1")
    partner.send(KEY, b"state", "digest")
    answering = threading.Thread(
        target=futures[0].set_exception, args=(ActorDiedError(),), name="ray"
    )
    answering.start()
    answering.join()
    assert looked == ["put to old"]
    partner.send(KEY, b"state", "digest")
    assert looked == ["put to old", threading.current_thread().name, "put to new"]
