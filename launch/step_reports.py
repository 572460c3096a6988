"""What a rank measures of a step, and the report that comes of it.

    reports = StepReports(assignment, engine)
    measured = reports.measure(step, timeline, batch, lr, drills, result)
    reporter.send(reports.report(measured, result, own_s=…, seconds=…, command=…))

Promises: nothing here makes the step wait for its device: what is measured stays there, and the
report is a function for the reporter's thread, which reads it; what is measured is of the step
before anything else changes, whatever commands follow; per-tensor statistics and checksums are
taken on the same steps on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from launch.commands import Assignment, RankReport
from parallel.engine import Engine, StepResult


class StepReports:
    """The reports of one rank's steps in one attempt."""

    def __init__(self, assignment: Assignment, engine: Engine) -> None:
        self._attempt = assignment.attempt
        self._rank = assignment.rank
        self._statistics_every = assignment.run.fp8.statistics_every
        self._compared_every = assignment.run.replica_check_every
        training = assignment.run.training
        self._tokens = (training.train_batch_size or 0) * training.seq_len
        self._engine = engine
        self._replica_check = engine.replica_check()

    def is_sampled(self, step: int) -> bool:
        """Whether per-tensor statistics are taken of ``step``: of the last of every n.

        Amax is then the largest of all n steps, counters are that step's.
        """
        return (step + 1) % self._statistics_every == 0

    def checksums(self, step: int) -> Tensor | None:
        """Of this rank's parameters before ``step``; None where they aren't compared with its
        replicas' then."""
        every = self._compared_every
        compared = every > 0 and step % every == 0 and len(self._replica_check.replicas) > 1
        return self._replica_check.sums() if compared else None

    def measure(
        self,
        step: int,
        timeline: int,
        batch: int,
        lr: float,
        drills: tuple[int, ...],
        result: StepResult,
    ) -> dict[str, Any]:
        """What must be taken before anything else changes; device values stay there."""
        scope = self._engine.scope
        names, statistics = ((), None) if not self.is_sampled(step) else scope.statistics()
        in_bf16 = [name for name, p in scope.precision().items() if p == "bf16"]
        return {
            "attempt": self._attempt,
            "timeline": timeline,
            "rank": self._rank,
            "step": step,
            "time": time.time(),
            "batch": batch,
            "lr": lr,
            "skipped": result.skipped,
            "nonfinite_parameters": result.nonfinite_parameters,
            "comm": self._engine.take_exchange_statistics(),
            "computed": self._engine.take_compute_seconds(),
            "stats_names": names,
            "stats": statistics,
            "high_precision_layers": (*scope.fixed_layers, *in_bf16),
            "drills": drills,
        }

    def report(
        self,
        measured: dict[str, Any],
        result: StepResult,
        *,
        checksums: Tensor | None,
        own_s: float,
        seconds: float,
        command: int,
    ) -> Callable[[], RankReport]:
        """The report of what was ``measured``, to be made off the step's path.

        ``seconds``: what the step took; ``own_s``: of those, what the loop itself did without
        waiting for others; ``command``: the last one applied, after the step.
        """

        def made() -> RankReport:
            statistics = measured.pop("stats")
            compute_s = own_s + measured.pop("computed")()
            packed = b"" if statistics is None else statistics.cpu().numpy().astype("<f4").tobytes()
            return RankReport(
                **measured,
                stats=packed,
                loss=float(result.loss),
                grad_norm=result.grad_norm,
                nonfinite_loss=bool(result.nonfinite_loss),
                tokens=self._tokens,
                step_time_s=seconds,
                compute_s=compute_s,
                command=command,
                checksums=(
                    b"" if checksums is None else checksums.cpu().numpy().astype("<i8").tobytes()
                ),
                checksum_names=() if checksums is None else self._replica_check.names,
                replicas=self._replica_check.replicas,
            )

        return made
