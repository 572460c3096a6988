"""Where a user reads what the linears run on, and why: before, at the start, and after."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient

from launch.commands import BackendReport
from monitoring.config import WandbConfig
from monitoring.wandb_run import WandbRun
from orchestrator.api.app import create_app
from orchestrator.cli.show import print_job
from orchestrator.events import EventDraft
from orchestrator.protocol import SupervisorBatch
from orchestrator.spec.backend import backend_of
from orchestrator.spec.job import SpecError, load_spec, parse_spec
from orchestrator.supervision import supervisor
from orchestrator.supervision.notices import backend_detail
from parallel.precision.choice import BackendChoice
from tests.unit.control_plane import ControlPlane
from tests.unit.scripted_job import Bench
from tests.unit.test_cli import call, job_file
from tests.unit.test_monitoring_wandb_run import read_back

CHOSEN = BackendChoice("transformer_engine", "a GPU runs it", "little tried")
GPU: dict[str, Any] = {"gpus_per_node": 4, "parallelism": {"pipeline": 2}}


def parsed(**changes: Any) -> Any:
    return parse_spec(yaml.safe_dump({"name": "toy", **changes}), "job.yaml", check_data=False)


def refused(**changes: Any) -> dict[str, tuple[str, str]]:
    with pytest.raises(SpecError) as caught:
        parsed(**changes)
    return {p.key: (p.message, p.remedy) for p in caught.value.problems}


class TestRefusedAtSubmit:
    def test_transformer_engine_on_cpu(self):
        found = refused(slots_per_node=4, fp8={"backend": "transformer_engine"})
        assert list(found) == ["fp8.backend"]
        assert "gpus_per_node" in found["fp8.backend"][1]

    def test_transformer_engine_that_is_not_installed(self, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        found = refused(**GPU, fp8={"backend": "transformer_engine"})
        assert list(found) == ["fp8.backend"] and "octavo[te]" in found["fp8.backend"][1]

    def test_an_unknown_recipe_or_backend(self):
        found = refused(slots_per_node=4, fp8={"recipe": "nvfp4", "backend": "apex"})
        assert set(found) == {"fp8.recipe", "fp8.backend"}
        assert "mxfp8" in found["fp8.recipe"][0] + found["fp8.recipe"][1]

    @pytest.mark.parametrize(
        ("key", "changes"),
        [
            ("model.smooth_swiglu", {"model": {"smooth_swiglu": True}}),
            (
                "training.recompute",
                {"fp8": {"amax_compute_algo": "ema"}, "training": {"recompute": "full"}},
            ),
            (
                "training.seq_len",
                {"training": {"seq_len": 24, "train_micro_batch_size_per_gpu": 1}},
            ),
        ],
    )
    def test_layers_that_it_cannot_run(self, monkeypatch, key, changes):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: ModuleSpec(name, None))
        fp8 = {"backend": "transformer_engine", **changes.get("fp8", {})}
        assert list(refused(**{**GPU, **changes, "fp8": fp8})) == [key]
        # The native layers can: with auto the spec is taken, and says so.
        auto = parsed(**{**GPU, **changes, "fp8": {**fp8, "backend": "auto"}})
        assert backend_of(auto).backend == "native"


class TestForetold:
    def test_a_plan_and_a_dry_run_print_it_as_a_comment_of_the_job_file(self, tmp_path, capsys):
        assert call(["plan", job_file(tmp_path)]) == 0
        plan = capsys.readouterr().out
        assert call(["submit", "--dry-run", job_file(tmp_path)]) == 0
        out = capsys.readouterr().out
        assert plan == out
        assert out.startswith("# linears: native: Transformer Engine needs a CUDA device")
        assert parse_spec(out, "again", check_data=False) == load_spec(Path(job_file(tmp_path)))

    def test_with_json_it_is_beside_the_spec(self, tmp_path, capsys):
        assert call(["submit", "--dry-run", job_file(tmp_path), "-o", "json"]) == 0
        assert json.loads(capsys.readouterr().out)["linears"].startswith("native: ")

    def test_a_gpu_job_says_on_what_it_depends(self):
        told = backend_of(parsed(**GPU))
        assert told.backend == "undecided" and "9.x" in told.reason


class TestToldByTheSupervisor:
    @pytest.fixture
    def job(self, tmp_path: Path) -> Iterator[Bench]:
        bench = Bench(tmp_path)
        yield bench
        bench.close()

    def report(self, job: Bench, choice: BackendChoice) -> None:
        job.supervision.deliver([BackendReport(1, 0, 0, 0, job.now, choice)])
        job.step()

    def test_the_start_of_an_attempt_has_it(self, job):
        job.train(1)
        event = job.settled().event("attempt_started")
        assert (
            event.detail["backend"] == "native" and "runs on CPU" in event.detail["backend_reason"]
        )
        assert "Linears: native" in event.message

    def test_what_the_ranks_chose_otherwise_is_an_event(self, job):
        job.train(1)
        self.report(job, CHOSEN)
        event = job.settled().event("backend_chosen")
        assert event.detail == backend_detail(CHOSEN)
        assert "a GPU runs it (little tried)" in event.message

    def test_what_was_foretold_is_not_said_twice(self, job):
        job.train(1)
        self.report(job, backend_of(job.controller.spec))
        assert "backend_chosen" not in job.settled().kinds()


class TestShown:
    def test_status_has_the_forecast_and_then_what_the_ranks_told(self, tmp_path, capsys):
        plane = ControlPlane(tmp_path, 4)
        with TestClient(create_app(plane.controller, "token")) as api:
            api.headers["Authorization"] = "Bearer token"
            job = plane.submit()
            shown = api.get(f"/v1/jobs/{job}").json()
            assert (shown["backend"], shown["backend_warning"]) == ("native", "")
            plane.steps(3)
            event = EventDraft("backend_chosen", 1.0, "…", backend_detail(CHOSEN))
            taken = plane.store.attempts.record(
                job, plane.store.job(job).attempt, SupervisorBatch(1, events=(event,)), 1.0
            )
            assert taken.accepted, taken
            shown = api.get(f"/v1/jobs/{job}").json()
        assert shown["backend"] == "transformer_engine"
        print_job(shown)
        out = capsys.readouterr().out
        assert "linears    transformer_engine: a GPU runs it: little tried" in out

    def test_wandb_has_it_in_its_configuration(self, tmp_path):
        run = WandbRun(WandbConfig(mode="offline"), "demo-000001", tmp_path, {"name": "demo"})
        run.start()
        run.log_config(backend_detail(CHOSEN))
        assert run.finish(timeout=120)
        told = str(read_back(tmp_path))
        assert "backend_reason" in told and "a GPU runs it" in told

    def test_wandb_starts_with_the_forecast(self, tmp_path, monkeypatch):
        made: list[dict[str, Any]] = []

        class Run:
            def __init__(self, config: object, job: str, folder: Path, spec: dict[str, Any]):
                made.append(spec)

            def start(self, **past: object) -> None: ...

        monkeypatch.setattr(supervisor, "WandbRun", Run)
        job = Bench(tmp_path)
        supervisor.run_log(job.controller.resume(), supervisor.JobHistory())
        job.close()
        assert made[0]["backend"] == "native" and made[0]["backend_reason"]
