"""One record from all ranks' reports of a step."""

from __future__ import annotations

from launch.commands import RankReport
from orchestrator.supervision.record_merger import merge_reports


def report(rank: int, comm: dict[str, float]) -> RankReport:
    return RankReport(
        attempt=1,
        timeline=0,
        rank=rank,
        step=5,
        time=10.0 + rank,
        batch=5,
        loss=2.0,
        grad_norm=1.0,
        lr=1e-3,
        tokens=64,
        step_time_s=0.1 * (rank + 1),
        skipped=False,
        nonfinite_parameters=(),
        nonfinite_loss=False,
        comm=comm,
        stats=b"",
        stats_names=(),
        high_precision_layers=(),
        drills=(),
        command=0,
        checksums=b"",
        checksum_names=(),
        replicas=(rank,),
    )


def test_one_stage_that_rounds_coarsely_is_seen_among_many() -> None:
    errors = [0.026] * 7 + [0.09]
    reports = [
        report(rank, {"relative_error": error, "bytes": 100.0 * (rank + 1), "wire_s": 1.0})
        for rank, error in enumerate(errors)
    ]
    comm = merge_reports(reports).comm
    assert comm == {"relative_error": 0.09, "bytes": 450.0, "wire_s": 1.0}
