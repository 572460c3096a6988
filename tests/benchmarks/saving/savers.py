"""What each peer does with the state, as its documentation has it.

A saver's ``begin`` returns when the training loop may go on. Promises: what a saver tells of a
save is when it was over, by the machine's monotonic clock; it is asked to begin the next one only
after that.
"""

from __future__ import annotations

import importlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from launch.checkpoint_files import sync_folder
from tests.benchmarks.saving.state import Training

RING, SEALED, MEMORY, PARTNER, DISK = "ring", "sealed", "memory", "partner", "disk"
"""Where a state may lie: in the rank, there with its digest, in its node's keeper, in another's,
and durable, where that is promised. Peers know the last."""


class SaveFailed(RuntimeError):
    """A save came to nothing."""


class Saver(Protocol):
    """One way to save, on one rank."""

    def prepare(self, number: int) -> None:
        """Make room for a save; no clock runs."""

    def begin(self, number: int) -> None:
        """Save; returns when the state may change."""

    def reached(self) -> Mapping[str, float]:
        """Tiers that this rank's part of the newest save has reached, and when. Raises
        SaveFailed. Each of ``tiers`` in the end."""

    tiers: tuple[str, ...]
    """That a save reaches."""
    kept_here: tuple[str, ...]
    """Where the rank itself may bring it back from."""
    kept: tuple[str, ...]
    """Where any later rank may."""

    def waited(self) -> float:
        """Seconds that steps since ``begin`` were held up by the save."""

    def restore(self, number: int, tier: str) -> None:
        """Bring the state of a save back, in place."""

    def place(self, number: int) -> Path:
        """The folder of a save."""

    def damage(self, number: int, tier: str) -> None:
        """Flip a byte of rank 0's copy in memory."""

    def close(self) -> None:
        """End what runs beside."""


class Blocking:
    """A saver whose ``begin`` returns when all is done."""

    tiers: tuple[str, ...] = (DISK,)
    kept_here: tuple[str, ...] = ()
    kept: tuple[str, ...] = (DISK,)

    def __init__(self, training: Training, folder: Path) -> None:
        self._training, self._folder = training, folder
        self._reached: dict[str, float] = {}

    def prepare(self, number: int) -> None:
        if number and self._training.rank == 0:
            shutil.rmtree(self.place(number - 1))

    def done(self) -> None:
        """It is on disk now."""
        self._reached = {DISK: time.monotonic()}

    def reached(self) -> Mapping[str, float]:
        return self._reached

    def waited(self) -> float:
        return 0.0

    def place(self, number: int) -> Path:
        return self._folder / _name(number)

    def damage(self, number: int, tier: str) -> None:
        raise AssertionError("it keeps no copy in memory")

    def close(self) -> None:
        pass


class TorchSave(Blocking):
    """``torch.save`` of a file a rank, renamed when it is whole."""

    def __init__(self, training: Training, folder: Path, *, sync: bool) -> None:
        super().__init__(training, folder)
        self._sync = sync

    def begin(self, number: int) -> None:
        file = self._file(number)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        with part.open("wb") as stream:
            torch.save(self._training.state_dict(), stream)
            if self._sync:
                stream.flush()
                os.fsync(stream.fileno())
        part.rename(file)
        if self._sync:
            sync_folder(file.parent)
        self.done()

    def restore(self, number: int, tier: str) -> None:
        self._training.load(torch.load(self._file(number), weights_only=True))

    def _file(self, number: int) -> Path:
        return self.place(number) / f"rank-{self._training.rank}.pt"


class Dcp(Blocking):
    """``torch.distributed.checkpoint.save``, which syncs its files."""

    def begin(self, number: int) -> None:
        dcp.save(self._training.sharded_state_dict(), checkpoint_id=self.place(number))
        self.done()

    def restore(self, number: int, tier: str) -> None:
        folder = self.place(number)
        dcp.load(self._training.sharded_state_dict(), checkpoint_id=folder)


class DcpAsync(Dcp):
    """``async_save``; its stager is kept, and with it the memory that it stages to."""

    def __init__(self, training: Training, folder: Path, *, process: bool) -> None:
        super().__init__(training, folder)
        self._kind = AsyncCheckpointerType.PROCESS if process else AsyncCheckpointerType.THREAD
        # Pinned memory and staging on a stream of its own want a GPU.
        options = StagingOptions(False, process, False, False)
        self._stager = DefaultStager(options)
        # A thread's collectives must not meet the training's in one group.
        self._group = None if process else dist.new_group(backend="gloo")
        self._saving: Future[Any] | None = None

    def begin(self, number: int) -> None:
        self._reached = {}
        saving = dcp.async_save(
            self._training.sharded_state_dict(),
            checkpoint_id=self.place(number),
            process_group=self._group,
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )
        assert isinstance(saving, Future), "staging is not asynchronous"
        saving.add_done_callback(lambda _: self.done())
        self._saving = saving

    def reached(self) -> Mapping[str, float]:
        if self._saving is not None and self._saving.done() and self._saving.exception():
            raise SaveFailed(str(self._saving.exception()))
        return self._reached

    def close(self) -> None:
        self._stager.close()


class DeepSpeed(Blocking):
    """``save_checkpoint``, with the engine that the configuration names."""

    def __init__(self, training: Training, folder: Path) -> None:
        super().__init__(training, folder)
        self._writer = training.engine.checkpoint_engine
        self._waited = 0.0
        self._decoupled = bool(self._writer.is_decoupled())
        if self._decoupled:
            # The engine waits for its process before the next update, in here.
            self._commit: Callable[[Any], Any] = self._writer.commit
            self._writer.commit = self._timed_commit

    def begin(self, number: int) -> None:
        self._reached, self._waited = {}, 0.0
        self._training.engine.save_checkpoint(str(self._folder), tag=_name(number))
        if not self._decoupled:
            self.done()

    def waited(self) -> float:
        return self._waited

    def restore(self, number: int, tier: str) -> None:
        path, _ = self._training.engine.load_checkpoint(str(self._folder), tag=_name(number))
        if path is None:
            raise SaveFailed(f"DeepSpeed finds no checkpoint {_name(number)}")

    def close(self) -> None:
        self._training.engine.destroy()

    def _timed_commit(self, info: Any) -> Any:
        began = time.monotonic()
        try:
            return self._commit(info)
        finally:
            self._waited += time.monotonic() - began
            self.done()


@dataclass(frozen=True, slots=True)
class Peer:
    """One that is compared with."""

    made: Callable[[Training, Path], Saver]
    checkpoint: Mapping[str, Any]
    """That section of DeepSpeed's configuration, where it saves. What is saved is brought back
    without: the ``load`` of the engines with a writer refuses, since torch 2.6, what they wrote
    (it leaves ``weights_only`` at its default), and their files are those of the engine without.
    """
    synced: bool = True
    """Whether a save that is over outlives a loss of power."""


def _deepspeed(**writer: Any) -> Peer:
    # 0.19.8 knows no replicas' rank where ``data_parallel`` is left out, and raises.
    checkpoint = {"writer": {"data_parallel": "replica", **writer}}
    return Peer(DeepSpeed, checkpoint, synced=writer["type"] == "fast")


PEERS: Mapping[str, Peer] = {
    "torch.save": Peer(lambda t, f: TorchSave(t, f, sync=False), {}, synced=False),
    "torch.save, fsync": Peer(lambda t, f: TorchSave(t, f, sync=True), {}),
    "DCP": Peer(Dcp, {}),
    "DCP async, thread": Peer(lambda t, f: DcpAsync(t, f, process=False), {}),
    "DCP async, process": Peer(lambda t, f: DcpAsync(t, f, process=True), {}),
    "DeepSpeed": Peer(DeepSpeed, {}, synced=False),
    "DeepSpeed, fast": _deepspeed(type="fast"),
    "DeepSpeed, decoupled": _deepspeed(type="fast", decoupled=True),
    "DeepSpeed, python writer": _deepspeed(type="python"),
    "DeepSpeed, decoupled python writer": _deepspeed(type="python", decoupled=True),
}


def why_not(name: str) -> str | None:
    """Why a peer can't run on this machine; None where it can."""
    if PEERS[name].checkpoint.get("writer", {}).get("type") != "fast":
        return None
    builder = importlib.import_module("deepspeed.ops.op_builder").AsyncIOBuilder()
    if builder.is_compatible():
        return None
    return "its writer is built with libaio's headers, which aren't here (Debian: libaio-dev)"


NO_DATASTATES = "datastates-llm is in no registry; its source is built with CUDA's compiler"
"""Why DeepSpeed's third engine is left out."""


def _name(number: int) -> str:
    return f"save-{number}"
