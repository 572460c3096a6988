"""What `octavo deploy` renders for Slurm and for hosts of one's own, run on hosts of this machine.

    python -m tests.hosts.rendered slurm      the batch script, by a stand-in for srun that only
                                              places processes, trains a job to its end
    python -m tests.hosts.rendered on-prem    the launcher's commands, as `ray up` runs them over
                                              ssh, a job by the API, and `octavo doctor --group`

Needs root and iproute2; `make deploy-hosts` runs both.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import yaml

from deploy.cluster_profile import Target, parse_profile
from deploy.rendered import Rendered
from deploy.targets import render
from orchestrator.client import Client
from orchestrator.home import Home
from tests.hosts.machines import Machines, environment

SLOTS = 2
TOGETHER_S = 300.0
ENVIRONMENT = Path(sys.executable).parents[1]

JOB = """\
name: rendered
num_nodes: 2
slots_per_node: 1
parallelism: {data: 2}
model: {hidden_size: 64, num_layers: 2, num_heads: 2}
data: {source: python-stdlib}
training: {steps: 12, seq_len: 64, train_batch_size: 4, train_micro_batch_size_per_gpu: 2,
           lr: 1.0e-3}
precision: fp8
communication_data_type: fp8
snapshots: {every: 5}
checkpoint: {every: 100}
wandb: {mode: disabled}
"""


def profile(machines: Machines, target: Target) -> str:
    """A cluster profile of the machines; on-prem's head is a machine of its own."""
    shared = machines.folder
    hosts = machines.addresses[1:] if target == "on-prem" else machines.addresses
    named = f", hosts: [{', '.join(hosts)}]" if target == "on-prem" else ""
    return f"""\
name: tried
head: {{address: {machines.addresses[0]}}}
node_groups:
  - {{name: cpu, cpus: {SLOTS}, memory: 4Gi, shared_memory: 1Gi, count: {len(hosts)}{named}}}
network: {{interface: eth0}}
hosts: {{environment: {ENVIRONMENT}}}
storage: {{home: {{path: {shared}/home}}, jobs: {{path: {shared}/jobs}}}}
security:
  {{ray_token_file: {shared}/token, listen: {machines.addresses[0]}, plain_http: true, port: 8443}}
"""


def files(machines: Machines, target: Target) -> list[Rendered]:
    text = profile(machines, target)
    return render(parse_profile(text, "cluster.yaml", target)[0], target)


def write_token(machines: Machines) -> Path:
    token = machines.folder / "token"
    token.write_text("0123456789abcdef" * 2)
    token.chmod(0o600)
    return token


def write_job(machines: Machines) -> Path:
    job = machines.folder / "job.yaml"
    job.write_text(JOB)
    return job


def run_slurm(machines: Machines) -> dict[str, object]:
    """The batch script to its end; the job as the store has it. Raises RuntimeError."""
    write_token(machines)
    job = write_job(machines)
    (file,) = files(machines, "slurm")
    script = machines.folder / file.name
    script.write_text(file.text)
    tools = machines.folder / "bin"
    tools.mkdir()
    shutil.copy(Path(__file__).with_name("srun"), tools)
    names = " ".join(machines.addresses)
    (tools / "scontrol").write_text(f"#!/bin/sh\nprintf '%s\\n' {names}\n")
    (tools / "scontrol").chmod(0o755)
    env = environment(machines.folder, SLURM_JOB_ID="1", SLURM_JOB_NODELIST=names)
    env["PATH"] = f"{tools}:{env['PATH']}"
    env["OCTAVO_MACHINES"] = " ".join(str(machine.pid) for machine in machines.hosts)
    log = machines.folder / "batch.log"
    with log.open("w") as out:
        # In the network of the first node, as Slurm runs it; srun has to see all machines.
        batch = machines.hosts[0].host.popen(
            ["bash", str(script), str(job)],
            env=env,
            cwd=machines.folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            code: int | None = batch.wait(TOGETHER_S)
        except subprocess.TimeoutExpired:
            code = None
    told = log.read_text(errors="replace")
    if code != 0:
        raise RuntimeError(f"the script ended with {code}:\n{told[-6000:]}")
    return {"said": told.splitlines()[-8:]}


def run_on_prem(machines: Machines) -> dict[str, object]:
    """The launcher's commands on head and nodes, then a job; the job at its end."""
    token = write_token(machines)
    (file,) = files(machines, "on-prem")
    commands = yaml.safe_load(file.text)
    env = environment(machines.folder, RAY_HEAD_IP=machines.addresses[0])
    env["RAY_AUTH_TOKEN_PATH"] = str(token)
    head, *nodes = machines.hosts
    # With it the head's own autoscaler would start the nodes over ssh, which this stands in for.
    scaling = " --autoscaling-config=~/ray_bootstrap_config.yaml"
    for machine, key in [
        (head, "head_start_ray_commands"),
        *((node, "worker_start_ray_commands") for node in nodes),
    ]:
        for command in commands[key]:
            done = machine.run(command.replace(scaling, ""), env, timeout_s=TOGETHER_S)
            if done.returncode != 0:
                raise RuntimeError(f"{machine.address}: {command}\n{done.stdout[-6000:]}")
    client = Client.of_home(Home(machines.folder / "home"))
    job = client.submit(yaml.safe_load(JOB), "job.yaml", key="rendered")
    deadline = time.monotonic() + TOGETHER_S
    while not (found := client.job(str(job["id"])))["settled"]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"not at its end after {TOGETHER_S:.0f} s: {found}")
        time.sleep(0.2)
    octavo = f"{ENVIRONMENT}/bin/octavo"
    where = f"--home {machines.folder}/home --storage {machines.folder}/jobs"
    looked = head.run(f"{octavo} doctor --group cpu --no-wandb -o json {where}", env)
    doctor = json.loads(looked.stdout)
    if "counts" not in doctor:
        raise RuntimeError(f"the doctor: {looked.stdout}")
    return {
        "job": {k: found[k] for k in ("id", "state", "step", "reason", "nodes")},
        "doctor": {
            "exit_code": looked.returncode,
            "counts": doctor["counts"],
            "nodes": sorted({f["node"] for f in doctor["findings"]} - {""}),
            "worse": [f for f in doctor["findings"] if f["level"] != "ok"],
        },
    }


def main() -> int:
    """Entry of ``python -m tests.hosts.rendered``."""
    for target in sys.argv[1:] or ["slurm", "on-prem"]:
        began = time.monotonic()
        with Machines(3 if target == "on-prem" else 2) as machines:
            found = (run_on_prem if target == "on-prem" else run_slurm)(machines)
        print(
            json.dumps({"target": target, "seconds": time.monotonic() - began, **found}, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
