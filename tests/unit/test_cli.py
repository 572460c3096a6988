"""The command in one process: exit codes, JSON, errors in a line, and no heavy imports."""

from __future__ import annotations

import json
import re
import stat
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from orchestrator.api.jobs import job_json
from orchestrator.cli.close import conclude, could_go_on
from orchestrator.cli.main import call
from orchestrator.cli.show import Output, print_jobs
from orchestrator.events import EventDraft
from orchestrator.home.folder import Home, TokenExposedError
from orchestrator.lifecycle import Cause, JobState
from orchestrator.protocol import SupervisorBatch
from tests.unit.control_plane import ControlPlane
from tests.unit.test_store import step


def job_file(folder: Path, **changes: Any) -> str:
    text = folder / "text.txt"
    text.write_text("x" * 4096)
    data = {"name": "toy", "slots_per_node": 4, "data": {"source": str(text)}, **changes}
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(data))
    return str(file)


def test_a_job_is_submitted_listed_shown_and_cancelled(
    home: Home, plane: ControlPlane, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["submit", job_file(tmp_path)]) == 0
    job = capsys.readouterr().out.strip()
    assert plane.state(job) == "queued"
    assert call(["list"]) == 0
    assert job in capsys.readouterr().out
    assert call(["list", "-o", "json"]) == 0
    assert [j["id"] for j in json.loads(capsys.readouterr().out)] == [job]
    assert call(["status", "toy"]) == 101
    assert "queued" in capsys.readouterr().out
    assert call(["cancel", job, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "cancelled"
    assert call(["status", "toy", "-o", "json"]) == 103
    assert json.loads(capsys.readouterr().out)["reason"].startswith("cancelled by ")
    assert call(["cancel", job]) == 1
    assert f"{job} was cancelled already; there is nothing to cancel" in capsys.readouterr().err
    assert call(["events", job]) == 0
    assert "submitted from" in capsys.readouterr().out
    assert call(["events", job, "-f"]) == 103


@pytest.mark.parametrize(
    ("state", "cause", "code"),
    [
        (JobState.SUCCEEDED, Cause.STEPS_DONE, 0),
        (JobState.FAILED, Cause.ERROR, 100),
        (JobState.PAUSED, Cause.BUDGET_SPENT, 101),
    ],
)
def test_following_commands_end_with_the_code_of_the_jobs_state(
    home: Home,
    plane: ControlPlane,
    capsys: pytest.CaptureFixture[str],
    state: JobState,
    cause: Cause,
    code: int,
) -> None:
    job = plane.submit()
    plane.steps(2)
    batch = SupervisorBatch(1, steps=(step(0), step(1)), transition=(state, cause))
    plane.controller.report(job, 1, batch)
    plane.supervisors.done.add(job)
    plane.steps()
    for command in (["status", job], ["watch", job], ["events", "-f", job], ["logs", "-f", job]):
        assert call(command) == code
    told = capsys.readouterr().out
    assert "step     1  loss 4.9000" in told


def test_the_status_says_what_a_job_that_stands_still_would_go_on_from(
    home: Home, plane: ControlPlane, capsys: pytest.CaptureFixture[str]
) -> None:
    job = plane.submit()
    plane.steps(2)
    paused = (JobState.PAUSED, Cause.BUDGET_SPENT)
    plane.controller.report(job, 1, SupervisorBatch(1, steps=(step(0),), transition=paused))
    assert call(["status", job]) == 101
    assert "checkpoint none: resumed, it would begin again" in capsys.readouterr().out
    plane.store.note(job, EventDraft("checkpoint_written", 5.0, "written", {"step": 1}))
    assert call(["status", job]) == 101
    assert "checkpoint of step 1\n" in capsys.readouterr().out
    assert call(["status", job, "-o", "json"]) == 101
    assert json.loads(capsys.readouterr().out)["checkpoint_step"] == 1


def test_a_log_that_is_not_there_is_not_found_and_one_that_is_is_printed(
    home: Home, plane: ControlPlane, capsys: pytest.CaptureFixture[str]
) -> None:
    job = plane.submit()
    plane.steps(2)
    folder = Path(plane.store.job(job).job_dir) / "logs" / "attempt-1"
    folder.mkdir()
    (folder / "rank-1.log").write_text("hello\n")
    assert call(["logs", job, "--rank", "1"]) == 0
    assert capsys.readouterr().out == "hello\n"
    assert call(["logs", job, "--rank", "2"]) == 102


def test_times_are_local_with_their_zone_for_people_and_utc_for_programs(
    home: Home,
    plane: ControlPlane,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = plane.submit()
    plane.steps(2)
    at = datetime(2026, 11, 30, 10, 39, 59, tzinfo=UTC).timestamp()
    folder = Path(plane.store.job(job).job_dir)
    log_lines(folder, 1, 0, [at])
    for seconds, message in ((at - 86400, "before"), (at - 1, "then"), (at, "now")):
        plane.store.note(job, EventDraft("told", seconds, message, {}))
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        assert call(["logs", job]) == 0
        assert capsys.readouterr().out.startswith("2026-11-30 05:39:59.000-05:00 INFO step 1 x: ")
        assert call(["events", job]) == 0
        lines = capsys.readouterr().out.splitlines()
        begin = lines.index("2026-11-29, EST (UTC-05:00)")
        told = [line.split("  ")[0] for line in lines[begin:]]
        assert told == [
            lines[begin],
            "05:39:59",
            "2026-11-30, EST (UTC-05:00)",
            "05:39:58",
            "05:39:59",
        ]
        assert call(["status", job]) == 101
        assert re.search(r"^submitted +\S+ \S+ E[DS]T$", capsys.readouterr().out, re.MULTILINE)
        assert call(["token", "list"]) == 0
        assert re.search(r"EXPIRES \(E[DS]T\)", capsys.readouterr().out)
        assert call(["logs", job, "-o", "json"]) == 0
        assert json.loads(capsys.readouterr().out)["time"] == at
    finally:
        monkeypatch.undo()
        time.tzset()


def log_lines(folder: Path, attempt: int, rank: int, times: list[float]) -> None:
    """A rank's log with a line at each time."""
    file = folder / "logs" / f"attempt-{attempt}" / f"rank-{rank}.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    shared = {"level": "INFO", "attempt": attempt, "rank": rank, "step": 1, "logger": "x"}
    lines = [json.dumps({"time": t, **shared, "message": f"{attempt} at {t:.0f}"}) for t in times]
    file.write_text("".join(f"{line}\n" for line in lines))


def test_a_log_is_shown_from_a_time_on_through_the_attempts_that_followed(
    home: Home, plane: ControlPlane, capsys: pytest.CaptureFixture[str]
) -> None:
    job, now = plane.submit(), time.time()
    plane.steps(2)
    folder = Path(plane.store.job(job).job_dir)
    log_lines(folder, 1, 3, [now - 3600, now - 500, now - 400])
    for attempt in (1, 2):
        plane.controller.next_attempt(job, attempt, f"reason {attempt}")
    log_lines(folder, 2, 3, [now - 300])
    log_lines(folder, 3, 3, [now - 200, now - 100])

    def shown(*words: str) -> list[str]:
        assert call(["logs", job, "--rank", "3", "-o", "json", *words]) in (0, 100)
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        return [line["message"] for line in lines]

    whole = [
        f"{attempt} at {now - age:.0f}"
        for attempt, age in ((1, 500), (1, 400), (2, 300), (3, 200), (3, 100))
    ]
    assert shown("--since", "10m") == whole
    assert shown() == whole[3:], "the newest attempt's"
    assert shown("--attempt", "1", "--since", "10m") == whole[:2]
    assert shown("--tail", "3") == whole[2:]
    assert shown("--tail", "3", "--since", "250s") == whole[3:]
    assert shown("--tail", "1", "--since", "250s") == whole[4:]
    ended = SupervisorBatch(1, transition=(JobState.FAILED, Cause.ERROR))
    plane.controller.report(job, 3, ended)
    plane.supervisors.done.add(job)
    plane.steps()
    assert shown("-f", "--since", "10m") == whole
    steering = "\x1b[31mred\x1b[0m \x1b]0;title\x07a\tb \x1b[2Jgone\x9b\x00\x1b"
    with (folder / "logs" / "attempt-3" / "rank-3.log").open("a") as out:
        row = {"time": now, "level": "INFO", "attempt": 3, "rank": 3, "step": 1, "logger": "x"}
        out.write(f"{json.dumps({**row, 'message': steering})}\n{steering}\n")
    capsys.readouterr()
    call(["logs", job, "--rank", "3", "--tail", "2"])
    told = capsys.readouterr().out.splitlines()
    assert [line.partition("red")[2] for line in told] == [" a\tb gone\ufffd\ufffd"] * 2
    assert "\x1b" not in "".join(told)
    assert call(["logs", job, "--since", "soon"]) == 2
    assert "times are as 90s, 30m, 2h, 1d" in capsys.readouterr().err


def test_a_report_is_written_of_what_the_api_tells(
    home: Home, plane: ControlPlane, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = plane.submit()
    plane.steps(2)
    plane.controller.report(job, 1, SupervisorBatch(1, steps=tuple(step(n) for n in range(5))))
    assert call(["report", job, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 5
    file = tmp_path / "report.html"
    assert call(["report", job, "--to", str(file)]) == 0
    assert job in file.read_text()
    capsys.readouterr()
    assert call(["report", job, "--to", "-"]) == 0
    assert capsys.readouterr().out.startswith("<!doctype html>")


def test_a_dry_run_needs_no_controller_and_prints_a_spec_that_reads_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "none"))
    assert call(["submit", "--dry-run", job_file(tmp_path)]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["training"]["train_batch_size"] == 16
    assert call(["submit", "--dry-run", "-o", "json", job_file(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["spec"]["parallelism"]["data"] == 4


@pytest.mark.parametrize("command", [["submit"], ["submit", "--dry-run"], ["run"]])
def test_a_bad_job_file_is_a_usage_error_with_every_problem(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = {"source": str(tmp_path / "nowhere")}
    file = job_file(tmp_path, parallelism={"pipeline": 9}, precison="fp8", data=missing)
    assert call([*command, file]) == 2
    told = capsys.readouterr().err
    assert f"{file}:" in told and "parallelism.pipeline: 9" in told and "'precision'" in told
    assert "data.source" in told and "does not exist" in told
    assert "4 problems" in told
    assert "Traceback" not in told


def test_problems_that_only_the_controller_sees_name_the_users_file(
    home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    storage = {"storage_path": str(tmp_path / "file" / "jobs")}
    file = job_file(tmp_path, checkpoint=storage)
    assert call(["submit", file]) == 2
    assert f"{file}: checkpoint.storage_path" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["/proc/x", "{tmp}/text.txt/jobs"])
def test_a_dry_run_refuses_a_folder_that_submit_refuses_in_the_same_words(
    folder: str, home: Home, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = {"storage_path": folder.format(tmp=tmp_path)}
    file = job_file(tmp_path, checkpoint=storage)
    assert call(["submit", file]) == 2
    told = capsys.readouterr().err
    assert "can't be made" in told
    assert call(["submit", "--dry-run", file]) == 2
    assert capsys.readouterr().err == told


def test_what_validation_says_comes_without_the_words_of_its_library(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = job_file(tmp_path, model={"factory": "nowhere"}, fp8={"format": "E5M2"})
    assert call(["submit", "--dry-run", file]) == 2
    told = capsys.readouterr().err
    assert "model.factory: 'nowhere': is not written as package.module:function" in told
    assert "fp8.format: 'E5M2': pure E5M2" in told
    assert call(["list", "-o", "xml"]) == 2
    told += capsys.readouterr().err
    assert "'xml' is not one of" in told
    assert "value error" not in told.lower()


def test_a_dry_run_makes_no_folder(tmp_path: Path) -> None:
    file = job_file(tmp_path, checkpoint={"storage_path": str(tmp_path / "new" / "jobs")})
    before = sorted(tmp_path.rglob("*"))
    assert call(["submit", "--dry-run", file]) == 0
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (["list"], 3, "no controller runs in"),
        (["cancel", "x"], 3, "no controller runs in"),
        (["resume", "x"], 3, "no controller runs in"),
        (["watch", "x"], 3, "no controller runs in"),
        (["logs", "x"], 3, "no controller runs in"),
        (["submit", "--dry-run", "absent.yaml"], 2, "1 problem"),
        (["run", "absent.yaml"], 2, "1 problem"),
        (["lst"], 2, "No such command"),
        (["status"], 2, "Missing argument"),
    ],
)
def test_with_json_an_error_is_one_object_on_stderr_with_the_same_exit_code(
    command: list[str],
    code: int,
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    assert call([*command, "-o", "json"]) == code
    told = capsys.readouterr()
    assert told.out == ""
    error = json.loads(told.err)
    assert says in error["error"] and error["exit_code"] == code
    assert call(command) == code
    assert says in capsys.readouterr().err


def test_problems_of_a_job_file_are_told_as_json_with_key_line_and_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = job_file(tmp_path, parallelism={"pipeline": 9}, precison="fp8")
    for command in (["submit", "--dry-run", "--output=json"], ["run", "-ojson"]):
        assert call([*command, file]) == 2
        problems = json.loads(capsys.readouterr().err)["problems"]
        assert {p["key"] for p in problems} >= {"precison", "parallelism.pipeline"}
        assert all(p["file"] == file and p["line"] for p in problems)


def test_down_ends_jobs_after_their_checkpoint_and_says_how_each_goes_on(
    home: Home,
    plane: ControlPlane,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = SimpleNamespace(slots=4)
    ended: list[object] = []
    monkeypatch.setattr("orchestrator.cli.up.running_host", lambda _: host)
    monkeypatch.setattr("orchestrator.cli.up.end_host", lambda host, _: ended.append(host))
    running, waiting = plane.submit("one"), plane.submit("two")
    plane.steps(3)
    batch = SupervisorBatch(1, transition=(JobState.RUNNING, Cause.FIRST_STEP))
    plane.controller.report(running, 1, batch)

    def controller_and_supervisor() -> None:
        while not plane.supervisors.stopped:
            plane.steps()
            time.sleep(0.02)
        last = SupervisorBatch(2, transition=(JobState.CANCELLED, Cause.ENDED))
        plane.controller.report(running, 1, last)
        plane.supervisors.done.add(running)
        assert not ended, "the host goes after the job"
        # One pass: with another the next in the queue would get the slots.
        plane.controller.step(plane.now)

    work = threading.Thread(target=controller_and_supervisor)
    work.start()
    assert call(["down"]) == 0
    work.join(5)
    told = capsys.readouterr().out
    assert ended == [host]
    assert f"{running} cancelled" in told and f"octavo resume {running} --home {home.path}" in told
    assert "it has no checkpoint" in told
    assert f"{waiting} queued: it starts at the next `octavo up`" in told
    assert f"octavo resume {waiting}" not in told


def test_the_closing_words_name_every_folder_of_the_wandb_run_and_one_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [tmp_path / "wandb" / f"offline-run-2026010{n}_000000-toy" for n in (1, 2)]
    for run in runs:
        run.mkdir(parents=True)
        (run / "run-toy.wandb").touch()
    (tmp_path / "summary.json").write_text(
        json.dumps({"comm": {"bytes": 296816.0, "ratio": 1.976}})
    )
    job = {"id": "toy-1", "state": "cancelled", "reason": "asked", "job_dir": str(tmp_path)}
    conclude(job, Output.table, sys.stdout, tmp_path / "controller", 2)
    told = capsys.readouterr().out
    assert "bytes 2.968e+05, ratio 1.976\n" in told
    assert f"wandb sync {runs[0]} {runs[1]}" in told
    assert f"octavo up --slots 2 --home {tmp_path}/controller" in told
    assert f"octavo resume toy-1 --home {tmp_path}/controller" in told


def test_a_job_that_can_never_fit_is_not_told_to_be_resumed(plane: ControlPlane) -> None:
    never = plane.submit(num_nodes=1, slots_per_node=None, gpus_per_node=2)
    other = plane.submit()
    plane.steps(2)
    rows = {name: job_json(plane.store.job(name)) for name in (never, other)}
    assert rows[never]["state"] == "failed"
    assert not could_go_on(rows[never])
    assert could_go_on(rows[other])


def test_a_name_of_several_jobs_is_told_with_those_it_could_mean(
    home: Home, plane: ControlPlane, capsys: pytest.CaptureFixture[str]
) -> None:
    twins = {plane.submit("twin"), plane.submit("twin")}
    for command in ("status", "events", "logs", "cancel", "watch", "report", "pause", "resume"):
        assert call([command, "twin", "-o", "json"]) == 1
        assert set(json.loads(capsys.readouterr().err)["candidates"]) == twins
    assert call(["status", "twin"]) == 1
    told = capsys.readouterr().err.splitlines()
    assert {line.strip() for line in told[2:]} == twins and "name one of them" in told[1]


def test_an_unknown_job_is_not_found(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("status", "events", "logs", "cancel", "watch", "report"):
        assert call([command, "nobody"]) == 102
    assert "no job 'nobody'" in capsys.readouterr().err


def test_a_name_that_is_empty_or_no_text_is_told_as_such(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["status"], ["cancel"], ["token", "revoke"], ["nodes", "release"]):
        assert call([*command, ""]) == 2
        assert "is named: the word for it is empty" in capsys.readouterr().err
        assert call([*command, ".."]) == 102
        assert "there is no" in capsys.readouterr().err
    assert call(["status", "\udcff"]) == 102
    assert call(["cancel", "x", "--reason", "\udcff"]) == 2
    assert "can't be sent to a controller" in capsys.readouterr().err
    assert call(["status", "x" * 100_000]) in (2, 102)


def test_without_words_the_help_is_shown_and_the_version_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call([]) == 2
    assert "Commands:" in capsys.readouterr().err
    assert call(["--version"]) == 0
    assert capsys.readouterr().out == f"octavo {version('octavo')}\n"


@pytest.mark.parametrize("form", [[], ["-o", "json"]])
def test_a_home_that_can_not_be_made_is_told_with_its_remedy(
    form: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert call(["up", "--home", str(tmp_path / "file" / "home"), *form]) == 1
    told = capsys.readouterr().err
    assert f"in {tmp_path}/file/home: Not a directory" in told
    assert "--home or $OCTAVO_HOME" in told


def test_where_room_is_scarce_only_the_reason_of_a_listed_job_is_cut(
    plane: ControlPlane, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {**job_json(plane.store.job(plane.submit("a-job-with-a-name"))), "reason": "word " * 80}
    print_jobs([row])
    assert row["reason"].strip() in capsys.readouterr().out
    print_jobs([row], width=100)
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["JOB", "STATE", "STEP", "LOSS", "ATTEMPT", "AGE", "REASON"]
    assert line.startswith(f"{row['id']} queued 0/")
    assert "word word" in line and line.endswith("…") and len(line) == 100


def test_usage_errors_have_their_code(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["lst"], ["status"], ["list", "-o", "xml"], ["logs", "x", "--rank", "-1"]):
        assert call(command) == 2
    assert call(["--help"]) == 0
    assert "submit" in capsys.readouterr().out


def test_the_token_is_created_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    assert home.token() is None
    token = home.token(create=True)
    assert token and len(token) >= 32
    assert stat.S_IMODE((home.path / "token").stat().st_mode) == 0o600
    assert Home(home.path).token(create=True) == token
    (home.path / "token").chmod(0o640)
    with pytest.raises(TokenExposedError):
        home.token()


def test_a_reader_that_has_had_enough_is_no_error(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "orchestrator.cli.main",
        "submit",
        "--dry-run",
        job_file(tmp_path),
    ]
    script = 'out=$("$@" | head -1; echo "${PIPESTATUS[0]}"); echo "$out"'
    done = subprocess.run(["bash", "-c", script, "x", *command], capture_output=True, text=True)
    assert done.stdout.startswith("# linears: native: ")
    assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


@pytest.mark.parametrize(
    "module",
    ["cli.main", "spec.job", "api.client", "lifecycle", "recovery.policy", "cli.run", "cli.up"],
)
def test_the_command_starts_without_torch_ray_or_wandb(module: str) -> None:
    code = f"""
import sys, orchestrator.{module}
heavy = {{"torch", "ray", "wandb", "deepspeed", "sqlalchemy", "fastapi"}} & set(sys.modules)
sys.exit(str(heavy) if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
