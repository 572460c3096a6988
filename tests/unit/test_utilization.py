"""MFU: as the planner reckons it, the same wherever it is told; nothing where it isn't known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from monitoring import metrics
from monitoring.job_view import JobView
from monitoring.report import render_report
from monitoring.summary import summarize
from monitoring.utilization import RANK_PEAK, mfu_pct, peaks_of
from orchestrator.api.client import Client
from orchestrator.cli.following import whole_view
from orchestrator.home.folder import Home
from orchestrator.planning.devices import DEVICES
from orchestrator.planning.estimate import Hardware, estimate
from orchestrator.planning.utilization import rank_peak_tokens_per_s
from orchestrator.protocol import SupervisorBatch
from orchestrator.spec.job import JobSpec, parse_spec
from tests.unit.control_plane import ControlPlane
from tests.unit.monitoring_traces import healthy_trace
from tests.unit.test_monitoring_watch import shown

DEGREES = {"pipeline": 2, "tensor": 1, "data": 2}


def spec(tmp_path: Path, **resources: Any) -> JobSpec:
    (tmp_path / "text.txt").write_text("x" * 4096)
    text = f"""
name: toy
slots_per_node: 4
data: {{source: {tmp_path}/text.txt}}
parallelism: {{pipeline: 2}}
resources: {resources}
"""
    return parse_spec(text, "job.yaml")


def view(peak: float | None, **changes: Any) -> JobView:
    told = JobView("a-000000", "running", {"parallelism": DEGREES}, healthy_trace(20))
    return replace(told, extra={RANK_PEAK: peak}, **changes)


def test_it_is_what_the_plan_says_of_the_same_throughput(tmp_path: Path) -> None:
    job = spec(tmp_path, device="cpu")
    planned = estimate(job, Hardware.of(job))
    peak = rank_peak_tokens_per_s(job)
    assert peak is not None
    seconds = 1e9 / planned.tokens_a_second
    record = replace(healthy_trace(1)[0], tokens=int(1e9), step_time_s=seconds)
    assert mfu_pct(record, 4 * peak) == pytest.approx(100 * planned.mfu)
    assert DEVICES["cpu"].bf16 / peak == pytest.approx(planned.flops_per_token)


def test_without_a_named_device_nothing_is_said_anywhere(tmp_path: Path) -> None:
    assert rank_peak_tokens_per_s(spec(tmp_path)) is None
    told = view(None)
    assert summarize(told)["mfu_pct"] is None
    assert "MFU" not in render_report(told) and "MFU" not in shown(told, 80)
    assert metrics.MFU_PCT not in metrics.step_metrics(told.steps[-1], 8, "HYBRID")


def test_it_is_told_everywhere_where_it_is_known() -> None:
    # About half of what four ranks could.
    told = view(2048 / 0.2 / 4 * 2)
    assert summarize(told)["mfu_pct"] == pytest.approx(50, rel=0.05)
    newest = told.steps[-1]
    whole = 4 * told.extra[RANK_PEAK]
    assert metrics.step_metrics(newest, 8, "HYBRID", whole)[metrics.MFU_PCT] == pytest.approx(
        mfu_pct(newest, whole)
    )
    assert "<span>MFU</span>" in render_report(told)
    assert f"MFU {mfu_pct(newest, whole):.1f} %" in shown(told, 80)


def test_an_attempt_on_fewer_ranks_is_held_against_those() -> None:
    detail = {"attempt": 2, "ranks": 2}
    started = {"kind": "attempt_started", "time": 1.0, "message": "", "detail": detail}
    steps = [*healthy_trace(3), *(replace(r, attempt=2) for r in healthy_trace(6)[3:])]
    assert peaks_of(view(100.0, steps=steps, events=[started])) == {1: 400.0, 2: 200.0}


def test_the_api_tells_it_to_the_report_of_another_machine(home: Home, plane: ControlPlane) -> None:
    job = plane.submit(resources={"device": "cpu"})
    plane.steps(2)
    step = healthy_trace(1)[0].to_json()
    plane.controller.report(job, 1, SupervisorBatch(1, steps=(step,)))
    server = home.server()
    assert server is not None
    told = summarize(whole_view(Client(server.url, home.token()), job))
    assert told["mfu_pct"] > 0
