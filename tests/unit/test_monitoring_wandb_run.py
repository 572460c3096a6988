import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from monitoring import metrics
from monitoring.config import WandbConfig
from monitoring.tensor_stats import TensorColumns
from monitoring.wandb_run import WandbRun, logged_in, resolve_mode
from monitoring.wandb_writer import BYTES_A_STEP
from tests.unit.monitoring_traces import healthy_trace

LEET = Path(sys.executable).with_name("wandb")
SPEC = {"name": "demo", "fp8": {"format": "HYBRID"}}


def incident_row(step):
    return {
        "kind": "loss_spike",
        "step": step,
        "onset_step": step,
        "message": f"Loss 9 in step {step}.",
        "suspects": [{"layer": "layers.2.mlp.down", "tensor": "input", "evidence": {}}],
        "time": 1_800_000_000.0 + 0.2 * step,
    }


def action_row(step, to_step, timeline=0):
    return {
        "kind": "layer_fallback",
        "step": step,
        "to_step": to_step,
        "attempt": 1,
        "timeline": timeline,
        "time": 1_800_000_000.1 + 0.2 * step,
        "reason": "layers.2.mlp.down moved first",
        "precision": {"layers.2.mlp.down": "bf16"},
        "incidents": [incident_row(step)],
        "passed_over": [{"rung": "skip_step", "why": "not non-finite"}],
    }


def pause_row(step, *, by_hand):
    row = {**action_row(step, None), "kind": "pause", "reason": "no rung is left"}
    return row | {"asked": {"by": "alice", "key": "k", "reason": ""} if by_hand else None}


def read_back(directory):
    """Records of every run file below the job's directory, in order of the processes."""
    records = []
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        text = subprocess.run(
            [LEET, "leet", "inspect", path, "--json"], check=True, capture_output=True, text=True
        ).stdout
        records += [json.loads(line) for line in text.splitlines()]
    return records


def checkpoint(job, step):
    folder = job / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rank-0.safetensors").write_bytes(b"x" * 100)
    return folder


def history(records):
    return [r["history"]["item"] for r in records if r["type"] == "history"]


class FakeRun:
    """Stands in for W&B's run; ``on_log`` may raise or block."""

    def __init__(self, on_log=lambda: None):
        self.on_log = on_log
        self.logged = []
        self.alerts = []
        self.summary = {}
        self.notes = ""
        self.finished = 0

    def define_metric(self, *_, **__):
        pass

    def log(self, values):
        self.on_log()
        self.logged.append(values)

    def alert(self, title, level="INFO", **_):
        self.alerts.append((title, level))

    def finish(self, **_):
        self.finished += 1


@pytest.fixture
def faked(monkeypatch, tmp_path):
    def make(run, **config):
        monkeypatch.setattr(WandbRun, "_init", lambda self, wandb, mode: run)
        return WandbRun(WandbConfig(mode="offline", **config), "demo-000001", tmp_path, SPEC)

    return make


class TestARealOfflineRun:
    @pytest.fixture(scope="class")
    def records(self, tmp_path_factory):
        """One job in two processes' worth of runs: a restart in between."""
        directory = tmp_path_factory.mktemp("job")
        steps = healthy_trace(60)
        later = [dataclasses.replace(r, timeline=1, time=r.time + 4.0) for r in steps[40:]]
        first = WandbRun(WandbConfig(mode="offline"), "demo-abc123", directory, SPEC)
        first.start()
        first.log_start({"attempt": 1, "step": 0, "tier": "seed"})
        for step in steps[:50]:
            first.log_step(step)
        for step in (40, 50):
            first.log_checkpoint(step, checkpoint(directory, step))
        first.log_checkpoint(7, directory / "gone")
        first.log_incident(incident_row(49))
        first.log_action(action_row(49, 40))
        assert first.finish({"state": "paused"}, timeout=120)
        second = WandbRun(WandbConfig(mode="offline"), "demo-abc123", directory, SPEC)
        second.start(steps[:50], [incident_row(49)], [action_row(49, 40)])
        second.log_start({"attempt": 1, "step": 40, "tier": "disk"})
        for step in later:
            second.log_step(step)
        second.log_checkpoint(50, checkpoint(directory, 50))
        for by_hand in (False, True):
            second.log_action(pause_row(59, by_hand=by_hand))
        ended = {"state": "succeeded", "final_loss": 2.5, "steps": 60, "steps_planned": 60}
        assert second.finish(ended, timeout=120)
        assert not first.disabled
        assert not second.disabled
        return read_back(directory)

    def test_every_step_is_there_once_with_its_own_step_as_the_axis(self, records):
        steps = [item[metrics.STEP] for item in history(records) if metrics.LOSS in item]
        assert steps == [*range(50), *range(40, 60)]
        axes = {
            r["metric"].get("glob_name"): r["metric"].get("step_metric")
            for r in records
            if r["type"] == "metric"
        }
        assert axes["train/*"] == axes["fp8/*"] == axes["recovery/*"] == metrics.STEP

    def test_it_is_one_run_with_the_jobs_id(self, records):
        assert {r["run"]["run_id"] for r in records if r["type"] == "run"} == {"demo-abc123"}

    def test_totals_go_on_through_the_restart(self, records):
        last = [item for item in history(records) if metrics.LOSS in item][-1]
        assert last[metrics.ROLLBACKS] == 1
        assert last[metrics.STEPS_LOST] == 10
        assert last[metrics.TIMELINE] == 1
        assert 0 < last[metrics.ETTR] < 1

    def test_tensor_scalars_are_those_of_the_worst_few(self, records):
        item = history(records)[30]
        layers = {k.rsplit("/", 1)[0] for k in item if k.startswith("fp8/layers")}
        assert len(layers) == 8
        assert metrics.WORST_HEADROOM in item and 0.0 <= item[metrics.WORST_RISE] < 1.0

    def test_the_incident_raised_an_alert_and_filled_the_tables(self, records):
        alert = next(r["alert"] for r in records if r["type"] == "alert")
        assert alert["title"] == "demo-abc123: loss spike at step 49"
        tables = [k for item in history(records) for k in item if "_type" in k or "actions" in k]
        assert any(k.startswith(metrics.ACTIONS_TABLE) for k in tables)

    def test_a_pause_calls_a_person_louder_where_nobody_asked_for_it(self, records):
        alerts = [r["alert"] for r in records if r["type"] == "alert"][1:-1]
        assert alerts.pop(0)["title"] == "demo-abc123: paused", "no action said why"
        assert [(a["title"], a["level"], a["text"]) for a in alerts] == [
            ("demo-abc123: pause at step 59", "ERROR", "no rung is left"),
            ("demo-abc123: pause at step 59", "INFO", "no rung is left"),
        ]

    def test_its_end_is_an_alert_too(self, records):
        alerts = [r["alert"] for r in records if r["type"] == "alert"]
        assert alerts[-1]["title"] == "demo-abc123: succeeded"
        assert alerts[-1]["text"] == "60 of 60 steps, loss 2.5"
        # 0 would be W&B's own minute, in which it drops a second alert of a title.
        assert {a["wait_duration"] for a in alerts} == {"1000"}

    def test_what_went_back_is_in_its_notes(self, records):
        notes = [r["run"]["notes"] for r in records if r["type"] == "run" and "notes" in r["run"]]
        assert "step 49: layer fallback to step 40. layers.2.mlp.down moved first" in notes[-1]
        assert len(notes[-1].splitlines()) == 1, "once, in the second process too"

    def test_checkpoints_are_references_with_where_they_come_from(self, records):
        told = [r["artifact"] for r in records if r["type"] == "artifact"]
        # Tables are artifacts of W&B's own.
        told = [a for a in told if a["type"] != "run_table"]
        assert {(a["name"], a["type"]) for a in told} == {("demo-abc123-checkpoint", "checkpoint")}
        lineages = [json.loads(a["metadata"]) for a in told]
        keys = ("step", "attempt", "timeline", "attempt_began_from", "checkpoint_before")
        assert [tuple(one[k] for k in keys) for one in lineages] == [
            (40, 1, 0, "seed", None),
            (50, 1, 0, "seed", 40),
            (50, 1, 1, "disk", None),
        ]
        assert len({a["digest"] for a in told}) == 3, "the same step of another timeline is another"
        assert set(told[2]["aliases"]) == {"latest", "step-50", "attempt-1", "timeline-1"}
        (entry,) = told[0]["manifest"]["contents"]
        assert entry["ref"].startswith("file:///") and entry["ref"].endswith("rank-0.safetensors")

    def test_what_waits_for_its_upload_is_in_the_jobs_directory(self, records):
        tables = [r["artifact"] for r in records if r["type"] == "artifact"]
        staged = [e["local_path"] for a in tables if a["type"] == "run_table"
                  for e in a["manifest"]["contents"] if "local_path" in e]  # fmt: skip
        assert staged and all("/wandb/" in path and Path(path).is_file() for path in staged)
        assert not [path for path in staged if str(Path.home() / ".local") in path]

    def test_all_tensors_are_in_histograms_and_in_a_heat_map(self, records):
        told = history(records)
        every = [item for item in told if "fp8/all/headroom_octaves.values" in item]
        assert [item[metrics.STEP] for item in every] == [10, 20, 30, 40, 40, 50]
        for name in metrics.HISTOGRAMS:
            assert every[0][f"{name}._type"] == "histogram"
            assert sum(every[0][f"{name}.values"]) == 48, "every tensor, once"
        pages = [item for item in told if item.get(f"{metrics.HEAT_MAP}._type") == "html-file"]
        assert [page[metrics.STEP] for page in pages] == [49, 59]


def test_the_skip_ledger_is_a_table_of_batches_with_the_action_that_left_them_out(faked, tmp_path):
    run = FakeRun()
    wandb_run = faked(run)
    wandb_run.start()
    wandb_run.log_action({**action_row(49, 40), "skip_batches": [47, 48]})
    asked = {"by": "ada", "key": "k", "reason": ""}
    wandb_run.log_action({**action_row(70, 60), "skip_batches": [69], "asked": asked})
    wandb_run.log_step(healthy_trace(61)[60])
    wandb_run.finish(timeout=30)
    (table,) = [v[metrics.SKIP_LEDGER_TABLE] for v in run.logged if metrics.SKIP_LEDGER_TABLE in v]
    assert [row[:4] for row in table.data] == [
        [47, 49, "layer_fallback", ""],
        [48, 49, "layer_fallback", ""],
        [69, 70, "layer_fallback", "ada"],
    ]
    assert all(row[4] == action_row(49, 40)["reason"] for row in table.data[:2])


def test_a_kill_loses_less_than_a_second(tmp_path):
    body = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from monitoring.config import WandbConfig
        from monitoring.wandb_run import WandbRun
        from tests.unit.monitoring_traces import healthy_trace
        run = WandbRun(WandbConfig(mode="offline"), "demo-dead01", Path(sys.argv[1]), {})
        run.start()
        for record in healthy_trace(2000, layers=("layers.0.mlp.down",)):
            run.log_step(record)
            print(record.step, flush=True)
            time.sleep(0.02)
        """
    )
    root = Path(__file__).parents[2]
    child = subprocess.Popen(
        [sys.executable, "-c", body, str(tmp_path)],
        stdout=subprocess.PIPE, text=True, cwd=root, env=os.environ | {"PYTHONPATH": str(root)},
    )  # fmt: skip
    stamps = []
    try:
        for line in child.stdout:
            stamps.append((int(line), time.monotonic()))
            # Well after W&B itself has started, which takes a second or two.
            if len(stamps) == 300:
                break
    finally:
        killed = time.monotonic()
        child.send_signal(signal.SIGKILL)
        child.wait()
    time.sleep(0.5)
    kept = {item[metrics.STEP] for item in history(read_back(tmp_path))}
    older = {step for step, at in stamps if at < killed - 1.0}
    assert len(older) > 200
    assert older <= kept


PLANTED = """
import os, sys
from pathlib import Path
from monitoring.config import WandbConfig
from monitoring.wandb_run import WandbRun
from tests.unit.monitoring_traces import healthy_trace
spec = {"name": "demo", "deepspeed": {"nebula": {"api_key": "planted-in-the-spec"}},
        "data": {"source": "s3://user:planted-in-a-url@host/data"}, "envs": {"A": "kept"}}
run = WandbRun(WandbConfig(mode="offline"), "demo-plant1", Path(sys.argv[1]), spec)
run.start()
run.log_config({"backend": "native", "hf_token": "planted-in-the-config"})
for record in healthy_trace(3):
    run.log_step(record)
assert run.finish({"state": "succeeded"}, timeout=30)
assert not run.disabled
"""


def test_no_secret_of_the_process_or_the_spec_is_in_its_files(tmp_path):
    """Ray's workers have the password of its Redis on their command lines."""
    root = Path(__file__).parents[2]
    secret = "planted-in-the-environment"
    env = os.environ | {"PYTHONPATH": str(root), "MY_TOKEN": secret, "WANDB_API_KEY": "k" * 40}
    command = [sys.executable, "-c", PLANTED, str(tmp_path), "--redis-password=planted-in-argv"]
    subprocess.run(command, check=True, env=env, timeout=60)
    files = [f for f in tmp_path.rglob("*") if f.is_file()]
    told = b"".join(f.read_bytes() for f in files)
    assert b"planted" not in told and b"k" * 40 not in told
    (run,) = [r["run"] for r in read_back(tmp_path) if r["type"] == "run"]
    config = run["config"]["update"]
    assert config["deepspeed"] == {"nebula": {"api_key": "(secret, left out)"}}
    assert config["envs"] == {"A": "kept"}


def test_a_step_of_a_thousand_tensors_takes_a_bounded_number_of_bytes(tmp_path):
    names = tuple(
        f"layers.{i}.{part}/{role}"
        for i in range(84)
        for part in ("attn.qkv", "attn.out", "mlp.gate_up", "mlp.down")
        for role in ("input", "weight", "grad_output")
    )[:1002]
    rng = np.random.default_rng(0)
    run = WandbRun(WandbConfig(mode="offline"), "demo-large1", tmp_path, SPEC)
    run.start()
    steps = healthy_trace(250, layers=())
    for record in steps:
        # Other tensors are the worst in each step, which costs most.
        columns = TensorColumns(
            names,
            amax=np.exp(rng.normal(0.0, 1.0, len(names))),
            scale=np.full(len(names), 100.0),
            saturated_pct=rng.random(len(names)) * 3,
            underflow_pct=rng.random(len(names)),
            nonfinite=np.zeros(len(names), dtype=np.int64),
            sqnr_db=np.full(len(names), np.nan),
            calibrated=np.ones(len(names), dtype=np.bool_),
        )
        run.log_step(dataclasses.replace(record, tensors=columns))
    assert run.finish({"state": "succeeded"}, timeout=120)
    assert not run.disabled
    files = [f for f in tmp_path.rglob("*") if f.is_file() and not f.is_symlink()]
    size = sum(f.stat().st_size for f in files)
    told = {f.name: f.stat().st_size for f in files}
    assert 1000 < size / len(steps) < BYTES_A_STEP, told


class TestTroubleOfWandb:
    def test_an_exception_disables_it_with_one_warning(self, faked, caplog):
        def fail():
            raise RuntimeError("disk full")

        run = faked(FakeRun(fail))
        with caplog.at_level(logging.WARNING):
            run.start()
            for record in healthy_trace(20, layers=()):
                run.log_step(record)
            run._thread.join(10)
            run.log_incident(incident_row(5))
            assert run.finish(timeout=60)
        assert run.disabled
        assert [r.message for r in caplog.records] == [
            "W&B is off for job demo-000001: RuntimeError: disk full"
        ]

    def test_a_failing_start_disables_it_too(self, monkeypatch, tmp_path):
        def fail(*_):
            raise OSError("no such host")

        monkeypatch.setattr(WandbRun, "_init", fail)
        run = WandbRun(WandbConfig(mode="offline"), "demo-000002", tmp_path, SPEC)
        run.start()
        run._thread.join(10)
        assert run.disabled

    def test_a_service_that_cannot_be_reached_turns_the_run_offline(self, monkeypatch, tmp_path):
        fake, modes = FakeRun(), []

        def init(self, wandb, mode):
            modes.append(mode)
            if mode == "online":
                raise TimeoutError("no answer")
            return fake

        monkeypatch.setattr(WandbRun, "_init", init)
        run = WandbRun(WandbConfig(mode="online"), "demo-000003", tmp_path, SPEC)
        run.start()
        run.log_step(healthy_trace(1)[0])
        assert run.finish(timeout=60)
        assert modes == ["online", "offline"]
        assert sum(metrics.LOSS in values for values in fake.logged) == 1

    @pytest.mark.parametrize("told", [False, True])
    def test_a_pause_is_told_once_by_its_action_or_by_the_end(self, faked, told):
        fake = FakeRun()
        run = faked(fake)
        run.start()
        run.log_step(healthy_trace(1, layers=())[0])
        if told:
            run.log_action({"kind": "pause", "attempt": 1, "timeline": 0, "step": 0,
                            "time": 1.0, "reason": "Again."})  # fmt: skip
        assert run.finish({"state": "paused", "steps": 1, "steps_planned": 9}, timeout=60)
        expected = ("demo-000001: pause at step 0", "ERROR") if told else (
            "demo-000001: paused", "WARN"
        )  # fmt: skip
        assert fake.alerts == [expected]

    def test_a_call_never_blocks_and_a_full_queue_drops(self, faked, monkeypatch):
        monkeypatch.setattr("monitoring.wandb_run.QUEUE_LIMIT", 10)
        gate = threading.Event()
        run = faked(FakeRun(gate.wait))
        run.start()
        record = healthy_trace(1, layers=())[0]
        for _ in range(1000):  # One that waited for W&B would wait for ever.
            run.log_step(record)
        assert 980 <= run.dropped <= 990
        assert run.finish(timeout=0.2) is False
        gate.set()
        assert run.finish(timeout=60)

    def test_disabled_by_configuration_nothing_is_written(self, tmp_path):
        run = WandbRun(WandbConfig(mode="disabled"), "demo-000004", tmp_path / "job", SPEC)
        run.start()
        run.log_step(healthy_trace(1)[0])
        assert run.finish(timeout=0.1)
        assert not (tmp_path / "job").exists()


class TestMode:
    def test_auto_is_offline_without_a_login_and_online_with_one(self, tmp_path):
        auto = WandbConfig(mode="auto")
        env = {"HOME": str(tmp_path)}
        assert resolve_mode(auto, env) == "offline"
        assert resolve_mode(auto, env | {"WANDB_API_KEY": "x" * 40}) == "online"

    def test_the_login_may_stand_in_netrc_for_the_host_in_use(self, tmp_path):
        netrc = tmp_path / ".netrc"
        netrc.write_text("machine api.wandb.ai\n login user\n password not-a-key\n")
        netrc.chmod(0o600)
        env = {"HOME": str(tmp_path)}
        assert logged_in(env)
        assert not logged_in(env | {"WANDB_BASE_URL": "https://wandb.example.org"})
        assert logged_in({"HOME": "/nonexistent", "NETRC": str(netrc)})

    def test_a_broken_netrc_is_no_login(self, tmp_path):
        (tmp_path / ".netrc").write_text("machine\n\x00 what")
        assert not logged_in({"HOME": str(tmp_path)})

    def test_the_environments_mode_decides_for_auto_only(self, tmp_path):
        env = {"HOME": str(tmp_path), "WANDB_MODE": "disabled"}
        assert resolve_mode(WandbConfig(mode="auto"), env) == "disabled"
        assert resolve_mode(WandbConfig(mode="offline"), env) == "offline"
