"""What `octavo deploy` renders for Slurm and for hosts of one's own, run on hosts of this machine.

    python -m tests.hosts.rendered slurm      the batch script, by a stand-in for srun that only
                                              places processes: when its time is up it pauses the
                                              job and asks to be queued again, and started again it
                                              trains it to its end
    python -m tests.hosts.rendered on-prem    the launcher's commands, as `ray up` runs them over
                                              ssh, a job by the API, and `octavo doctor --group`
    python -m tests.hosts.rendered systemd    the units' commands, started again when they end; the
                                              head's is told to end while a job trains: it pauses it
                                              and its next start resumes it
    python -m tests.hosts.rendered kuberay    the containers' commands and probes, with variables
                                              that KubeRay would set, then a job

Needs root and iproute2; `make deploy-hosts` runs all four.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from deploy.cluster_profile import Target
from deploy.profile_file import parse_profile
from deploy.rendered import Rendered
from deploy.targets import render
from orchestrator.api.client import Client
from orchestrator.api.client_errors import ClientError
from orchestrator.home.folder import Home
from tests.hosts.machines import Machines, environment
from tests.hosts.network import ROOT

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
    """A cluster profile of the machines; the head of hosts of one's own is a machine of its own."""
    shared = machines.folder
    own = target in ("on-prem", "systemd")
    hosts = machines.addresses if target == "slurm" else machines.addresses[1:]
    named = f", hosts: [{', '.join(hosts)}]" if own else ""
    return f"""\
name: tried
head: {{address: {machines.addresses[0]}}}
node_groups:
  - {{name: cpu, cpus: {SLOTS}, memory: 4Gi, shared_memory: 1Gi, count: {len(hosts)}{named}}}
network: {{interface: eth0}}
image: {{cpu: "octavo:tried"}}
hosts: {{environment: {ENVIRONMENT}}}
storage: {{home: {{path: {shared}/home}}, jobs: {{path: {shared}/jobs}}}}
security:
  {{ray_token_file: {shared}/token, listen: {machines.addresses[0]}, plain_http: true}}
"""


def files(machines: Machines, target: Target) -> list[Rendered]:
    text = profile(machines, target)
    return render(parse_profile(text, "cluster.yaml", target)[0], target)


def write_token(machines: Machines) -> Path:
    token = machines.folder / "token"
    token.write_text("0123456789abcdef" * 2)
    token.chmod(0o600)
    return token


def run_slurm(machines: Machines) -> dict[str, object]:
    """The batch script twice, as an allocation whose time is up and the next one of its job; what
    it said. Raises RuntimeError."""
    write_token(machines)
    job = machines.folder / "job.yaml"
    job.write_text(JOB.replace("steps: 12", "steps: 60"))
    (file,) = files(machines, "slurm")
    script = machines.folder / file.name
    script.write_text(file.text)
    tools = machines.folder / "bin"
    tools.mkdir()
    shutil.copy(Path(__file__).with_name("srun"), tools)
    names = " ".join(machines.addresses)
    queued = machines.folder / "queued"
    shown = f"printf '%s\\n' {names}"
    (tools / "scontrol").write_text(
        f'#!/bin/sh\nif [ "$1" = show ]; then {shown}; else echo "$*" >> {queued}; fi\n'
    )
    (tools / "scontrol").chmod(0o755)
    env = environment(machines.folder, SLURM_JOB_ID="1", SLURM_JOB_NODELIST=names)
    env["PATH"] = f"{tools}:{env['PATH']}"
    env["OCTAVO_MACHINES"] = " ".join(str(machine.pid) for machine in machines.hosts)
    log = machines.folder / "batch.log"
    home = Home(machines.folder / "home" / "1")
    codes: list[int | None] = []
    for allocation in range(2):
        with log.open("a") as out:
            # In the network of the first node, as Slurm runs it; srun has to see all machines.
            batch = machines.hosts[0].host.popen(
                ["bash", str(script), str(job)],
                env=env,
                cwd=machines.folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        if not allocation:
            awaited(home, first_job(home), lambda found: found["step"] >= 3, "its first steps")
            # Of the batch shell alone, as --signal=B:USR1@… says.
            os.kill(batch.pid, signal.SIGUSR1)
        try:
            codes.append(batch.wait(TOGETHER_S))
        except subprocess.TimeoutExpired:
            codes.append(None)
    told = log.read_text(errors="replace")
    if codes != [101, 0] or queued.read_text() != "requeue 1\n":
        raise RuntimeError(f"the script ended with {codes}:\n{told[-6000:]}")
    kept = ("rendered-", "pausing", "the time is up")
    return {"codes": codes, "said": [line for line in told.splitlines() if line.startswith(kept)]}


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


def run_systemd(machines: Machines) -> dict[str, object]:
    """The units' commands; a job that lives through the end of the head's. The job at its end."""
    write_token(machines)
    head, *nodes = files(machines, "systemd")
    folder = machines.folder
    services = []
    for machine, unit in [(machines.hosts[0], head), *((m, nodes[0]) for m in machines.hosts[1:])]:
        env, command = unit_command(unit.text, folder)
        # As `Restart=always` does.
        script = f"while true; do {command}; sleep 1; done"
        with (machine.folder / "unit.log").open("w") as out:
            services.append(
                machine.host.popen(
                    machine.command(["bash", "-c", script]),
                    env={**environment(folder), **env},
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                )
            )
    home = Home(folder / "home")
    client = reached(home)
    spec = yaml.safe_load(JOB)
    spec["training"]["steps"] = 60
    job = str(client.submit(spec, "job.yaml", key="rendered")["id"])
    awaited(home, job, lambda found: found["step"] >= 3, "its first steps")
    # As `systemctl restart` does: the unit's own process is signalled.
    (shell,) = children(services[0].pid)
    (serving,) = children(shell)
    os.kill(serving, signal.SIGTERM)
    found = awaited(home, job, lambda found: found["state"] == "succeeded", "its end")
    kinds = [event["kind"] for event in reached(home).events(job)["events"]]
    return {
        "job": {k: found[k] for k in ("id", "state", "step", "reason", "nodes")},
        "events": kinds,
    }


def run_kuberay(machines: Machines) -> dict[str, object]:
    """The containers' commands until their probes pass, then a job; the job at its end."""
    token = write_token(machines)
    (file,) = files(machines, "kuberay")
    cluster = next(d for d in yaml.safe_load_all(file.text) if d["kind"] == "RayCluster")["spec"]
    (group,) = cluster["workerGroupSpecs"]
    flags = "".join(f" --{name}={value}" for name, value in group["rayStartParams"].items())
    address = f"{machines.addresses[0]}:6379"
    generated = f"ray start --address={address} --metrics-export-port=8080 --block {flags}"
    pods = [cluster["headGroupSpec"], *[group] * (len(machines.hosts) - 1)]
    containers = [pod["template"]["spec"]["containers"][0] for pod in pods]
    for machine, container in zip(machines.hosts, containers, strict=True):
        env = {v["name"]: v["value"] for v in container["env"] if "value" in v}
        # What KubeRay sets, and Kubernetes of the pod.
        env |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token.read_text()}
        env |= {"POD_IP": machine.address, "KUBERAY_GEN_RAY_START_CMD": generated}
        env["PATH"] = f"{ENVIRONMENT}/bin:{os.environ['PATH']}"
        with (machine.folder / "unit.log").open("w") as out:
            machine.host.popen(
                machine.command([*container["command"], *container["args"]]),
                env={**environment(machines.folder), **env},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
    ready = []
    began = time.monotonic()
    for machine, container in zip(machines.hosts, containers, strict=True):
        probe = [f"{ENVIRONMENT}/bin/python", *container["readinessProbe"]["exec"]["command"][1:]]
        while subprocess.run(machine.command(probe), capture_output=True).returncode != 0:
            if time.monotonic() - began > TOGETHER_S:
                raise RuntimeError(f"{machine.address} does not become ready: {probe}")
            time.sleep(1)
        ready.append(round(time.monotonic() - began, 1))
    home = Home(machines.folder / "home")
    job = str(reached(home).submit(yaml.safe_load(JOB), "job.yaml", key="rendered")["id"])
    found = awaited(home, job, lambda found: bool(found["settled"]), "its end")
    return {
        "ready_s": ready,
        "job": {k: found[k] for k in ("id", "state", "step", "reason")},
    }


def unit_command(text: str, folder: Path) -> tuple[dict[str, str], str]:
    """Environment and command of a unit, its credentials in a folder."""
    lines = [line.replace("%d/ray-token", f"{folder}/token") for line in text.splitlines()]
    given = [line.removeprefix("Environment=") for line in lines if line.startswith("Environment=")]
    (command,) = [line.removeprefix("ExecStart=") for line in lines if "ExecStart=" in line]
    return dict(line.split("=", 1) for line in given), command


def children(pid: int) -> list[int]:
    """Ids, out here, of what a process has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def reached(home: Home) -> Client:
    """A client of the controller, once it answers."""
    deadline = time.monotonic() + TOGETHER_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ClientError):
            client = Client.of_home(home)
            if client.healthy():
                return client
            client.close()
        time.sleep(0.2)
    raise RuntimeError(f"no controller after {TOGETHER_S:.0f} s")


def first_job(home: Home) -> str:
    """The job that the controller's own process hands it."""
    deadline = time.monotonic() + TOGETHER_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ClientError):
            for job in reached(home).jobs():
                return str(job["id"])
        time.sleep(0.2)
    raise RuntimeError(f"no job after {TOGETHER_S:.0f} s")


def awaited(
    home: Home, job: str, done: Callable[[dict[str, Any]], bool], what: str
) -> dict[str, Any]:
    """The job, once ``done`` is true of it, through restarts of the controller."""
    deadline = time.monotonic() + TOGETHER_S
    found: dict[str, Any] = {}
    while time.monotonic() < deadline:
        with contextlib.suppress(ClientError):
            client = Client.of_home(home)
            try:
                found = client.job(job)
            finally:
                client.close()
            if done(found):
                return found
        time.sleep(0.1)
    raise RuntimeError(f"{job} did not come to {what} in {TOGETHER_S:.0f} s: {found}")


RUNS: dict[str, tuple[Callable[[Machines], dict[str, object]], int]] = {
    "slurm": (run_slurm, 2),
    "on-prem": (run_on_prem, 3),
    "systemd": (run_systemd, 3),
    "kuberay": (run_kuberay, 3),
}
"""What runs a target, and on how many machines."""


def main() -> int:
    """Entry of ``python -m tests.hosts.rendered``."""
    for target in sys.argv[1:] or RUNS:
        began = time.monotonic()
        run, count = RUNS[target]
        with Machines(count) as machines:
            found = run(machines)
        print(
            json.dumps({"target": target, "seconds": time.monotonic() - began, **found}, indent=1)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
