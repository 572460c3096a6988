"""One rank's process: a Ray actor that imports ahead of time and then runs one attempt.

A *standby* is a worker whose imports are done and that has no rank yet; it builds an
engine in under a second. Promises: a worker whose owner (supervisor) is dead ends itself, at once
if it has a rank, and without one after ``ORPHAN_S``, in which the next supervisor may take it over;
an error of the loop is the error of ``run``, with the rank in its message; what the rank prints and
logs is in ``<job_dir>/logs/attempt-N/rank-R.log``, as ``launch.rank_log`` writes it. A worker runs
one attempt: DeepSpeed and torch.distributed leave traces in a process, so the next attempt gets
another one.

On GPU the device is the local rank's and collectives go over NCCL; written after the
documentation and not tried, for want of a GPU.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from launch.background import run_politely
from launch.commands import Assignment, Command, RankResult, Report
from launch.data import DataAwayError
from launch.delivery import Delivery
from launch.imports import import_ahead
from launch.keeper_clients import NO_KEEPERS, KeeperHandles, stores_of
from launch.lifeline import depend_on
from launch.mailbox import CommandRefusedError, Mailbox
from launch.rank_log import rank_log
from launch.report_tree import through
from launch.snapshots import SnapshotError
from launch.stacks import write_stacks_at_signal
from monitoring.secrets import secrets_of, without

WATCH_INTERVAL_S = 2.0
IDLE_WATCH_INTERVAL_S = 10.0
"""Of a worker without a rank, which is in nobody's way."""
OWNER_ABSENCE_S = 60.0
"""How long an owner may be unreachable, without being known to be dead."""
ORPHAN_S = 15.0
"""How long an idle worker waits for the next supervisor of its job."""
ADOPTION_POLL_S = 0.2
REPORT_TIMEOUT_S = 30.0

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class RankFailedError(RuntimeError):
    """A rank's loop raised; the message has the rank, its step and what was raised."""

    def __init__(
        self,
        rank: int,
        step: int,
        cause: str,
        outside: bool = False,
        absent: tuple[int, ...] = (),
    ) -> None:
        """``outside``: it lies in what surrounds the job, and may pass; ``absent``: ranks that it
        waited for in vain."""
        super().__init__(f"rank {rank}, step {step}: {cause}")
        self.rank, self.step, self.cause = rank, step, cause
        self.outside, self.absent = outside, absent

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self.rank, self.step, self.cause, self.outside, self.absent))


def failure_of(
    rank: int, step: int, error: BaseException, environ: Mapping[str, str]
) -> RankFailedError:
    """What is told of an ``error`` of a rank's loop: its events, its incident and W&B have it, so
    no secret of the rank's ``environ`` may be in it."""
    cause = without(f"{type(error).__name__}: {error}", secrets_of(environ))
    outside = isinstance(error, OSError | DataAwayError)
    # Of a JoinError, whose module would bring torch along.
    absent = getattr(error, "absent", ())
    return RankFailedError(rank, step, cause, outside, absent)


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Where a worker lives."""

    node_id: str
    """Ray's node id, hex."""
    node_ip: str
    hostname: str
    pid: int


class Worker:
    """The actor's class; create it with ``num_cpus=0`` and ``max_concurrency`` of 4 or more."""

    def __init__(self, owner: Any = None) -> None:
        """Imports all that a rank needs; without ``owner`` nobody is watched before ``run``."""
        self._mailbox: Mailbox | None = None
        self._watched: Any = None
        self._claiming = threading.Lock()
        self._claimed = False
        self._meeting: Any = None
        write_stacks_at_signal()
        run_politely(import_ahead)
        if owner is not None:
            self._watch(owner)

    def ready(self) -> WorkerInfo:
        """Answers once the imports are done."""
        import ray

        context = ray.get_runtime_context()
        node_ip = ray.util.get_node_ip_address()
        return WorkerInfo(context.get_node_id(), node_ip, socket.gethostname(), os.getpid())

    def ping(self) -> bool:
        """True."""
        return True

    def call(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Run a function of ours in this process, beside the loop if there is one."""
        return function(*arguments)

    def idle(self) -> bool:
        """Whether nobody has claimed this worker or run on it."""
        return not self._claimed and self._mailbox is None

    def claim(self, owner: Any) -> bool:
        """Become ``owner``'s, who is watched from now on; False if somebody was first."""
        with self._claiming:
            if not self.idle():
                return False
            self._claimed = True
        self._watch(owner)
        return True

    def adopt(self, owner: Any) -> bool:
        """Become ``owner``'s, the job's next supervisor; False if there is or was a rank here."""
        with self._claiming:
            if self._mailbox is not None:
                return False
            self._claimed = True
        self._watch(owner)
        return True

    def host_meeting(self, address: str) -> int:
        """Be where an attempt's ranks meet, as its rank 0: the port, at ``address`` of this node.
        It is the same one each time."""
        from launch.process_group import host_store

        with self._claiming:
            if self._meeting is None:
                self._meeting = host_store(address)
        port: int = self._meeting.port
        return port

    def run(
        self,
        assignment: Assignment,
        supervisor: Any,
        keepers: KeeperHandles = NO_KEEPERS,
        lifeline: tuple[str, int] | None = None,
        relay: Any = None,
    ) -> RankResult:
        """Run the whole attempt of one rank; ``lifeline``: the supervisor's; ``relay``: what its
        node's ranks report to, if not to the supervisor itself.

        Raises SnapshotError when the state to start from can't be used, RankFailedError
        for everything else that the loop raised.
        """
        import ray

        from launch.training import TrainingLoop

        if self._mailbox is not None:
            raise RuntimeError("this worker has run an attempt already")
        self._mailbox = Mailbox(assignment.attempt)
        self._watch(supervisor)
        if lifeline is not None:
            depend_on(lifeline, lambda: _exit("the supervisor's process is gone"))
        os.environ.update(assignment.envs)
        _bind_gloo(ray.util.get_node_ip_address())

        def deliver(batch: Sequence[Report]) -> None:
            try:
                ray.get(supervisor.report.remote(list(batch)), timeout=REPORT_TIMEOUT_S)
            except ray.exceptions.ActorDiedError as error:
                # Told with the next step, long before the watch would see it: what the ranks
                # train from here on nobody would record.
                _exit(f"the supervisor is gone: {type(error).__name__}")

        relayed = None if relay is None else through(relay, assignment.attempt)
        outbox = Delivery(deliver, relayed)
        with rank_log(assignment.log_path, assignment.attempt, assignment.rank) as log:
            stores = stores_of(keepers)
            loop = TrainingLoop(assignment, self._mailbox, outbox, stores, self._meeting)
            if log is not None:
                log.step = lambda: loop.step_of_log
            try:
                return loop.run()
            except SnapshotError:
                logger.exception("the attempt ends at its start")
                raise
            except Exception as error:
                logger.exception("the attempt ends at step %d", loop.step)
                # Without what it came from: Ray prints that, and the rank's log has it.
                raise failure_of(assignment.rank, loop.step, error, os.environ) from None

    def post(self, command: Command) -> None:
        """Leave a command for the loop. Raises CommandRefusedError."""
        if self._mailbox is None:
            raise CommandRefusedError(f"command {command.number}: this worker has no rank yet")
        self._mailbox.post(command)

    def _watch(self, owner: Any) -> None:
        """End this process when ``owner`` has died; only the last one given is watched."""
        first = self._watched is None
        self._watched = owner
        if first:
            threading.Thread(target=self._keep_watch, name="watchdog", daemon=True).start()

    def _keep_watch(self) -> None:
        import ray

        seen = time.monotonic()
        while True:
            owner = self._watched
            try:
                ray.get(owner.ping.remote(), timeout=OWNER_ABSENCE_S)
                seen = time.monotonic()
            except (ray.exceptions.ActorUnavailableError, ray.exceptions.GetTimeoutError):
                # Out of reach or overworked is not dead, for a while.
                if time.monotonic() - seen > OWNER_ABSENCE_S:
                    self._end_unless_adopted(owner, "has been out of reach for too long")
                    seen = time.monotonic()
            except ray.exceptions.RayError as error:
                self._end_unless_adopted(owner, f"is gone: {type(error).__name__}")
            time.sleep(IDLE_WATCH_INTERVAL_S if self._mailbox is None else WATCH_INTERVAL_S)

    def _end_unless_adopted(self, owner: Any, why: str) -> None:
        """End this process, which has lost ``owner``, unless it is, or soon gets, another's."""
        deadline = time.monotonic() + ORPHAN_S
        while self._watched is owner:
            if self._mailbox is not None or time.monotonic() > deadline:
                _exit(f"the owner {why}")
            time.sleep(ADOPTION_POLL_S)


def _exit(why: str) -> None:
    """End at once: the loop's thread may hang in a collective, and nothing of it is needed."""
    logger.error("worker %d ends: %s", os.getpid(), why)
    with suppress(Exception):
        sys.stderr.flush()
    os._exit(1)


def _bind_gloo(node_ip: str) -> None:
    """Make gloo use the interface that Ray reaches this node by, not the hostname's."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == node_ip for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
