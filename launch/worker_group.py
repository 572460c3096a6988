"""The ranks of one job as Ray actors: pinned to their nodes, replaced by standby workers.

A worker takes no resources of its own: the node's keeper holds the placement group's
bundle, and workers are pinned beside it by node affinity. Ranks fill the nodes in order,
so rank r of equal nodes sits on node r // slots: with rank = (pipe * data + d) * tensor + t,
tensor neighbours share a node and pipeline stages are cut across nodes.

Promises: ``kill`` returns when the processes are gone, so that the next attempt finds
ports, memory and devices free; only ``kill``, ``master`` and ``copies`` wait, each for a
bounded time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from launch import standby
from launch.commands import Assignment, Command
from launch.rank_group import RankEnd, Seat
from launch.snapshots import SnapshotKey

logger = logging.getLogger(__name__)

NAMESPACE = "octavo"
ANSWER_S = 10.0
"""Seconds that a keeper or a node may take to answer."""
PING_S = 0.5
"""Seconds that idle workers may take to say that they live."""
TERM_S = 0.5
"""Seconds after which a killed worker's process is sent SIGKILL by its number."""
GONE_S = 10.0
"""Seconds that processes may take to disappear."""


@dataclass(eq=False)
class _Worker:
    """One actor; ``run`` is set once it has a rank."""

    actor: Any
    node_id: str
    ready: Any
    """Reference to its WorkerInfo."""
    info: Any = None
    run: Any = None


class WorkerGroup:
    """``launch.rank_group.RankGroup`` over Ray."""

    def __init__(
        self,
        job: str,
        owner: Any,
        *,
        on_gpu: bool = False,
        worker_class: type | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """``owner``: actor handle that ranks report to, and without which they end themselves.

        ``on_change`` is called, from a thread of Ray's, when a worker is ready or a rank ends.
        """
        self._job = job
        self._owner = owner
        self._on_gpu = on_gpu
        self._worker_class = worker_class
        self._seats: list[Seat] = []
        self._ranks: list[_Worker] = []
        self._standby: list[_Worker] = []
        self._ends: dict[int, RankEnd] = {}
        self._on_change = on_change
        self._settled: set[Any] = set()
        """References whose answer is here. Ray tells of them: asking it fifty times a second
        cost a supervisor more than all its records did."""

    def start(self, seats: Sequence[Seat]) -> None:
        """A worker a slot: a standby one, the job's or the node's, or else a new one."""
        self._ends = {}
        self._settled.clear()
        self._seats = [seat for seat in seats for _ in range(seat.slots)]
        self._standby = _living(self._standby)
        self._ranks = [self._claim(seat.node_id) or self._create(seat) for seat in self._seats]
        for worker in self._ranks:
            self._follow(worker.ready)

    def ready(self) -> bool:
        """Whether all have done their imports; notes who they are."""
        import ray

        for worker in self._ranks:
            if worker.info is None and worker.ready in self._settled:
                with contextlib.suppress(Exception):  # ``ended`` tells what it was
                    worker.info = ray.get(worker.ready)
        return all(worker.info is not None for worker in self._ranks)

    def master(self) -> tuple[str, int]:
        """Address of rank 0's node, and a port that was free there a moment ago."""
        seat = self._seats[0]
        return seat.node_ip, self._on_node(seat.node_id, free_port, seat.node_ip)

    def run(self, assignments: Sequence[Assignment]) -> None:
        """Start the loops; each rank gets its node's keeper."""
        keepers = {seat.keeper: _actor(seat.keeper) for seat in self._seats}
        for worker, seat, assignment in zip(self._ranks, self._seats, assignments, strict=True):
            worker.run = worker.actor.run.remote(assignment, self._owner, keepers[seat.keeper])
            self._follow(worker.run)

    def ended(self) -> tuple[RankEnd, ...]:
        """Ranks whose loop, or whose process, has ended."""
        for rank, worker in enumerate(self._ranks):
            reference = worker.run if worker.run is not None else worker.ready
            if rank not in self._ends and reference in self._settled:
                end = _end(rank, reference, worker)
                if end is not None:
                    self._ends[rank] = end
        return tuple(self._ends[rank] for rank in sorted(self._ends))

    def post(self, command: Command) -> None:
        """To every rank; a rank that is gone shows in ``ended``."""
        for worker in reversed(self._ranks):
            worker.actor.post.remote(command)

    def kill(self) -> None:
        """End the attempt's ranks and wait until their processes are gone."""
        self._end_all(self._ranks)
        self._ranks = []

    def fill_standby(self) -> None:
        """One idle worker a rank, on the node where it may be needed."""
        wanted = [seat.node_id for seat in self._seats]
        keep: list[_Worker] = []
        for worker in _living(self._standby):
            if worker.node_id in wanted:
                wanted.remove(worker.node_id)
                keep.append(worker)
            else:
                _kill(worker)
        seats = {seat.node_id: seat for seat in self._seats}
        self._standby = keep + [self._create(seats[node_id]) for node_id in wanted]

    def copies(self) -> list[SnapshotKey]:
        """What the keepers hold; one that does not answer holds nothing."""
        import ray

        keys: list[SnapshotKey] = []
        for name in dict.fromkeys(seat.keeper for seat in self._seats):
            keeper = _actor(name)
            if keeper is None:
                continue
            try:
                keys += ray.get(keeper.keys.remote(self._job), timeout=ANSWER_S)
            except ray.exceptions.RayError as error:
                logger.warning("keeper %s does not answer: %s", name, error)
        return keys

    def close(self) -> None:
        """End ranks and standby workers."""
        self._end_all([*self._ranks, *self._standby])
        self._ranks, self._standby = [], []

    def _follow(self, reference: Any) -> None:
        """Note when the reference has its answer."""

        def settled(_: object) -> None:
            self._settled.add(reference)
            self._on_change()

        reference.future().add_done_callback(settled)

    def _claim(self, node_id: str) -> _Worker | None:
        for worker in self._standby:
            if worker.node_id == node_id:
                self._standby.remove(worker)
                return worker
        actor = standby.claim(node_id, self._owner)
        return None if actor is None else _Worker(actor, node_id, actor.ready.remote())

    def _create(self, seat: Seat) -> _Worker:
        actor = standby.create_worker(
            f"octavo-worker-{uuid.uuid4().hex}",
            seat.node_id,
            self._owner,
            on_gpu=self._on_gpu,
            worker_class=self._worker_class,
        )
        return _Worker(actor, seat.node_id, actor.ready.remote())

    def _end_all(self, workers: Sequence[_Worker]) -> None:
        import ray

        pids: dict[str, list[int]] = {}
        for worker in workers:
            if (info := _info(worker)) is not None:
                pids.setdefault(worker.node_id, []).append(info.pid)
            _kill(worker)
        for node_id, numbers in pids.items():
            try:
                left = self._on_node(node_id, end_processes, numbers)
            except ray.exceptions.RayError as error:
                # The node is gone, and its processes with it.
                logger.warning("node %s does not answer: %s", node_id[:8], error)
                continue
            if left:
                logger.error("processes %s on node %s do not end", left, node_id[:8])

    def _on_node(self, node_id: str, call: Callable[..., Any], *args: Any) -> Any:
        """Call on that node; here, when that is where we are."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if ray.get_runtime_context().get_node_id() == node_id:
            return call(*args)
        place = NodeAffinitySchedulingStrategy(node_id, soft=False)
        task = ray.remote(call).options(num_cpus=0, scheduling_strategy=place).remote(*args)
        return ray.get(task, timeout=ANSWER_S + GONE_S)


def free_port(address: str) -> int:
    """A TCP port that nobody listens on at ``address``."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        port: int = listener.getsockname()[1]
        return port


def end_processes(pids: Sequence[int]) -> list[int]:
    """Wait for worker processes of this node to disappear, with SIGKILL's help; who is left."""
    started = time.monotonic()
    left = [pid for pid in pids if _runs(pid)]
    while left and time.monotonic() - started < GONE_S:
        if time.monotonic() - started > TERM_S:
            for pid in filter(_is_ray_worker, left):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
        left = [pid for pid in left if _runs(pid)]
    return left


def _runs(pid: int) -> bool:
    """Whether there is a process of that number that has not ended."""
    import psutil

    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _is_ray_worker(pid: int) -> bool:
    """Whether the number is still a Ray worker's: it may be another process' by now."""
    import psutil

    try:
        return any(part.startswith("ray::") for part in psutil.Process(pid).cmdline()[:1])
    except psutil.Error:
        return False


def _actor(name: str) -> Any:
    """The actor of that name, None if there is none."""
    import ray

    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _kill(worker: _Worker) -> None:
    import ray

    with contextlib.suppress(Exception):  # it may be gone already
        ray.kill(worker.actor, no_restart=True)


def _info(worker: _Worker) -> Any:
    """Who the worker is; None while it hasn't said so."""
    import ray

    if worker.info is None and ray.wait([worker.ready], timeout=0)[0]:
        with contextlib.suppress(Exception):
            worker.info = ray.get(worker.ready)
    return worker.info


def _living(workers: Sequence[_Worker]) -> list[_Worker]:
    """Idle workers without those that died; one that still imports counts as living."""
    import ray

    asked = {}
    for worker in workers:
        if ray.wait([worker.ready], timeout=0)[0]:
            # Ray tells of an idle actor's death only to who calls it.
            asked[worker.actor.ready.remote()] = worker
    done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=PING_S) if asked else ([], [])
    dead = []
    for reference in done:
        try:
            asked[reference].info = ray.get(reference)
        except ray.exceptions.RayError:
            dead.append(asked[reference])
    return [worker for worker in workers if worker not in dead]


def _end(rank: int, reference: Any, worker: _Worker) -> RankEnd | None:
    """How a rank ended; None when the reference only says that it is ready."""
    import ray

    try:
        result = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, BaseException) else error
        return RankEnd(rank, "raised", error=_line(cause), cause=cause)
    except ray.exceptions.RayError as error:
        where = f"process {worker.info.pid} on {worker.info.hostname}: " if worker.info else ""
        return RankEnd(rank, "lost", error=f"{where}{_line(error)}", cause=error)
    return RankEnd(rank, "done", result) if worker.run is not None else None


def _line(error: BaseException) -> str:
    """The error in one line; without the rank, so that equal errors of many ranks are equal."""
    from launch.worker import RankFailedError

    if isinstance(error, RankFailedError):
        return error.cause.strip().splitlines()[0]
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}".rstrip(": ")
