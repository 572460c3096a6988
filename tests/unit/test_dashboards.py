"""The W&B dashboard as code: what it draws exists, of which run, and what happens without W&B."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from monitoring import metrics
from monitoring.dashboards import workspace, workspace_json
from monitoring.heat_image import HeatImage
from monitoring.summary import Tally
from orchestrator.cli import main as cli
from orchestrator.home.folder import Home
from tests.unit.control_plane import ControlPlane
from tests.unit.monitoring_traces import healthy_trace


def panels(told: dict[str, Any]) -> list[dict[str, Any]]:
    bank = told["spec"]["section"]["panelBankConfig"]
    return [panel for section in bank["sections"] for panel in section["panels"]]


def logged() -> set[str]:
    """Names of all that a run of a job with an FP8 exchange logs."""
    record = healthy_trace(5)[-1]
    comm = {"bytes": 1e6, "uncompressed_bytes": 2e6, "relative_error": 0.02}
    comm |= {"quantize_s": 0.1, "wire_s": 0.1, "dequantize_s": 0.1}
    names = metrics.step_metrics(replace(record, comm=comm), 8, "HYBRID", 1e6)
    totals = Tally(recover_times_s=[1.0])
    totals.add_step(record)
    assert HeatImage().add(record) is not None
    names |= {metrics.WORST_RISE: 0.0}
    return {*names, *metrics.tally_metrics(totals), *metrics.histograms(record, "HYBRID")}


def test_every_line_is_of_a_metric_that_runs_log_over_the_step() -> None:
    told = workspace_json(workspace("toy-1", "team", "octavo"))
    drawn = [panel["config"] for panel in panels(told) if "xAxis" in panel["config"]]
    names = logged()
    for config in drawn:
        assert config["xAxis"] == metrics.STEP
        for name in config["metrics"] or ():
            assert name in names, name
        if config.get("metricRegex"):
            family = [n for n in names if re.fullmatch(config["metricRegex"], n)]
            assert family and not any(n.startswith("fp8/worst/") for n in family)
    plain = {name for config in drawn for name in config["metrics"] or ()}
    important = {metrics.LOSS, metrics.GRAD_NORM, metrics.WORST_HEADROOM, metrics.ETTR}
    assert important | {metrics.HIGH_PRECISION_LAYERS, "comm/bytes"} <= plain


def test_it_shows_the_jobs_run_alone_and_its_tables() -> None:
    told = workspace_json(workspace("toy-1", "team", "octavo"))
    text = json.dumps(told)
    assert (told["entity"], told["project"]) == ("team", "octavo")
    assert '"toy-1"' in text
    assert any(panel["config"].get("mediaKeys") == [metrics.HEAT_MAP] for panel in panels(told))
    for table in (metrics.INCIDENTS_TABLE, metrics.ACTIONS_TABLE, metrics.SKIP_LEDGER_TABLE):
        assert table in text


def test_panels_do_not_lie_upon_each_other() -> None:
    told = workspace_json(workspace("toy-1", "team", "octavo"))
    for section in told["spec"]["section"]["panelBankConfig"]["sections"]:
        taken: set[tuple[int, int]] = set()
        for panel in section["panels"]:
            place = panel["layout"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken and max(x for x, _ in cells) < 24
            taken |= cells


def test_the_command_writes_its_json_without_a_network(
    home: Home, plane: ControlPlane, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = plane.submit("toy", wandb={"entity": "team", "project": "runs"})
    out = tmp_path / "board.json"
    assert run(["dashboard", "toy", "--out", str(out), "-o", "json"]) == 0
    told = json.loads(out.read_text())
    assert told["project"] == "runs" and told["entity"] == "team" and job in out.read_text()
    assert json.loads(capsys.readouterr().out)["displayName"] == f"Octavo {job}"


def test_a_job_that_names_no_entity_has_a_dashboard_too(
    home: Home, plane: ControlPlane, capsys: pytest.CaptureFixture[str]
) -> None:
    plane.submit("toy")
    assert run(["dashboard", "toy", "-o", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["entity"], told["project"]) == ("", "octavo")


class _StandIn(BaseHTTPRequestHandler):
    """As much of W&B's API as saving a view takes; keeps what it is sent."""

    sent: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.sent.append({"path": self.path, **body})
        if "upsertView" in body["query"]:
            data: dict[str, Any] = {"upsertView": {"view": {"id": "v1", "name": "nw-abc-v"}}}
        else:
            data = {
                "viewer": {"entity": "me", "username": "me", "flags": "{}"},
                "serverInfo": {
                    "cliVersionInfo": {"max_cli_version": "9"},
                    "latestLocalVersionInfo": None,
                },
            }
        answer = json.dumps({"data": data}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def test_it_is_saved_by_one_request_with_the_whole_of_it(
    home: Home, plane: ControlPlane, tmp_path: Path
) -> None:
    """In a process of its own: wandb keeps what it knows of a server."""
    job = plane.submit("toy", wandb={"entity": "team", "project": "runs"})
    server = ThreadingHTTPServer(("127.0.0.1", 0), _StandIn)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    environment = {
        **os.environ,
        "WANDB_BASE_URL": url,
        "WANDB_API_KEY": "0" * 40,
        "WANDB_CONFIG_DIR": str(tmp_path),
        "WANDB_DIR": str(tmp_path),
    }
    command = [sys.executable, "-m", "orchestrator.cli.main", "dashboard", "toy"]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=100, check=False
        )
    finally:
        server.shutdown()
    assert done.returncode == 0, done.stderr
    (saving,) = [one for one in _StandIn.sent if "upsertView" in one["query"]]
    variables = saving["variables"]
    assert (variables["entityName"], variables["projectName"]) == ("team", "runs")
    assert variables["displayName"] == f"Octavo {job}"
    expected = workspace_json(workspace(job, "team", "runs"))["spec"]
    titles = [panel["config"].get("chartTitle") for panel in panels({"spec": expected})]
    assert [
        panel["config"].get("chartTitle")
        for panel in panels({"spec": json.loads(variables["spec"])})
    ] == titles
    assert done.stdout.strip().startswith("http") and "team/runs" in done.stdout


def test_what_can_not_be_saved_is_told_with_what_to_do(
    home: Home,
    plane: ControlPlane,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plane.submit("toy", wandb={"entity": "team"})
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert run(["dashboard", "toy"]) == 1
    assert "--out FILE" in capsys.readouterr().err
    plane.submit("quiet", wandb={"mode": "disabled"})
    assert run(["dashboard", "quiet"]) == 1
    assert "wandb.mode: disabled" in capsys.readouterr().err


def run(arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    return int(end.value.code or 0)
