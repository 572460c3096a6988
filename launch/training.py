"""The training loop of one rank around its engine.

    result = TrainingLoop(assignment, mailbox, outbox, stores).run()

One step is: batch, drills, engine, agree, commands, snapshot, report. Promises: rolled
back or restarted, the loop reproduces the same losses to the bit when data and precision
are the same; a command takes effect on all ranks at the same step boundary; hashing,
shipping, writing and reporting are other threads' work. Ray-free: whoever runs it brings
an outbox and a store.

Control state (skip ledger, precision, dtype of the gradient exchange, learning-rate factor,
timeline) belongs to the supervisor: it comes with the assignment and changes by command only.
A rollback brings back tensors, counters and generators; the precision in force stays, changed
by the command, and so does the exchange's dtype.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from launch.checkpoint_writer import is_due, last_write_s
from launch.commands import (
    Assignment,
    BackendReport,
    Command,
    CopyFailed,
    DrillReport,
    ExchangeReport,
    RankResult,
    RestorePoint,
    RingReport,
    Rollback,
    RollbackReport,
    SetExchange,
    SetPrecision,
    Stop,
)
from launch.data import DataError, TokenStream, batch_of
from launch.drills import Drills, check_target
from launch.engine import engine_of
from launch.mailbox import Mailbox
from launch.process_group import agree, join, require_same
from launch.random_state import RandomState
from launch.reporter import Outbox, Reporter
from launch.restoring import Restorer
from launch.schedule import lr_at
from launch.shipping import Shipper
from launch.snapshot_ring import SnapshotRing
from launch.snapshot_room import kept_in_rings
from launch.snapshots import MismatchedSnapshotError, SnapshotKey
from launch.state_block import StateLayout, load_into
from launch.state_header import LAYOUT
from launch.step_reports import StepReports
from launch.stores import NO_STORES, Stores
from parallel.config import Precision
from parallel.exchange_choice import ExchangeChoice

if TYPE_CHECKING:
    from torch.distributed import TCPStore

logger = logging.getLogger(__name__)


class TrainingLoop:
    """One rank of one attempt; ``run`` is called once."""

    def __init__(
        self,
        assignment: Assignment,
        mailbox: Mailbox,
        outbox: Outbox,
        stores: Stores = NO_STORES,
        meeting: TCPStore | None = None,
    ) -> None:
        """``outbox`` is called by the loop's reporter thread, ``stores`` by its shipper;
        ``meeting``: where the ranks meet, if this is rank 0 and it is there already."""
        self._assignment = assignment
        self._run_config = assignment.run
        self._mailbox = mailbox
        self._stores = stores
        self._meeting = meeting
        self._reporter = Reporter(outbox)
        self._step = assignment.restore.step if assignment.restore else 0
        self._begun = False
        self._timeline = assignment.timeline
        self._ledger = frozenset(assignment.ledger)
        self._lr_scale = assignment.lr_scale
        self._command = 0
        self._stop: Stop | None = None
        self._threads: list[Shipper] = []

    @property
    def step(self) -> int:
        """The step that runs now or next."""
        return self._step

    @property
    def step_of_log(self) -> int | None:
        """What a line of the log is written in: the step that runs now; None before the first."""
        return self._step if self._begun else None

    def run(self) -> RankResult:
        """Train until the last step or a Stop; returns once a last checkpoint is written.

        Raises JoinError, SnapshotError when the state to start from can't be used, DataError,
        RanksDisagreeError, ValueError for a drill that the model has no place for, and what
        DeepSpeed raises. No collective is called on the way out.
        """
        try:
            self._prepare()
            self._begun = True
            while self._stop is None and self._step < self._run_config.training.steps:
                self._train_step()
            return self._finish()
        finally:
            self._reporter.close()
            for thread in self._threads:
                thread.close()

    def _train_step(self) -> None:
        started = time.perf_counter()
        step = self._step
        batch = batch_of(step, self._ledger)
        drills = self._drills.fire(step, timeline=self._timeline, batch=batch)
        lr = lr_at(step, self._run_config.training, self._lr_scale) * self._drills.lr_factor
        self._engine.scope.collect(self._step_reports.is_sampled(step))
        checksums = self._step_reports.checksums(step)
        own_s = time.perf_counter() - started
        result = self._engine.train_step(self._micro_batches(batch), lr)
        agreed = agree(
            self._world,
            self._mailbox.newest(),
            step,
            result.skipped,
            self._shipper.behind,
            self._shipper.writing,
        )
        together = time.perf_counter()
        measured = self._step_reports.measure(step, self._timeline, batch, lr, drills, result)
        self._step += 1
        restoring_s = self._apply(self._mailbox.take(agreed.command))
        # Where one rank skips a step all do, or partners and disk would hold steps of some ranks.
        self._snapshot_if_due(replicated=not agreed.behind, writes=not agreed.writing)
        ended = time.perf_counter()
        own_s += ended - together - restoring_s
        self._reporter.send(
            self._step_reports.report(
                measured,
                result,
                checksums=checksums,
                own_s=own_s,
                seconds=ended - started - restoring_s,
                command=self._command,
            )
        )

    def _prepare(self) -> None:
        """Everything before the first step; ranks meet here."""
        assignment, run = self._assignment, self._run_config
        started = time.perf_counter()
        self._world = join(assignment, self._meeting)
        self._stream = TokenStream(run.data, run.training.seq_len)
        require_same(self._world, self._stream.fingerprint, f"the data in {run.data.source}")
        self._engine = engine_of(run)
        check_target(run.drills, self._engine.faults)
        self._step_reports = StepReports(assignment, self._engine)
        self._announce_backend()
        self._layout = self._engine.layout.to_json()
        self._random = RandomState()
        self._tensors = {**self._engine.live_tensors(), **self._random.tensors}
        started_from = self._restore()
        self._engine.set_precision(assignment.precision)
        self._decide_exchange(started_from)
        meta_bytes = len(str(self._meta()))
        nbytes = StateLayout(self._tensors, meta_bytes).nbytes
        held = self._stores.held_nbytes
        keep = kept_in_rings(assignment, self._world, nbytes, held, started_from)
        if assignment.rank == 0 and keep < run.snapshots.keep:
            place = (assignment.attempt, self._timeline, 0, self._step)
            self._reporter.send(RingReport(*place, keep))
        self._ring = SnapshotRing(keep, self._tensors, meta_bytes)
        self._shipper = Shipper(
            self._ring,
            self._stores.own,
            Path(assignment.job_dir),
            self._reporter.send,
            self._stores.partners,
        )
        self._threads.append(self._shipper)
        self._drills = Drills(
            run.drills,
            rank=assignment.rank,
            fired=assignment.fired_drills,
            target=self._engine.faults,
            announce=self._announce_drill,
        )
        self._snapshot(to_disk=self._ends_unwritten(started_from), replicated=True)
        seconds = time.perf_counter() - started
        logger.info(
            "attempt %d: ready for step %d after %.2f s", assignment.attempt, self._step, seconds
        )

    def _micro_batches(self, batch: int) -> Any:
        training, parallelism = self._run_config.training, self._run_config.parallelism
        assert parallelism.data is not None
        assert training.train_micro_batch_size_per_gpu is not None
        assert training.gradient_accumulation_steps is not None
        return self._stream.micro_batches(
            batch,
            self._engine.coordinate.data,
            parallelism.data,
            training.train_micro_batch_size_per_gpu,
            training.gradient_accumulation_steps,
            self._drills.change_of(batch),
        )

    def _apply(self, commands: list[Command]) -> float:
        """Carry out what was agreed on; returns the seconds that restores took."""
        restoring_s = 0.0
        for command in commands:
            self._command = command.number
            order = command.order
            logger.info("command %d before step %d: %s", command.number, self._step, order)
            if isinstance(order, Rollback):
                restoring_s += self._roll_back(order)
            elif isinstance(order, SetPrecision):
                self._engine.set_precision(order.precision)
            elif isinstance(order, SetExchange):
                if order.dtype == "auto":
                    self._tell_exchange(self._engine.choose_exchange(self._world))
                else:
                    self._engine.set_exchange(order.dtype)
            else:
                self._stop = order
        return restoring_s

    def _roll_back(self, order: Rollback) -> float:
        started = time.perf_counter()
        # With returns that wait: they are orders of this timeline, which the restore doesn't know.
        in_force: dict[str, Precision] = self._engine.scope.ordered()
        exchange = self._engine.exchange_dtype
        self._shipper.drop_after(order.to_step)
        meta = self._ring.restore(order.to_step, self._assignment.rank)
        self._engine.load_meta(meta["engine"])
        self._random.restore()
        self._engine.set_precision({**in_force, **(order.precision or {})})
        self._engine.set_exchange(exchange)
        self._step = order.to_step
        self._timeline = order.timeline
        self._ledger |= set(order.skip_batches)
        if order.lr_scale is not None:
            self._lr_scale = order.lr_scale
        seconds = time.perf_counter() - started
        self._reporter.send(
            RollbackReport(
                self._assignment.attempt,
                self._timeline,
                self._assignment.rank,
                self._step,
                time.time(),
                seconds,
            )
        )
        return seconds

    def _snapshot_if_due(self, *, replicated: bool, writes: bool) -> None:
        run = self._run_config
        stopping = self._stop is not None and self._stop.checkpoint
        if self._step in self._ring.steps() and not stopping:
            return  # just rolled back to it
        due = is_due(
            self._step,
            every=run.checkpoint.every,
            last=run.training.steps,
            stopping=stopping,
            writing=not writes,
        )
        if due == "left out":
            self._tell_left_out()
        if due == "write" or self._step % run.snapshots.every == 0:
            self._snapshot(to_disk=due == "write", replicated=replicated)

    def _tell_left_out(self) -> None:
        """Where the disk takes longer than the interval, some checkpoints are left out."""
        a, every = self._assignment, self._run_config.checkpoint.every
        why = (
            f"the one before it is still being written, and the disk takes longer than "
            f"checkpoint.every = {every} steps; it is left out"
        )
        logger.warning("no checkpoint of step %d: %s", self._step, why)
        if a.rank == 0:
            place = (a.attempt, self._timeline, a.rank, self._step)
            self._reporter.send(CopyFailed(*place, "disk", why, left_out=True))

    def _snapshot(self, *, to_disk: bool, replicated: bool) -> None:
        self._random.capture()
        slot = self._ring.take(self._key(), self._meta())
        self._shipper.ship(slot, to_disk=to_disk, replicated=replicated)

    def _key(self) -> SnapshotKey:
        a = self._assignment
        return SnapshotKey(a.job, a.attempt, self._timeline, a.rank, self._step)

    def _meta(self) -> dict[str, Any]:
        return {
            "step": self._step,
            "timeline": self._timeline,
            "ledger": sorted(self._ledger),
            "lr_scale": self._lr_scale,
            "data": self._stream.fingerprint,
            "engine": self._engine.meta(),
            LAYOUT: self._layout,
        }

    def _restore(self) -> RestorePoint | None:
        """Load the state that the attempt starts from, or raise a SnapshotError; where it was.

        The copy that it came from is let go of: beside it there may be no room for snapshots.
        """
        a = self._assignment
        found = Restorer(
            a,
            self._stores.sources,
            self._world,
            self._reporter.send,
            self._engine.layout,
            self._tensors,
        ).find()
        if found is None:
            return None
        if not self._stream.is_of(found.meta["data"]):
            raise DataError(
                f"{self._run_config.data.source} has other files or sizes than when the state "
                f"of step {found.point.step} was saved: the same batches would be other text"
            )
        try:
            load_into(self._tensors, found.tensors)
            self._engine.load_meta(found.meta["engine"])
        except ValueError as error:
            point = found.point
            raise MismatchedSnapshotError(a.rank, point.step, point.tier, str(error)) from error
        self._random.restore()
        self._step = found.point.step
        return found.point

    def _ends_unwritten(self, started_from: RestorePoint | None) -> bool:
        """Whether no step follows, so that nothing else would write the job's last checkpoint: the
        attempt before was lost while it did."""
        if started_from is None or self._step < self._run_config.training.steps:
            return False
        return Path(self._assignment.job_dir) not in Path(started_from.path).parents

    def _decide_exchange(self, started_from: RestorePoint | None) -> None:
        """Take the job's decision; under ``auto``, where there is none yet, make it.

        A state that is restored was trained with the decision, stored or not.
        """
        a = self._assignment
        if a.exchange is not None:
            self._engine.set_exchange(a.exchange)
            return
        if self._run_config.communication_data_type != "auto":
            return
        if started_from is None:
            choice = self._engine.choose_exchange(self._world)
        else:
            was = f"so it was in the state of step {self._step}"
            choice = ExchangeChoice(self._engine.exchange_dtype, was)
        self._tell_exchange(choice)

    def _tell_exchange(self, choice: ExchangeChoice) -> None:
        a = self._assignment
        logger.info("attempt %d: gradients in %s: %s", a.attempt, choice.dtype, choice.reason)
        if a.rank == 0:
            told = (a.attempt, self._timeline, a.rank, self._step, time.time())
            self._reporter.send(ExchangeReport(*told, choice.dtype, choice.reason))

    def _announce_drill(self, drill: int, step: int) -> bool:
        a = self._assignment
        self._reporter.send(
            DrillReport(a.attempt, self._timeline, a.rank, step, time.time(), drill)
        )
        return self._reporter.flush()

    def _announce_backend(self) -> None:
        a, choice = self._assignment, self._engine.backend
        logger.info("attempt %d: linears run on %s", a.attempt, choice)
        if a.rank == 0:
            now = time.time()
            self._reporter.send(
                BackendReport(a.attempt, self._timeline, a.rank, self._step, now, choice)
            )

    def _finish(self) -> RankResult:
        """Wait for the last copies, then say how it ended."""
        import torch.distributed as dist

        reason: Literal["finished", "stopped"] = "finished" if self._stop is None else "stopped"
        detail = "" if self._stop is None else self._stop.reason
        nbytes = self._ring.layout.nbytes * self._assignment.world_size
        patience_s = last_write_s(nbytes, self._shipper.longest_write_s)
        if not self._shipper.wait(patience_s):
            detail = (
                f"copies of step {self._step} were still on their way {patience_s:.0f} s after it"
            )
        if (error := self._shipper.disk_error(self._step)) is not None:
            detail = f"no checkpoint of step {self._step}: {error}"
        self._reporter.close()
        self._reporter.raise_failure()
        dist.destroy_process_group()
        return RankResult(self._assignment.rank, self._step, reason, detail, self._command)
