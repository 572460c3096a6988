"""What a keeper refuses reaches the rank as it was raised, and can be sent on."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayTaskError

from launch.keeper_clients import KeeperStore, Parcels
from launch.snapshots import DamagedSnapshotError, SnapshotKey

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
