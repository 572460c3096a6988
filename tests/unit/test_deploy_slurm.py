"""The batch script, run with stand-ins for Slurm's commands: what it does when told to end."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.unit.deploy_profiles import SLURM, TWO_GROUPS, rendered

WAIT_S = 20.0
STEP = """\
for _ in $(seq 200); do
  [ -e "$OCTAVO_HOME/stop" ] && echo {code} > "$OCTAVO_HOME/ended-7" && exit 0
  touch "$OCTAVO_HOME/runs"
  sleep 0.05
done
"""


def run(folder: Path, number: int, code: int, slurm: str = "") -> tuple[int, str, str]:
    """A batch script that gets a signal when its step runs, which then comes to ``code``: its exit
    code, what it said, and what `scontrol` was told to do."""
    tools = folder / "bin"
    tools.mkdir()
    told = folder / "told"
    hosts = f'[ "$1" = show ] && echo node1 || echo "$*" >> {told}'
    stand_ins = {"scontrol": hosts, "getent": "echo 10.0.0.1 STREAM", "srun": STEP}
    for name, text in stand_ins.items():
        (tools / name).write_text("#!/bin/sh\n" + text.replace("{code}", str(code)) + "\n")
        (tools / name).chmod(0o755)
    (folder / "token").write_text("x")
    (folder / "job.yaml").write_text("name: toy\n")
    text = SLURM.replace("/shared/octavo", str(folder)).replace(
        "account: llm", f"account: llm{slurm}"
    )
    text += f"security: {{ray_token_file: {folder}/token}}\n"
    script = folder / "octavo.sbatch"
    (file,) = rendered("slurm", text)
    script.write_text(file.text)
    batch = subprocess.Popen(
        ["bash", str(script), str(folder / "job.yaml")],
        env={"PATH": f"{tools}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + WAIT_S
    while not (folder / "home" / "7" / "runs").exists():
        assert batch.poll() is None and time.monotonic() < deadline, "its step does not run"
        time.sleep(0.01)
    batch.send_signal(number)
    said, _ = batch.communicate(timeout=WAIT_S)
    return batch.returncode, said, told.read_text() if told.exists() else ""


def test_when_the_time_is_up_it_pauses_and_goes_into_the_queue_again(tmp_path: Path) -> None:
    code, said, told = run(tmp_path, signal.SIGUSR1, 101)
    assert (code, told) == (101, "requeue 7\n"), said
    assert "into the queue again" in said


@pytest.mark.parametrize(
    ("number", "code", "changed"),
    [
        # Somebody told it to end; the job came to its end just then; the profile says no.
        (signal.SIGTERM, 101, ""),
        (signal.SIGUSR1, 0, ""),
        (signal.SIGUSR1, 101, ", requeue: false"),
    ],
)
def test_it_does_not_for_any_other_end(
    tmp_path: Path, number: signal.Signals, code: int, changed: str
) -> None:
    ended, said, told = run(tmp_path, number, code, changed)
    assert (ended, told) == (code, ""), said


def test_slurm_signals_the_end_of_the_time_and_requeues_what_a_node_ended() -> None:
    (file,) = rendered("slurm")
    assert "#SBATCH --signal=B:USR1@300" in file.text
    assert "#SBATCH --requeue" in file.text


def test_each_groups_tasks_have_all_of_a_nodes_cpus_and_gpus() -> None:
    # Since Slurm 22.05 a step does not inherit a job's --cpus-per-task: its task has one core.
    (file,) = rendered("slurm", TWO_GROUPS)
    step = file.text[file.text.index("srun --kill-on") :]
    gpu, cpu = step.split(" : ")
    assert "--het-group=0 --ntasks-per-node=1 --cpus-per-task=96 --gpus-per-node=8" in gpu
    assert "--het-group=1 --ntasks-per-node=1 --cpus-per-task=64 --cpu-bind" in cpu
    assert "--cpu-bind=none" in gpu and "--gpus" not in cpu.split(" -- ")[0].split("node ")[0]


def test_what_ranks_find_of_the_network_is_the_same_for_every_group_of_an_allocation() -> None:
    turned = TWO_GROUPS.replace("name: mixed\n", "name: mixed\nnetwork: {rdma: none}\n")
    (file,) = rendered("slurm", turned)
    assert "export NCCL_IB_DISABLE=1" in file.text
    (file,) = rendered("slurm", TWO_GROUPS)
    assert "NCCL_IB" not in file.text
