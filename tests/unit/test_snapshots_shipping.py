"""Copies on their way out: all tiers told, a tier that fails is told and holds up nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from launch import shipping
from launch.attempt_folder import open_attempt
from launch.checkpoint_writer import is_due
from launch.checkpoints import commit_checkpoint
from launch.commands import CopyFailed, Report, SnapshotReport
from launch.digests import Payload
from launch.keeper import Keeper
from launch.shipping import Shipper
from launch.snapshot_ring import SnapshotRing
from launch.snapshots import SnapshotKey, SnapshotStore, StoredSnapshot, StoreGoneError
from launch.state_block import unpack


class Gate:
    """A store whose ``put`` waits to be let through, then works or fails."""

    def __init__(self, error: Exception | None = None) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()
        self.error = error
        self.put_steps: list[int] = []
        self.payloads: dict[int, bytes] = {}

    def put(
        self, key: SnapshotKey, payload: Payload, digest: str, *, replicated: bool = False
    ) -> None:
        self.put_steps.append(key.step)
        self.entered.set()
        assert self.open.wait(10)
        if self.error is not None:
            raise self.error
        self.payloads[key.step] = bytes(payload)

    def get(self, key: SnapshotKey) -> StoredSnapshot | None:
        raise NotImplementedError


class Rig:
    """A ring over one live tensor, its shipper, and what was told."""

    def __init__(self, store: SnapshotStore | None, job_dir: Path) -> None:
        self.live = {"weights": torch.zeros(100)}
        self.ring = SnapshotRing(3, self.live)
        self.told: list[Report] = []
        self.shipper = Shipper(self.ring, store, job_dir, self.told.append)

    def snapshot(self, step: int, *, to_disk: bool = False, timeline: int = 0) -> None:
        self.live["weights"].fill_(step)
        slot = self.ring.take(SnapshotKey("job", 1, timeline, 0, step), {"step": step})
        self.shipper.ship(slot, to_disk=to_disk)

    def done(self) -> list[tuple[str, int]]:
        assert self.shipper.wait(10)
        return [(r.tier, r.step) for r in self.told if isinstance(r, SnapshotReport)]

    def failed(self) -> list[tuple[str, int]]:
        return [(r.tier, r.step) for r in self.told if isinstance(r, CopyFailed)]


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    made: list[Rig] = []
    yield made
    for rig in made:
        rig.shipper.close()


def rig_of(rigs: list[Rig], store: SnapshotStore | None, job_dir: Path) -> Rig:
    rigs.append(Rig(store, job_dir))
    return rigs[-1]


def test_a_copy_is_told_for_every_tier_it_reached(rigs: list[Rig], tmp_path: Path) -> None:
    keeper = Keeper()
    open_attempt(tmp_path, 1)
    rig = rig_of(rigs, keeper, tmp_path)
    rig.snapshot(10)
    rig.snapshot(20, to_disk=True)
    told = rig.done()
    assert told[:3] == [("ring", 10), ("memory", 10), ("ring", 20)]
    assert sorted(told[3:]) == [("disk", 20), ("memory", 20)]
    (first, second) = keeper.keys("job")
    for key in (first, second):
        stored = keeper.get(key)
        assert stored is not None
        meta, tensors = unpack(stored.payload)
        assert meta == {"step": key.step}
        assert tensors["weights"].eq(key.step).all()
    assert commit_checkpoint(tmp_path, 20, 1, [0]).step == 20


def test_what_is_shipped_is_what_was_taken_though_training_went_on(
    rigs: list[Rig], tmp_path: Path
) -> None:
    gate = Gate()
    rig = rig_of(rigs, gate, tmp_path)
    rig.snapshot(10)
    assert gate.entered.wait(10)
    rig.snapshot(20)
    rig.snapshot(30)
    rig.snapshot(40)
    gate.open.set()
    rig.done()
    for step in (10, 20, 30, 40):
        assert unpack(gate.payloads[step])[1]["weights"].eq(step).all()


def test_a_snapshot_that_was_rolled_back_is_not_shipped(rigs: list[Rig], tmp_path: Path) -> None:
    gate = Gate()
    rig = rig_of(rigs, gate, tmp_path)
    rig.snapshot(10)
    assert gate.entered.wait(10)
    rig.snapshot(20)
    rig.shipper.drop_after(10)
    rig.ring.restore(10, rank=0)
    rig.snapshot(20, timeline=1)
    gate.open.set()
    rig.done()
    told = [(r.timeline, r.step) for r in rig.told if isinstance(r, SnapshotReport)]
    assert told == [(0, 10), (0, 10), (1, 20), (1, 20)]
    assert gate.put_steps == [10, 20]


def test_nor_is_one_written_that_was_rolled_back_while_it_was_sealed(
    rigs: list[Rig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealing, on = threading.Event(), threading.Event()
    digest_of = shipping.digest_of

    def slow(payload: Payload) -> str:
        sealing.set()
        assert on.wait(10)
        return digest_of(payload)

    monkeypatch.setattr(shipping, "digest_of", slow)
    open_attempt(tmp_path, 1)
    rig = rig_of(rigs, None, tmp_path)
    rig.snapshot(20, to_disk=True)
    assert sealing.wait(10)
    rig.shipper.drop_after(10)
    on.set()
    assert ("disk", 20) not in rig.done() and rig.failed() == []
    assert not rig.shipper.writing and not list(tmp_path.rglob("*.safetensors"))


def test_a_keeper_that_fails_is_told_and_left_alone_for_a_while(
    rigs: list[Rig], tmp_path: Path
) -> None:
    gate = Gate(error=ConnectionError("the keeper is gone"))
    gate.open.set()
    open_attempt(tmp_path, 1)
    rig = rig_of(rigs, gate, tmp_path)
    rig.snapshot(10)
    rig.snapshot(20, to_disk=True)
    assert sorted(rig.done()) == [("disk", 20), ("ring", 10), ("ring", 20)]
    assert rig.failed() == [("memory", 10)], "told once"
    assert gate.put_steps == [10]
    assert rig.shipper.disk_error(20) is None


def test_a_disk_that_fails_is_told_and_the_keeper_still_gets_its_copy(
    rigs: list[Rig], tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    rig = rig_of(rigs, Keeper(), tmp_path)
    rig.snapshot(10, to_disk=True)
    assert rig.done() == [("ring", 10), ("memory", 10)]
    assert rig.failed() == [("disk", 10)]
    assert rig.shipper.disk_error(10) is not None


def test_without_a_keeper_there_are_no_copies_in_memory(rigs: list[Rig], tmp_path: Path) -> None:
    rig = rig_of(rigs, None, tmp_path)
    rig.snapshot(10)
    assert rig.done() == [("ring", 10)]
    assert rig.failed() == []


class Replaced(Keeper):
    """Gone at first; another one stands there later."""

    def __init__(self) -> None:
        super().__init__()
        self.gone = True

    def put(self, *copy: Any, **how: Any) -> None:
        if self.gone:
            raise StoreGoneError("the node's keeper has died")
        super().put(*copy, **how)


def test_a_keeper_that_died_is_asked_again_in_a_moment_and_a_failing_one_is_not(
    rigs: list[Rig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("launch.shipping.time", SimpleNamespace(monotonic=lambda: now[0]))
    keeper = Replaced()
    rig = rig_of(rigs, keeper, tmp_path)
    rig.snapshot(10)
    rig.shipper._queue.wait(10)
    assert rig.failed() == [("memory", 10)]
    keeper.gone = False
    now[0] += 3.0
    rig.snapshot(20)
    assert rig.done() == [("ring", 10), ("ring", 20), ("memory", 20)]


@pytest.mark.parametrize(
    ("step", "changes", "due"),
    [
        (20, {}, "write"),
        (21, {}, "no"),
        (20, {"every": 0}, "no"),
        (20, {"writing": True}, "left out"),
        (21, {"writing": True}, "no"),
        (100, {"writing": True}, "write"),
        (21, {"writing": True, "stopping": True}, "write"),
    ],
)
def test_a_checkpoint_is_left_out_while_one_is_written_but_for_the_last(
    step: int, changes: dict[str, Any], due: str
) -> None:
    usual = {"every": 10, "last": 100, "stopping": False, "writing": False}
    assert is_due(step, **{**usual, **changes}) == due


class TestSlowDisk:
    @pytest.fixture
    def gate(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Gate]:
        """What a rank's file has to pass."""
        gate = Gate()

        def write(job_dir: Path, key: SnapshotKey, payload: Payload, digest: str) -> Path:
            gate.put(key, payload, digest)
            return job_dir / str(key.step)

        monkeypatch.setattr("launch.checkpoint_writer.write_rank_file", write)
        yield gate
        gate.open.set()

    def test_it_holds_up_neither_training_nor_copies_in_memory(
        self, rigs: list[Rig], gate: Gate, tmp_path: Path
    ) -> None:
        keeper = Keeper(20)
        rig = rig_of(rigs, keeper, tmp_path)
        rig.snapshot(10, to_disk=True)
        assert gate.entered.wait(10)
        for step in range(20, 120, 10):
            rig.snapshot(step)
        assert rig.shipper.writing
        assert len(rig.ring.steps()) >= 2
        gate.open.set()
        told = rig.done()
        assert [step for tier, step in told if tier == "memory"] == list(range(10, 120, 10))
        assert [step for tier, step in told if tier == "disk"] == [10]
        assert unpack(gate.payloads[10])[1]["weights"].eq(10).all()
        assert not rig.shipper.writing
        rig.snapshot(120)
        rig.snapshot(130)
        assert rig.ring.steps() == [110, 120, 130]

    def test_the_last_one_waits_for_its_turn_and_is_written(
        self, rigs: list[Rig], gate: Gate, tmp_path: Path
    ) -> None:
        rig = rig_of(rigs, None, tmp_path)
        rig.snapshot(10, to_disk=True)
        assert gate.entered.wait(10)
        rig.snapshot(20, to_disk=True)
        assert not rig.shipper.wait(0.05)
        gate.open.set()
        assert [step for tier, step in rig.done() if tier == "disk"] == [10, 20]

    def test_what_waits_of_a_step_that_was_rolled_back_is_not_written(
        self, rigs: list[Rig], gate: Gate, tmp_path: Path
    ) -> None:
        rig = rig_of(rigs, None, tmp_path)
        rig.snapshot(10, to_disk=True)
        assert gate.entered.wait(10)
        rig.snapshot(20, to_disk=True)
        rig.shipper.drop_after(10)
        gate.open.set()
        assert [step for tier, step in rig.done() if tier == "disk"] == [10]
        assert rig.failed() == [] and gate.put_steps == [10]
        assert all(not slot.leases for slot in rig.ring._slots)
