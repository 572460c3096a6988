"""Machines: hosts whose processes are their own, and the stand-in for srun that fills them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.hosts.machines import Machines, environment


@pytest.mark.usefixtures("_hosts_work")
def test_a_machine_sees_no_process_of_others_and_srun_places_a_task_on_each() -> None:
    with Machines(2) as machines:
        env = environment(machines.folder)
        one, two = machines.hosts
        done = one.run("sleep 60 & hostname -I; ls -d /proc/[0-9]*; touch /tmp/ray/mine", env)
        assert one.address in done.stdout
        # Its holder, what it was told to do, and what that starts: nothing of this machine's.
        assert len([w for w in done.stdout.split() if w.startswith("/proc/")]) <= 4
        assert f"/proc/{os.getpid()}\n" not in done.stdout
        assert "sleep 60" not in two.run("cat /proc/*/cmdline | tr '\\0' ' '", env).stdout
        assert two.run("ls /tmp/ray", env).stdout == ""
        env["OCTAVO_MACHINES"] = " ".join(str(machine.pid) for machine in machines.hosts)
        task = 'echo "$GROUP $SLURM_PROCID $(hostname -I)"; exit $((SLURM_PROCID * 3))'
        words = ["--nodes=2", "--export=ALL,GROUP=cpu", "bash", "-c", task]
        placed = subprocess.run(
            [str(Path(__file__).with_name("srun")), *words],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        told = sorted(line.split()[:3] for line in placed.stdout.splitlines())
        assert told == [["cpu", "0", one.address], ["cpu", "1", two.address]]
        assert placed.returncode == 3
        pids = [machine.pid for machine in machines.hosts]
    assert not any(lives(pid) for pid in pids)
    assert not machines.folder.exists()


def lives(pid: int) -> bool:
    """Whether it runs; one that nobody has waited for yet has no words any more."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False
