"""Snapshots: packed and restored to the bit, never overwritten while read, damage refused."""

from __future__ import annotations

import pickle
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from launch.data import MOST_SKIPPED
from launch.digests import digest_of
from launch.keeper import Keeper
from launch.random_state import RandomState
from launch.snapshot_ring import SnapshotRing
from launch.snapshots import (
    DamagedSnapshotError,
    MissingSnapshotError,
    SnapshotError,
    SnapshotKey,
    StoredSnapshot,
    UnreadSnapshotError,
)
from launch.state_block import StateLayout, load_into, unpack

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Any bits at all, NaN payloads included."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(shape, dtype=dtype).nbytes
    top = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, top, (size,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def state(seed: int = 0) -> dict[str, Tensor]:
    shapes = [(7,), (3, 5), (), (1, 2, 3), (0, 4), (11,), (2,), (13,), (5,), (3,)]
    return {
        f"tensor.{n}": tensor_of(dtype, shape, seed * 100 + n)
        for n, (dtype, shape) in enumerate(zip(DTYPES, shapes, strict=True))
    }


def key(step: int, timeline: int = 0, attempt: int = 1, rank: int = 0) -> SnapshotKey:
    return SnapshotKey("job", attempt, timeline, rank, step)


def pack(tensors: dict[str, Tensor], meta: dict[str, object]) -> np.ndarray:
    layout = StateLayout(tensors)
    block = torch.zeros(layout.nbytes, dtype=torch.uint8)
    load_into(layout.views(block), tensors)
    header = layout.header(meta)
    block[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    return block.numpy()


class TestBlock:
    @settings(max_examples=30, deadline=None)
    @given(
        st.lists(
            st.tuples(
                st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.integers(0, 99)
            ),
            max_size=8,
        )
    )
    def test_any_tensors_come_back_to_the_bit(
        self, drawn: list[tuple[torch.dtype, list[int], int]]
    ) -> None:
        tensors = {
            f"t{n}": tensor_of(dtype, tuple(shape), seed)
            for n, (dtype, shape, seed) in enumerate(drawn)
        }
        meta, found = unpack(pack(tensors, {"step": 3}))
        assert meta == {"step": 3}
        assert {name: bits(t) for name, t in found.items()} == {
            name: bits(t) for name, t in tensors.items()
        }
        assert all(
            found[n].shape == t.shape and found[n].dtype == t.dtype for n, t in tensors.items()
        )

    def test_the_block_is_a_safetensors_file(self, tmp_path: Path) -> None:
        tensors = state()
        path = tmp_path / "state.safetensors"
        path.write_bytes(pack(tensors, {"ledger": [3]}).tobytes())
        with safe_open(path, framework="pt") as opened:
            assert opened.metadata() == {"octavo": '{"ledger": [3]}'}
            for name, tensor in tensors.items():
                assert bits(opened.get_tensor(name)) == bits(tensor)

    def test_non_contiguous_tensors_are_copied_by_value(self) -> None:
        live = torch.arange(12.0).view(3, 4).t()
        _, found = unpack(pack({"t": live}, {}))
        assert torch.equal(found["t"], live)

    def test_bytes_that_are_no_state_are_refused(self) -> None:
        block = pack(state(), {})
        for wrong in (b"", b"\xff" * 64, block[:100].tobytes(), block[:-1].tobytes()):
            with pytest.raises(ValueError, match="not a packed state"):
                unpack(wrong)

    def test_a_state_of_another_model_changes_nothing(self) -> None:
        live = {"a": torch.zeros(3), "b": torch.zeros(2)}
        for other in (
            {"a": torch.ones(3)},
            {"a": torch.ones(3), "b": torch.ones(2), "c": torch.ones(1)},
            {"a": torch.ones(4), "b": torch.ones(2)},
            {"a": torch.ones(3).double(), "b": torch.ones(2)},
        ):
            with pytest.raises(ValueError, match="don't fit"):
                load_into(live, other)
            assert not any(t.any() for t in live.values())

    def test_the_longest_skip_ledger_has_room_and_layers_that_wait_beside_it(self) -> None:
        ledger = range(10**17, 10**17 + MOST_SKIPPED)
        waiting = {f"layers.{i}.mlp.gate_up": [i, False, True] for i in range(2_000)}
        StateLayout(state()).header({"ledger": list(ledger), "waiting": waiting})

    def test_a_description_that_outgrew_its_room_is_an_error(self) -> None:
        layout = StateLayout(state())
        with pytest.raises(ValueError, match="bytes"):
            layout.header({"ledger": list(range(200_000))})


class TestRing:
    def ring(self, keep: int = 2) -> tuple[SnapshotRing, dict[str, Tensor]]:
        live = {"weights": torch.zeros(1000), "step": torch.zeros((), dtype=torch.int64)}
        return SnapshotRing(keep, live), live

    def test_a_state_comes_back_to_the_bit_with_its_meta(self) -> None:
        live = state(1)
        ring = SnapshotRing(2, live)
        before = {name: bits(t) for name, t in live.items()}
        ring.take(key(10), {"lr_scale": 0.5})
        load_into(live, state(2))
        assert {name: bits(t) for name, t in live.items()} != before
        assert ring.restore(10, rank=0) == {"lr_scale": 0.5}
        assert {name: bits(t) for name, t in live.items()} == before

    def test_it_holds_the_newest(self) -> None:
        ring, live = self.ring(keep=2)
        for step in (0, 10, 20, 30):
            live["weights"].fill_(step)
            ring.take(key(step), {})
        assert ring.steps() == [20, 30]
        ring.restore(20, rank=0)
        assert live["weights"][0] == 20
        with pytest.raises(MissingSnapshotError, match="holds steps"):
            ring.restore(10, rank=0)

    def test_a_rollback_drops_what_is_newer(self) -> None:
        ring, live = self.ring(keep=3)
        for step in (0, 10, 20):
            live["weights"].fill_(step)
            ring.take(key(step), {})
        ring.restore(10, rank=0)
        assert ring.steps() == [0, 10]
        live["weights"].fill_(99)
        ring.take(key(20, timeline=1), {})
        ring.restore(20, rank=0)
        assert live["weights"][0] == 99

    def test_a_state_being_read_is_not_overwritten(self) -> None:
        ring, live = self.ring(keep=2)
        live["weights"].fill_(7)
        slot = ring.take(key(0), {})
        ring.lease(slot)
        done = threading.Event()

        def train() -> None:
            for step in range(1, 9):
                live["weights"].fill_(step)
                ring.take(key(step), {})
            done.set()

        thread = threading.Thread(target=train)
        thread.start()
        # The reader still sees its state once the ring has gone round, or holds it up.
        finished = done.wait(0.3)
        assert slot.views["weights"].eq(7).all()
        ring.release(slot)
        thread.join(10)
        assert done.is_set()
        assert finished or ring.steps() == [7, 8]

    @pytest.mark.parametrize("keep", [2, 3, 4])
    def test_a_disk_that_hangs_never_makes_training_wait(self, keep: int) -> None:
        ring, live = self.ring(keep)
        live["weights"].fill_(7)
        on_disk = ring.take(key(0), {})
        ring.lease(on_disk)
        done = threading.Event()

        def train() -> None:
            for step in range(1, 20):
                ring.take(key(step), {})
                # All that the supervisor may send the ranks back to.
                assert len(ring.steps()) >= min(keep, step + 1)
            done.set()

        threading.Thread(target=train, daemon=True).start()
        assert done.wait(30)
        assert on_disk.views["weights"].eq(7).all()
        assert ring.steps() == list(range(20 - keep, 20))

    def test_a_slot_dropped_by_a_rollback_is_not_overwritten_while_read(self) -> None:
        ring, live = self.ring(keep=2)
        ring.take(key(0), {})
        live["weights"].fill_(10)
        slot = ring.take(key(10), {})
        ring.lease(slot)
        ring.restore(0, rank=0)
        live["weights"].fill_(55)
        ring.take(key(10, timeline=1), {})
        assert slot.views["weights"].eq(10).all()
        ring.release(slot)

    def test_a_copy_that_changed_in_memory_is_refused(self) -> None:
        ring, live = self.ring()
        slot = ring.take(key(10), {})
        slot.digest = digest_of(slot.block.numpy())
        ring.restore(10, rank=3)
        slot.views["weights"][500] += 1
        live["weights"].fill_(4)
        with pytest.raises(DamagedSnapshotError, match="rank 3: copy of step 10 in tier ring"):
            ring.restore(10, rank=3)
        assert live["weights"].eq(4).all()


class TestKeeper:
    def put(self, keeper: Keeper, at: SnapshotKey, data: bytes = b"state") -> None:
        keeper.put(at, data, digest_of(data))

    def steps(self, keeper: Keeper) -> list[tuple[int, int]]:
        return [(k.timeline, k.step) for k in keeper.keys("job")]

    def test_it_gives_back_what_was_put(self) -> None:
        keeper = Keeper()
        data = bytearray(b"some state")
        keeper.put(key(10), data, digest_of(data))
        data[0] = 0  # the sender's buffer is used again
        found = keeper.get(key(10))
        assert found is not None
        assert bytes(found.payload) == b"some state"
        assert keeper.get(key(20)) is None

    def test_a_payload_damaged_on_the_way_is_refused(self) -> None:
        keeper = Keeper()
        with pytest.raises(DamagedSnapshotError, match="step 10"):
            keeper.put(key(10), b"stale", digest_of(b"state"))
        assert keeper.keys("job") == []

    def test_a_payload_damaged_while_held_is_refused(self) -> None:
        keeper = Keeper()
        self.put(keeper, key(10))
        found = keeper.get(key(10))
        assert found is not None and isinstance(found.payload, np.ndarray)
        found.payload[2] ^= 1
        with pytest.raises(DamagedSnapshotError):
            keeper.get(key(10))

    def test_it_keeps_the_newest_of_each_rank(self) -> None:
        keeper = Keeper(keep=2)
        for step in (0, 10, 20):
            self.put(keeper, key(step, rank=0))
        self.put(keeper, key(0, rank=1))
        assert [(k.rank, k.step) for k in keeper.keys("job")] == [(1, 0), (0, 10), (0, 20)]

    def test_copies_that_were_rolled_back_go_before_those_that_count(self) -> None:
        keeper = Keeper(keep=3)
        for step in (10, 20, 30):
            self.put(keeper, key(step))
        self.put(keeper, key(20, timeline=1))
        assert self.steps(keeper) == [(0, 10), (1, 20)]

    def test_jobs_are_kept_apart(self) -> None:
        keeper = Keeper()
        self.put(keeper, key(10))
        other = SnapshotKey("other", 1, 0, 0, 10)
        self.put(keeper, other, b"theirs")
        keeper.drop("job")
        assert keeper.keys("job") == []
        found = keeper.get(other)
        assert found is not None and bytes(found.payload) == b"theirs"

    def test_one_copy_a_rank_is_too_few(self) -> None:
        with pytest.raises(ValueError, match="at least 2"):
            Keeper(keep=1)


class TestRandomState:
    def draws(self) -> list[float]:
        return [
            torch.rand(1).item(),
            np.random.normal(),
            random.gauss(0, 1),
            random.random(),
        ]

    def test_generators_go_on_where_they_were(self) -> None:
        self.draws()  # leaves a held-back gauss in numpy and Python
        state = RandomState()
        ring = SnapshotRing(2, state.tensors)
        ring.take(key(0), {})
        first = self.draws()
        assert self.draws() != first
        ring.restore(0, rank=0)
        state.restore()
        assert self.draws() == first

    def test_capture_follows_the_generators(self) -> None:
        state = RandomState()
        self.draws()
        state.capture()
        first = self.draws()
        state.restore()
        assert self.draws() == first


def test_errors_survive_pickling() -> None:
    for kind in (DamagedSnapshotError, MissingSnapshotError, UnreadSnapshotError):
        error = pickle.loads(pickle.dumps(kind(3, 10, "memory", "gone")))
        assert isinstance(error, SnapshotError)
        assert (error.rank, error.step, error.tier) == (3, 10, "memory")
        assert "rank 3" in str(error)


def test_a_stored_snapshot_pickles_with_its_payload() -> None:
    stored = StoredSnapshot(np.arange(5, dtype=np.uint8), "digest")
    again = pickle.loads(pickle.dumps(stored))
    assert bytes(again.payload) == bytes(range(5))
