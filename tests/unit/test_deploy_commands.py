"""``octavo deploy``: render, diff and apply, with clients that only say what they were told."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from deploy.profile_file import parse_profile
from orchestrator.cli.main import call
from orchestrator.cli.show import UNREACHABLE
from tests.unit.deploy_profiles import JOB, KUBERNETES, OWN_HOSTS, PROFILES, SLURM


@pytest.fixture
def profile(tmp_path: Path) -> str:
    file = tmp_path / "cluster.yaml"
    file.write_text(KUBERNETES)
    return str(file)


def client(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_render_writes_and_diff_tells_what_would_change(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert call(["deploy", "diff", profile, "--out", str(out)]) == 1
    assert "+kind: RayCluster" in capsys.readouterr().out
    assert call(["deploy", "render", profile, "--out", str(out)]) == 0
    assert call(["deploy", "diff", profile, "--out", str(out)]) == 0
    Path(profile).write_text(KUBERNETES.replace("max: 16", "max: 32"))
    capsys.readouterr()
    assert call(["deploy", "diff", profile, "--out", str(out), "-o", "json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["different"] is True
    assert "+      maxReplicas: 32" in told["files"][0]["diff"]


def test_what_there_is_to_note_is_in_the_object_of_json_and_else_on_stderr(
    profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["deploy", "render", profile, "-o", "json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == "" and "RDMA pins memory" in json.loads(shown.out)["notes"][0]
    assert call(["deploy", "render", profile]) == 0
    assert "RDMA pins memory" in capsys.readouterr().err


def test_a_wrong_profile_or_target_is_a_usage_error(
    profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["deploy", "render", profile, "--target", "kubray"]) == 2
    assert "did you mean 'kuberay'?" in capsys.readouterr().err
    Path(profile).write_text(KUBERNETES.replace("node_groups", "node_group"))
    assert call(["deploy", "render", profile]) == 2
    assert "did you mean 'node_groups'?" in capsys.readouterr().err


def test_a_rayjob_wants_a_job_file_that_is_right(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(["deploy", "render", profile, "--target", "rayjob"]) == 2
    assert "--job job.yaml" in capsys.readouterr().err
    job = tmp_path / "job.yaml"
    job.write_text(JOB + "trainig: {}\n")
    words = ["deploy", "render", profile, "--target", "rayjob", "--job", str(job)]
    assert call(words) == 2
    assert "did you mean 'training'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("gpus_per_node: 16\n", "gpus_per_node: 16: is more than any node of lab has: 8 GPUs"),
        ("gpus_per_node: 8\nnum_nodes: 32\n", "num_nodes: 32: is more than lab can have: 16"),
        ("slots_per_node: 200\n", "slots_per_node: 200: is more than any node of lab has: 96"),
        ("checkpoint: {storage_path: /nowhere/else}\n", "checkpoint.storage_path: '/nowhere/else'"),
        ("checkpoint: {storage_path: /octavo/jobs/../x}\n", "checkpoint.storage_path"),
        ("checkpoint: {storage_path: /octavo/jobs/mine}\n", ""),
        ("gpus_per_node: 8\nnum_nodes: 16\nparallelism: {data: 128}\n", ""),
        (
            "gpus_per_node: 8\nnum_nodes: 17\nparallelism: {data: 136}\n"
            "resources: {min_nodes: 16}\ntraining: {train_batch_size: 2176}\n",
            "",
        ),
    ],
)
def test_a_job_that_the_cluster_can_not_hold_is_refused_before_pods_wait_for_ever(
    more: str, told: str, profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB + more)
    code = call(["deploy", "render", profile, "--target", "rayjob", "--job", str(job)])
    assert (code, told in (said := capsys.readouterr()).err) == (2 if told else 0, True), said.err


def test_apply_hands_the_files_to_kubectl(
    profile: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = 'echo "$@"; grep -c kind: raycluster.yaml'
    client(tmp_path / "bin", "kubectl", told, monkeypatch)
    assert call(["deploy", "apply", profile, "--yes"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "apply --server-side --request-timeout=60s -f raycluster.yaml"
    client(tmp_path / "bin", "kubectl", "echo forbidden >&2; exit 1", monkeypatch)
    assert call(["deploy", "apply", profile, "--yes"]) == 1
    assert "forbidden" in capsys.readouterr().err


def test_diff_asks_the_cluster_where_no_folder_is_named(
    profile: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    client(tmp_path / "bin", "kubectl", "exit 0", monkeypatch)
    assert call(["deploy", "diff", profile]) == 0
    client(tmp_path / "bin", "kubectl", "echo '+ replicas: 2'; exit 1", monkeypatch)
    assert call(["deploy", "diff", profile]) == 1
    assert "+ replicas: 2" in capsys.readouterr().out
    client(tmp_path / "bin", "kubectl", "echo 'connection refused' >&2; exit 1", monkeypatch)
    assert call(["deploy", "diff", profile]) == UNREACHABLE
    assert "connection refused" in capsys.readouterr().err


def test_the_readme_applies_to_a_cluster_that_has_nothing_yet() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert "octavo deploy diff deploy/cluster.yaml" in readme
    # What differs is exit code 1, after which `&&` goes on with nothing.
    assert not re.search(r"octavo deploy diff[^\n]*&&", readme)
    namespace = readme.index("kubectl create namespace octavo")
    assert namespace < readme.index("octavo deploy apply deploy/cluster.yaml")
    profile, _ = parse_profile(KUBERNETES, "cluster.yaml")
    for secret, key in (
        (profile.security.ray_token_secret, "--from-file=auth_token="),
        (profile.redis and profile.redis.password_secret, "--from-file=password="),
        (profile.security.wandb_secret, "--from-env-file="),
    ):
        assert f"create secret generic {secret} {key}" in readme


def test_a_client_that_is_not_there_is_told_with_what_to_do(
    profile: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert call(["deploy", "apply", profile, "--yes"]) == 1
    assert "kubectl apply --server-side" in capsys.readouterr().err
    Path(profile).write_text(SLURM)
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    words = ["deploy", "apply", profile, "--target", "slurm", "--yes", "--job", str(job)]
    assert call(words) == 1
    assert f"sbatch octavo.sbatch {job}" in capsys.readouterr().err
    Path(profile).write_text(OWN_HOSTS)
    assert call(["deploy", "apply", profile, "--target", "systemd", "--yes"]) == 1
    told = capsys.readouterr().err
    assert "systemctl enable --now octavo-head.service" in told
    # All that a unit needs to start: its user, its environment, the folders that it may write.
    for needed in ("useradd", "/opt/octavo/.venv", "-o octavo -g octavo /octavo/jobs", "ray-token"):
        assert needed in told
    assert "install -d -o octavo -g octavo -m 700 /octavo/home" in told
    assert call(["deploy", "diff", profile, "--target", "systemd"]) == 2


def test_apply_asks_with_what_it_costs_and_a_no_changes_nothing(
    profile: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    client(tmp_path / "bin", "kubectl", f"touch {tmp_path / 'applied'}", monkeypatch)
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    assert call(["deploy", "apply", profile]) == 130
    assert "(55 to 440 USD an hour)" in capsys.readouterr().out
    assert call(["deploy", "apply", profile, "-o", "json"]) == 2
    assert not (tmp_path / "applied").exists()


def test_a_clouds_packages_are_asked_for_before_its_launcher_fails_on_them(
    profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(profile).write_text(PROFILES["azure"])
    assert call(["deploy", "apply", profile, "--target", "azure", "--yes"]) == 1
    assert "azure.identity" in capsys.readouterr().err


def test_a_job_file_that_is_wrong_or_missing_is_not_put_into_slurms_queue(
    profile: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path(profile).write_text(SLURM)
    client(tmp_path / "bin", "sbatch", f"touch {tmp_path / 'queued'}", monkeypatch)
    job = tmp_path / "job.yaml"
    words = ["deploy", "apply", profile, "--target", "slurm", "--yes", "--job", str(job)]
    assert call(words) == 2
    assert "can't be read" in capsys.readouterr().err
    job.write_text(JOB + "trainig: {}\n")
    assert call(words) == 2
    assert "did you mean 'training'?" in capsys.readouterr().err
    job.write_text(JOB + "gpus_per_node: 8\nnum_nodes: 5\n")
    assert call(words) == 2
    assert "num_nodes: 5: is more than lab can have: 4" in capsys.readouterr().err
    assert not (tmp_path / "queued").exists()


def test_slurm_gets_script_and_job(
    profile: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path(profile).write_text(SLURM)
    job = tmp_path / "job.yaml"
    job.write_text(JOB)
    client(tmp_path / "bin", "sbatch", 'test -x "$2" && echo "$@"', monkeypatch)
    words = ["deploy", "apply", profile, "--target", "slurm", "--yes", "--job", str(job)]
    assert call([*words, "-o", "json"]) == 0
    said = json.loads(capsys.readouterr().out)["output"]
    # Its log is written where it was called, not in a folder that is gone by then.
    assert said == f"--chdir={Path.cwd()} octavo.sbatch {job}\n"


@pytest.mark.parametrize(
    ("content", "mode", "told"),
    [(None, 0, "no token"), ("", 0o600, "no token"), ("x", 0o644, "read by others")],
)
def test_rays_token_is_looked_for_before_machines_are_started(
    content: str | None,
    mode: int,
    told: str,
    profile: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    token = tmp_path / "token"
    if content is not None:
        token.write_text(content)
        token.chmod(mode)
    given = OWN_HOSTS.replace("security: {", f"security: {{ray_token_file: {token}, ")
    Path(profile).write_text(given)
    assert call(["deploy", "apply", profile, "--target", "on-prem", "--yes"]) == 2
    assert told in capsys.readouterr().err
