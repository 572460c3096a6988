"""The one launcher of tests that need several ranks: processes on this machine, over gloo.

``run_ranks(body, world_size, *args)`` starts ``world_size`` fresh processes, makes the
process group in each and calls ``body(rank, world_size, *args)``. Promises: every process
it started has ended when it returns; what the bodies returned comes back in rank order;
the first rank that raised is named, with its traceback, and nothing waits for the others.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

PRELOAD = [
    "torch",
    "deepspeed",
    # deepspeed.initialize imports it, and torch._dynamo with it, which takes seconds.
    "deepspeed.runtime.zero.muon.original_muon",
]
"""Imported once, in the process that ranks are forked from: a fresh rank costs 40 ms, not 5 s."""


class RankFailed(AssertionError):
    """One rank raised or died; the message has its rank and its traceback."""


def free_port() -> int:
    """A TCP port on loopback that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_ranks(
    body: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_s: float = 120.0,
    init_group: bool = True,
) -> list[Any]:
    """Run ``body(rank, world_size, *args)`` on every rank and return what they returned.

    ``body`` is a top-level function, its arguments and its result pickle (tensors travel
    by value). With ``init_group`` the default process group is gloo and made beforehand;
    without it only the variables of ``env://`` are set. Raises RankFailed when a rank
    raises or dies, or when some have not answered within ``timeout_s``.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    # Open before a rank looks for it: refused, torch's client tries again half a second later.
    store = _store_of(world_size) if init_group else None
    port = store.port if store else free_port()
    processes: list[BaseProcess] = []
    answers: dict[Connection, int] = {}
    try:
        for rank in range(world_size):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(writer, body, rank, world_size, port, timeout_s, init_group, args),
                daemon=True,
            )
            process.start()
            writer.close()
            processes.append(process)
            answers[reader] = rank
        results = _collect(answers, world_size, timeout_s)
        for process in processes:
            process.join(timeout=10)
        return results
    finally:
        for process in processes:
            process.kill()
            process.join()
        del store


def _store_of(world_size: int) -> Any:
    """Where ranks of ``env://`` meet, in this process."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)


def _collect(answers: dict[Connection, int], world_size: int, timeout_s: float) -> list[Any]:
    results: list[Any] = [None] * world_size
    deadline = time.monotonic() + timeout_s
    waiting = dict(answers)
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"ranks {sorted(waiting.values())} silent for {timeout_s:g} s")
        for reader in ready:
            assert isinstance(reader, Connection)
            rank = waiting.pop(reader)
            try:
                failure, result = reader.recv()
            except EOFError:
                raise RankFailed(f"rank {rank} died without a word") from None
            if failure is not None:
                raise RankFailed(f"rank {rank}:\n{failure}")
            results[rank] = result
    return results


def _rank_main(
    writer: Connection,
    body: Callable[..., Any],
    rank: int,
    world_size: int,
    port: int,
    timeout_s: float,
    init_group: bool,
    args: tuple[Any, ...],
) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_SIZE=str(world_size),
        DS_ACCELERATOR="cpu",
        OMP_NUM_THREADS="1",
    )
    if init_group:
        # torch's word for: the store is another process'.
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if init_group:
            dist.init_process_group(
                "gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s)
            )
        result = body(rank, world_size, *args)
        # By value: a tensor sent by handle would be gone once this process has ended.
        writer.send_bytes(pickle.dumps((None, result)))
    except BaseException:
        with contextlib.suppress(OSError):
            writer.send((traceback.format_exc(), None))
        raise
    finally:
        if init_group and dist.is_initialized():
            dist.destroy_process_group()
