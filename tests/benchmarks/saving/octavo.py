"""What Octavo does with the state: ring, keepers over Ray, checkpoint, with the product's parts.

The commit, which is the supervisor's in a job, is a thread's of rank 0 here. The two keepers are
actors of one Ray on this machine: a partner's copy crosses no network.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import ray
import torch.distributed as dist

from launch.attempt_folder import open_attempt
from launch.checkpoints import IncompleteCheckpointError, checkpoint_folder, commit_checkpoint
from launch.commands import Assignment, CopyFailed, Report, RestorePoint, SnapshotReport
from launch.config import RunConfig
from launch.keeper import Keeper
from launch.keeper_clients import KeeperHandles, stores_of
from launch.restoring import Restorer
from launch.shipping import Shipper
from launch.snapshot_ring import Slot, SnapshotRing
from launch.snapshots import SnapshotKey, StoredSnapshot
from launch.state_block import load_into
from launch.state_header import LAYOUT
from parallel.layout import RankLayout
from tests.benchmarks.peers.processes import SideError
from tests.benchmarks.saving.savers import DISK, MEMORY, PARTNER, RING, SEALED, SaveFailed
from tests.benchmarks.saving.state import Training

JOB, ATTEMPT, TIMELINE = "saving", 1, 0
NAMESPACE = "octavo-saving"
RANKS = 2
_KEEP = 1
"""States in the ring beside the one that is being filled: memory for 1 GB a rank is scarce."""
_COMMIT_S = 300.0
_START_S = 300.0
"""That Ray's processes may take to be there, on a machine that is busy."""
_ANSWER_S = 60.0


class DamageableKeeper(Keeper):
    """A keeper in whose memory a byte can be flipped."""

    def damage(self, key: SnapshotKey) -> None:
        """Flip one in the middle of what is held."""
        held = self._held[(key.job, key.rank)]
        payload = bytearray(held[key].payload)
        payload[len(payload) // 2] ^= 1
        held[key] = StoredSnapshot(payload, held[key].digest)


@contextlib.contextmanager
def keepers(nbytes: int) -> Iterator[str]:
    """A Ray with a keeper for each rank; its address. ``nbytes``: of a rank's state, about.

    Raises SideError.
    """
    # A state of each rank on its way out, and one on its way back.
    store = 4 * nbytes + (512 << 20)
    ray.init(
        address="local",
        num_cpus=RANKS,
        object_store_memory=store,
        include_dashboard=False,
        namespace=NAMESPACE,
        log_to_driver=False,
    )
    try:
        actor = ray.remote(num_cpus=0)(DamageableKeeper)
        made = [actor.options(name=_name(rank)).remote(keep=2) for rank in range(RANKS)]
        answers = [keeper.ping.remote() for keeper in made]
        if ray.wait(answers, num_returns=RANKS, timeout=_START_S)[1]:
            raise SideError(f"the keepers have not started within {_START_S:.0f} s", hung=True)
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


class Octavo:
    """``savers.Saver``."""

    tiers: tuple[str, ...] = (SEALED, MEMORY, PARTNER, DISK)
    kept_here: tuple[str, ...] = (RING,)
    kept: tuple[str, ...] = (MEMORY, PARTNER, DISK)

    def __init__(self, training: Training, folder: Path, address: str) -> None:
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False)
        self._training, self._folder, rank = training, folder, training.rank
        self._own, self._other = (ray.get_actor(_name(r)) for r in (rank, RANKS - 1 - rank))
        self._layout = RankLayout((1, RANKS, 1), (0, rank, 0), 1, (), ())
        self._reached: dict[str, float] = {}
        self._failed = ""
        if rank == 0:
            open_attempt(folder, ATTEMPT)
        dist.barrier()
        self._ring: SnapshotRing | None = None
        self._shipper: Shipper | None = None
        self._slot: Slot | None = None

    def prepare(self, number: int) -> None:
        self._parts()
        # One state is all that is brought back, and memory for more is scarce.
        ray.get(self._own.drop.remote(JOB), timeout=_ANSWER_S)

    def begin(self, number: int) -> None:
        self._reached, self._failed = {}, ""
        ring, shipper = self._parts()
        meta = {"step": number, LAYOUT: self._layout.to_json()}
        self._slot = ring.take(self._key(number), meta)
        shipper.ship(self._slot, to_disk=True, replicated=True)
        if self._training.rank == 0:
            threading.Thread(target=self._commit, args=(number,), daemon=True).start()
        self._reached[RING] = time.monotonic()

    def reached(self) -> Mapping[str, float]:
        if self._failed:
            raise SaveFailed(self._failed)
        return dict(self._reached)

    def waited(self) -> float:
        return 0.0

    def restore(self, number: int, tier: str) -> None:
        """Raises a SnapshotError for a copy that isn't what was written."""
        if tier == RING:
            ring, _ = self._parts()
            ring.restore(number, self._training.rank)
            return
        sources = stores_of(KeeperHandles(self._own, sources=(self._other,))).sources
        wanted = [source for source in sources if source[0] == tier]
        point = RestorePoint(number, "memory", ATTEMPT, TIMELINE)
        if tier == DISK:
            path = str(checkpoint_folder(self._folder, number))
            point = RestorePoint(number, "disk", ATTEMPT, TIMELINE, path)
        world = dist.group.WORLD
        assert world is not None
        found = Restorer(
            self._assignment(point),
            wanted,
            world,
            lambda report: None,
            self._layout,
            self._training.tensors,
        ).find()
        assert found is not None
        load_into(self._training.tensors, found.tensors)

    def place(self, number: int) -> Path:
        return checkpoint_folder(self._folder, number)

    def damage(self, number: int, tier: str) -> None:
        if tier == RING:
            assert self._slot is not None
            self._slot.block[self._slot.block.numel() // 2] ^= 1
            return
        keeper = self._own if tier == MEMORY else self._other
        ray.get(keeper.damage.remote(self._key(number)), timeout=_ANSWER_S)

    def close(self) -> None:
        if self._shipper is not None:
            self._shipper.close()
        ray.shutdown()

    def _parts(self) -> tuple[SnapshotRing, Shipper]:
        if self._ring is None or self._shipper is None:
            handles = KeeperHandles(self._own, partners=(self._other,))
            stores = stores_of(handles)
            self._ring = SnapshotRing(_KEEP, self._training.tensors)
            self._shipper = Shipper(
                self._ring, stores.own, self._folder, self._told, stores.partners
            )
        return self._ring, self._shipper

    def _told(self, report: Report) -> None:
        """By threads of the shipper and of Ray."""
        if isinstance(report, CopyFailed):
            self._failed = f"{report.tier}: {report.error}"
        elif isinstance(report, SnapshotReport) and report.tier != DISK:
            self._reached[SEALED if report.tier == RING else report.tier] = time.monotonic()
        elif isinstance(report, SnapshotReport) and self._training.rank != 0:
            self._reached[DISK] = time.monotonic()

    def _commit(self, number: int) -> None:
        deadline = time.monotonic() + _COMMIT_S
        while time.monotonic() < deadline:
            try:
                commit_checkpoint(
                    self._folder, number, ATTEMPT, range(RANKS), timeline=TIMELINE, num_to_keep=1
                )
            except IncompleteCheckpointError:
                time.sleep(0.01)
            except Exception as error:
                self._failed = f"commit: {error}"
                return
            else:
                self._reached[DISK] = time.monotonic()
                return
        self._failed = f"save {number} was not complete after {_COMMIT_S:.0f} s"

    def _key(self, number: int) -> SnapshotKey:
        return SnapshotKey(JOB, ATTEMPT, TIMELINE, self._training.rank, number)

    def _assignment(self, point: RestorePoint) -> Assignment:
        return Assignment(
            job=JOB,
            attempt=ATTEMPT + 1,
            timeline=TIMELINE,
            rank=self._training.rank,
            world_size=RANKS,
            local_rank=self._training.rank,
            local_size=RANKS,
            master_addr="",
            master_port=0,
            job_dir=str(self._folder),
            run=RunConfig(),
            restore=point,
            ledger=(),
            precision={},
            lr_scale=1.0,
            fired_drills=(),
        )


def _name(rank: int) -> str:
    return f"keeper-{rank}"
