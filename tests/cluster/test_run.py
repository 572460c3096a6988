"""``octavo run`` from outside: what it leaves behind, whatever happens to it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

OCTAVO = [sys.executable, "-m", "orchestrator.cli.main"]


def job_file(folder: Path, **changes: Any) -> Path:
    text = folder / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 400)
    data = {
        "name": "tiny",
        "slots_per_node": 2,
        "parallelism": {"data": 2},
        "model": {"hidden_size": 64, "num_layers": 2, "num_heads": 4},
        "data": {"source": str(text)},
        "training": {"steps": 10, "seq_len": 32, "train_batch_size": 8},
        "resources": {"standby": False},
        **changes,
    }
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


def start(file: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    command = [*OCTAVO, "run", str(file), "--out", str(out), "-o", "json", *options]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A group of its own, so that a signal reaches what a Ctrl-C would reach.
        start_new_session=True,
    )


def started_by(running: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(running.pid).children(recursive=True)


def wait_for_training(running: subprocess.Popen[str]) -> None:
    assert running.stderr is not None
    for line in running.stderr:
        if line.startswith("step "):
            return
    pytest.fail("it ended before it trained")


def still_there(processes: list[psutil.Process], seconds: float) -> list[str]:
    _, left = psutil.wait_procs(processes, timeout=seconds)
    return [" ".join(p.cmdline())[:100] for p in left if p.status() != psutil.STATUS_ZOMBIE]


def test_two_runs_at_once_do_not_meet_and_each_has_its_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = job_file(tmp_path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    runs = [start(file, tmp_path / f"out{n}") for n in range(2)]
    for n, running in enumerate(runs):
        out, err = running.communicate(timeout=240)
        assert running.returncode == 0, err
        summary = json.loads(out)
        assert (summary["state"], summary["steps"]) == ("succeeded", 10)
        (folder,) = (tmp_path / f"out{n}").iterdir()
        assert {"summary.json", "report.html", "spec.yaml", "wandb", "logs"} <= {
            p.name for p in folder.iterdir()
        }
        told = summary["goodput"]
        parts = [told[f"{use}_s"] for use in ("productive", "lost", "recovering", "waiting")]
        assert told["productive_s"] > 0 and sum(parts) == pytest.approx(told["wall_s"])
        assert told["waiting"]["starting_s"] > 0, "from the submission on"
        assert summary["environment"]["torch"]
        for rank in range(2):
            log = (folder / "logs" / "attempt-1" / f"rank-{rank}.log").read_text()
            lines = [json.loads(line) for line in log.splitlines()]
            assert {(line["attempt"], line["rank"]) for line in lines} == {(1, rank)}
            assert "ready for step 0" in log
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_ends_everything_and_says_how_to_go_on(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    file = job_file(tmp_path, training={"steps": 100_000, "seq_len": 32})
    running = start(file, tmp_path / "out")
    wait_for_training(running)
    processes = started_by(running)
    assert any("raylet" in " ".join(p.cmdline()) for p in processes)
    os.killpg(running.pid, number)
    out, err = running.communicate(timeout=60)
    assert running.returncode == code
    assert still_there(processes, 2) == []
    (folder,) = (tmp_path / "out").iterdir()
    assert json.loads(out) == json.loads((folder / "summary.json").read_text())
    assert json.loads(out)["state"] == "cancelled"
    assert f"{folder.name} cancelled" in err and "its newest checkpoint is of step" in err
    *_, up, resume = err.strip().splitlines()
    assert up.strip() == f"octavo up --slots 2 --home {folder / 'controller'}"
    assert resume.strip() == f"octavo resume {folder.name} --home {folder / 'controller'}"


def test_a_killed_run_leaves_no_process_behind(tmp_path: Path) -> None:
    file = job_file(tmp_path, training={"steps": 100_000, "seq_len": 32})
    running = start(file, tmp_path / "out")
    wait_for_training(running)
    processes = started_by(running)
    running.kill()
    running.wait()
    assert still_there(processes, 40) == []
    (left,) = (tmp_path / "out").glob(".octavo-*")
    short = job_file(tmp_path)
    again = start(short, tmp_path / "out")
    _, err = again.communicate(timeout=120)
    assert again.returncode == 0, err
    assert not left.exists()
    (killed,) = (tmp_path / "out").glob("*/controller")
    assert f"octavo up --home {killed}" in err


def test_what_an_interrupted_run_saved_goes_on_until_down_saves_it_again(tmp_path: Path) -> None:
    file = job_file(tmp_path, training={"steps": 100_000, "seq_len": 32, "train_batch_size": 8})
    running = start(file, tmp_path / "out")
    wait_for_training(running)
    running.send_signal(signal.SIGTERM)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 143, err
    up, resume = (line.split()[1:] for line in err.strip().splitlines()[-2:])
    home = ["--home", up[-1]]
    try:
        assert octavo(*up).returncode == 0
        assert octavo(*resume).returncode == 0
        job = resume[1]
        deadline = time.monotonic() + 120
        while json.loads(octavo("status", job, "-o", "json", *home).stdout)["state"] != "running":
            assert time.monotonic() < deadline, octavo("events", job, *home).stdout
        events = octavo("events", job, *home).stdout
        started = [line for line in events.splitlines() if "attempt_started" in line]
        assert "from a checkpoint" in started[-1], events
    finally:
        down = octavo("down", *home)
    assert down.returncode == 0, down.stderr
    assert f"{job} cancelled" in down.stdout and "its newest checkpoint is of step" in down.stdout
    assert f"octavo resume {job} --home {home[1]}" in down.stdout
    saved = re.search(r"newest checkpoint is of step (\d+)", err)
    again = re.search(r"newest checkpoint is of step (\d+)", down.stdout)
    assert saved and again and int(again[1]) > int(saved[1])


def octavo(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*OCTAVO, *words], capture_output=True, text=True)


def test_what_can_not_run_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    short = tmp_path / "short.txt"
    short.write_text("short")
    good, absent = tmp_path / "text.txt", tmp_path / "absent"
    cases = [
        (good, tmp_path / "file" / "out", "--out"),
        (absent, tmp_path / "o", "data.source"),
        (short, tmp_path / "o", "data.source"),
    ]
    for source, out, key in cases:
        file = job_file(tmp_path, data={"source": str(source)})
        began = time.monotonic()
        done = subprocess.run(
            [*OCTAVO, "run", str(file), "--out", str(out)], capture_output=True, text=True
        )
        assert done.returncode == 2
        assert key in done.stderr and "Traceback" not in done.stderr
        assert "starting" not in done.stdout
        assert time.monotonic() - began < 30
        assert not out.exists()


def test_up_starts_one_host_also_twice_at_once_and_down_ends_it(tmp_path: Path) -> None:
    environment = {**os.environ, "OCTAVO_HOME": str(tmp_path / "home")}

    def octavo(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*OCTAVO, *words], capture_output=True, text=True, env=environment)

    def beside() -> subprocess.Popen[str]:
        command = [*OCTAVO, "up", "--slots", "2", "-o", "json"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    one, other = beside(), beside()
    told = [process.communicate(timeout=240)[0] for process in (one, other)]
    try:
        assert (one.returncode, other.returncode) == (0, 0)
        assert json.loads(told[0]) == json.loads(told[1])
        host = psutil.Process(json.loads((tmp_path / "home" / "host.json").read_text())["pid"])
        processes = [host, *host.children(recursive=True)]
        again = octavo("up", "-o", "json")
        assert json.loads(again.stdout) == json.loads(told[0])
        assert octavo("up", "--slots", "3").returncode == 1
        never = octavo("submit", str(job_file(tmp_path, slots_per_node=4, parallelism={})))
        assert never.returncode == 0, never.stderr
        assert octavo("events", "-f", "tiny").returncode == 100
        assert "can never fit: needs 1 node with 4 CPU slots" in octavo("status", "tiny").stdout
    finally:
        ended = octavo("down")
    assert ended.returncode == 0
    assert still_there(processes, 2) == []
    assert octavo("list").returncode == 3
    assert "nothing runs" in octavo("down").stdout
