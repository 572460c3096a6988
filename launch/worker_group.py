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
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch import standby
from launch.commands import Assignment, Command
from launch.held_copies import HeldCopies
from launch.lifeline import Lifeline
from launch.node_calls import Answers, Call, call_all, named_actor
from launch.process_end import GONE_S, end_processes
from launch.rank_errors import in_one_line
from launch.rank_group import NodeSilentError, RankEnd, Seat
from launch.report_tree import ReportTree
from launch.snapshots import SnapshotKey
from launch.stacks import TAKE_S, Stack, stacks_of

logger = logging.getLogger(__name__)

ANSWER_S = 10.0
"""Seconds that a keeper or a node may take to answer."""


@dataclass(eq=False)
class _Worker:
    """One actor; ``run`` is set once it has a rank."""

    actor: Any
    node_id: str
    ready: Any
    """Reference to its WorkerInfo."""
    info: Any = None
    run: Any = None
    log: str = ""
    """Where its output goes, once it has a rank."""


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
        import ray

        self._job = job
        self._owner = owner
        self._on_gpu = on_gpu
        self._worker_class = worker_class
        self._seats: list[Seat] = []
        self._ranks: list[_Worker] = []
        self._standby: list[_Worker] = []
        self._copies = HeldCopies(job)
        self._left: dict[str, list[int]] = {}
        """Processes on nodes that didn't answer when they were to end them."""
        self._clearing: dict[Any, str] = {}
        """Nodes that still have to say that no rank is left of a supervisor before this one."""
        self._clear_until = 0.0
        self._keepers: dict[str, str] = {}
        """Each node's keeper, of all nodes that this group has been on."""
        self._ends: dict[int, RankEnd] = {}
        self._on_change = on_change
        self._lifeline = Lifeline(ray.util.get_node_ip_address())
        self._tree = ReportTree(owner)
        self._settled: set[Any] = set()
        """References whose answer is here. Ray tells of them: asking it fifty times a second
        cost a supervisor more than all its records did."""

    def start(self, seats: Sequence[Seat]) -> None:
        """A worker a slot: a standby one, the job's or the node's, or else a new one."""
        self._ends = {}
        self._settled.clear()
        if not self._keepers:
            self._copies.begin(seats)
            self._end_strangers(seats)
            self._adopt_orphans()
        self._seats = [seat for seat in seats for _ in range(seat.slots)]
        self._keepers |= {seat.node_id: seat.keeper for seat in seats}
        idle = self._claimed(Counter(seat.node_id for seat in self._seats))
        self._ranks = [
            idle[seat.node_id].pop(0) if idle[seat.node_id] else self._create(seat)
            for seat in self._seats
        ]
        for worker in self._ranks:
            self._follow(worker.ready)

    def ready(self) -> bool:
        """Whether all have done their imports; notes who they are."""
        import ray

        for worker in self._ranks:
            if worker.info is None and worker.ready in self._settled:
                with contextlib.suppress(Exception):  # ``ended`` tells what it was
                    worker.info = ray.get(worker.ready)
        return self._cleared() and all(worker.info is not None for worker in self._ranks)

    def master(self) -> tuple[str, int]:
        """Address of rank 0's node, and the port at which rank 0 waits for the others from now on.

        Raises NodeSilentError when it doesn't answer.
        """
        import ray

        address = self._seats[0].node_ip
        asked = self._ranks[0].actor.host_meeting.remote(address)
        try:
            return address, ray.get(asked, timeout=ANSWER_S)
        except ray.exceptions.RayError as error:
            raise NodeSilentError(
                address, f"rank 0 does not answer: {in_one_line(error)}"
            ) from error

    def run(self, assignments: Sequence[Assignment]) -> None:
        """Start the loops; each rank gets its node's keeper, its partners', and its sources."""
        self._enlist()
        relays = self._relays(assignments[0])
        handles = self._copies.handles(self._seats, assignments)
        for worker, seat, assignment, keepers in zip(
            self._ranks, self._seats, assignments, handles, strict=True
        ):
            worker.run = worker.actor.run.remote(
                assignment,
                self._owner,
                keepers,
                self._lifeline.where,
                relays.get(seat.node_id),
            )
            worker.log = str(assignment.log_path)
            self._follow(worker.run)

    def _relays(self, assignment: Assignment) -> dict[str, Any]:
        """Whom the ranks of each node report to, where that isn't the supervisor."""
        if assignment.world_size < assignment.run.merge_reports_from:
            return {}
        nodes = Counter(seat.node_id for seat in self._seats)
        return self._tree.begin(assignment.attempt, list(nodes.items()))

    def _enlist(self) -> None:
        """Let each node's keeper know the processes of its ranks, which may outlive us."""
        pids: dict[str, list[int]] = {}
        for worker, seat in zip(self._ranks, self._seats, strict=True):
            pids.setdefault(seat.keeper, []).append(worker.info.pid)
        for name, mine in pids.items():
            if (keeper := named_actor(name)) is not None:
                keeper.enlist.remote(mine)

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
        self._lifeline.forget()

    def one_a_node(self) -> dict[str, Any]:
        """A worker of each node of the attempt, by node id; its imports are done once ``ready``."""
        return {worker.node_id: worker.actor for worker in reversed(self._ranks)}

    def stacks(self) -> dict[int, Stack]:
        """What each rank's process is doing, taken on all nodes at once."""
        nodes: dict[str, list[int]] = {}
        found: dict[int, Stack] = {}
        for rank, worker in enumerate(self._ranks):
            if _info(worker) is None:
                found[rank] = Stack("none", why="it has not said that it is ready", ready=False)
            else:
                nodes.setdefault(worker.node_id, []).append(rank)
        pids = {rank: self._ranks[rank].info.pid for ranks in nodes.values() for rank in ranks}
        calls = {
            node_id: (
                stacks_of,
                [pids[rank] for rank in ranks],
                [self._ranks[rank].log for rank in ranks],
            )
            for node_id, ranks in nodes.items()
        }
        answers = self._on_nodes(calls, TAKE_S)
        for node_id, ranks in nodes.items():
            taken = answers.values.get(node_id, {})
            why = f"its node does not answer: {answers.silent.get(node_id, '')}"
            found |= {r: taken.get(pids[r], Stack("none", why=why)) for r in ranks}
        return found

    def fill_standby(self, spares: Sequence[Seat] = ()) -> None:
        """One idle worker a rank, and a slot of each spare, on the node where it may be needed."""
        seated = [*self._seats, *(seat for seat in spares for _ in range(seat.slots))]
        wanted = Counter(seat.node_id for seat in seated)
        keep: list[_Worker] = []
        for worker in _living(self._standby):
            if wanted[worker.node_id] > 0:
                wanted[worker.node_id] -= 1
                keep.append(worker)
            else:
                _kill(worker)
        seats = {seat.node_id: seat for seat in seated}
        self._standby = keep + [self._create(seats[node_id]) for node_id in wanted.elements()]

    def copies(self) -> list[SnapshotKey]:
        """What the keepers hold, each copy once; one that does not answer holds nothing.

        Those of nodes that the job has left are asked too, under whichever supervisor it did: they
        stay until it trains again.
        """
        return self._copies.ask([*(s.keeper for s in self._seats), *self._keepers.values()])

    def silent(self) -> Sequence[str]:
        """Keepers that live, as far as is known, and did not answer ``copies``."""
        return self._copies.silent

    def memory(self) -> dict[str, int]:
        """Bytes that each node's keeper held when ``copies`` last asked, by keeper."""
        return self._copies.memory()

    def settle(self, replicas: int) -> None:
        """Every copy is where it belongs: keepers forget ranks that are no longer theirs."""
        self._copies.settle(self._seats, replicas)

    def close(self) -> None:
        """End ranks and standby workers; there can be no further attempt."""
        self._end_all([*self._ranks, *self._standby])
        self._ranks, self._standby = [], []
        self._tree.close()
        self._lifeline.close()

    def _follow(self, reference: Any) -> None:
        """Note when the reference has its answer."""

        def settled(_: object) -> None:
            self._settled.add(reference)
            self._on_change()

        reference.future().add_done_callback(settled)

    def _claimed(self, wanted: Mapping[str, int]) -> dict[str, list[_Worker]]:
        """Idle workers by node, as many as are wanted at most: the job's own, then the node's."""
        found: dict[str, list[_Worker]] = {node_id: [] for node_id in wanted}
        left = []
        for worker in _living(self._standby):
            mine = found.get(worker.node_id)
            if mine is not None and len(mine) < wanted[worker.node_id]:
                mine.append(worker)
            else:
                left.append(worker)
        self._standby = left
        short = {n: count - len(found[n]) for n, count in wanted.items() if count > len(found[n])}
        for node_id, actors in standby.claim(short, self._owner).items():
            found[node_id] += [_Worker(a, node_id, a.ready.remote()) for a in actors]
        return found

    def _adopt_orphans(self) -> None:
        """Take over the idle workers of a supervisor before this one."""
        import ray

        asked = {a.ready.remote(): a for a in standby.orphans(self._job, self._owner)}
        if asked:
            ray.wait(list(asked), num_returns=len(asked), timeout=standby.PING_S)
        for reference, actor in asked.items():
            with contextlib.suppress(Exception):  # it died this moment
                info = ray.get(reference, timeout=0)
                self._standby.append(_Worker(actor, info.node_id, reference, info))

    def _create(self, seat: Seat) -> _Worker:
        actor = standby.create_worker(
            f"{standby.job_prefix(self._job)}{uuid.uuid4().hex[:12]}",
            seat.node_id,
            self._owner,
            on_gpu=self._on_gpu,
            worker_class=self._worker_class,
        )
        return _Worker(actor, seat.node_id, actor.ready.remote())

    def _end_all(self, workers: Sequence[_Worker]) -> None:
        """On all nodes at once, and again where they were out of reach the last time."""
        pids, self._left = self._left, {}
        for worker in workers:
            if (info := _info(worker)) is not None:
                pids.setdefault(worker.node_id, []).append(info.pid)
            _kill(worker)
        calls = {node_id: (end_processes, numbers) for node_id, numbers in pids.items()}
        answers = self._on_nodes(calls, ANSWER_S + GONE_S)
        for node_id, left in answers.values.items():
            if left:
                logger.error("processes %s on node %s do not end", left, node_id[:8])
        living = _living_nodes() if answers.silent else set()
        for node_id, why in answers.silent.items():
            logger.warning("node %s does not answer: %s", node_id[:8], why)
            if node_id in living:
                # A dead node's processes are gone with it.
                self._left[node_id] = pids[node_id]

    def _end_strangers(self, seats: Sequence[Seat]) -> None:
        """End ranks of a supervisor before this one: those that are frozen don't end themselves."""
        for seat in seats:
            if (keeper := named_actor(seat.keeper)) is not None:
                reference = keeper.end_ranks.remote()
                self._clearing[reference] = seat.node_ip
                self._follow(reference)
        self._clear_until = time.monotonic() + ANSWER_S

    def _cleared(self) -> bool:
        """Whether no rank of a supervisor before this one is left, as far as can be known."""
        import ray

        for reference in [r for r in self._clearing if r in self._settled]:
            node_ip = self._clearing.pop(reference)
            try:
                if left := ray.get(reference):
                    logger.error("processes %s of an attempt before do not end", left)
            except ray.exceptions.RayError as error:
                logger.warning("node %s does not say whether ranks are left: %s", node_ip, error)
        if self._clearing and time.monotonic() > self._clear_until:
            logger.warning("nodes %s don't say whether ranks are left", [*self._clearing.values()])
            self._clearing = {}
        return not self._clearing

    def _on_nodes(self, calls: Mapping[str, tuple[Any, ...]], timeout_s: float) -> Answers:
        """Calls by node: a function, then its arguments."""
        made = []
        for node_id, (function, *arguments) in calls.items():
            keeper = self._keepers.get(node_id)
            handle = None if keeper is None else named_actor(keeper)
            made.append(Call(node_id, handle, function, tuple(arguments)))
        return call_all(made, timeout_s)


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
    done, _ = (
        ray.wait(list(asked), num_returns=len(asked), timeout=standby.PING_S) if asked else ([], [])
    )
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
        return RankEnd(rank, "raised", error=in_one_line(cause), cause=cause)
    except ray.exceptions.RayError as error:
        who = worker.info
        where = f"process {who.pid} on {who.hostname} ({who.node_ip}): " if who else ""
        return RankEnd(rank, "lost", error=f"{where}{in_one_line(error)}", cause=error)
    return RankEnd(rank, "done", result) if worker.run is not None else None


def _living_nodes() -> set[str]:
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}
