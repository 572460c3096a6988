"""What of one machine stands in the way of training.

A check is a small pure function of ``MachineFacts``; a new one is a new function in ``CHECKS``.
Promises: pure; each finding is ok, a warning (jobs run, but worse than they could) or an error
(jobs won't run), says what was found, and what to do; a fact that could not be had is told and is
no pass. What only shows between machines is ``orchestrator.doctor.comparison``'s.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from launch.machine_facts import UNLIMITED, Interface, MachineFacts
from parallel.precision.choice import recipes_on

LEAST_CUDA = (12, 1)
LEAST_PYTHON, BEYOND_PYTHON = (3, 11), (3, 13)
LEAST_DRIVER = {12: 525, 13: 580}
"""NVIDIA's oldest driver for a major version of CUDA, by its compatibility table."""
OPEN_FILES = (1024, 65536)
"""Below the first Ray fails on one node, below the second with many."""
LEAST_SHM = 1 << 30
SHM_SHARE = 0.1
"""Of memory; Ray wants 0.3 for its objects, which snapshots are among."""
LEAST_PROCESSES = 4096
SLOW_MB_S = 100.0
LEAST_FREE = 10 << 30


class Level(StrEnum):
    """How much a finding matters."""

    ok = "ok"
    warning = "warning"
    error = "error"


@dataclass(frozen=True, slots=True)
class MachineFinding:
    """One thing looked at."""

    check: str
    level: Level
    message: str
    remedy: str = ""
    node: str = ""
    """Empty: this machine, or all nodes together."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


Check = Callable[[MachineFacts], Iterator[MachineFinding]]


def python(facts: MachineFacts) -> Iterator[MachineFinding]:
    """Of the versions that Octavo is written for."""
    have = _numbers(facts.python)[:2]
    if LEAST_PYTHON <= have < BEYOND_PYTHON:
        yield MachineFinding("python", Level.ok, f"Python {facts.python}")
    else:
        yield MachineFinding(
            "python",
            Level.error,
            f"Python {facts.python}",
            "install Octavo in a Python 3.11 or 3.12",
        )


def packages(facts: MachineFacts) -> Iterator[MachineFinding]:
    """Those that nothing runs without."""
    for name in ("torch", "deepspeed", "ray"):
        if name in facts.packages:
            yield MachineFinding(name, Level.ok, f"{name} {facts.packages[name]}")
        else:
            yield MachineFinding(
                name, Level.error, f"{name} is not installed", "pip install octavo"
            )


def driver(facts: MachineFacts) -> Iterator[MachineFinding]:
    """NVIDIA's driver against the CUDA of torch."""
    if facts.driver_error:
        remedy = "run nvidia-smi: it says what is wrong; after an update the machine is restarted"
        yield MachineFinding(
            "driver", Level.error, f"the driver fails: {facts.driver_error}", remedy
        )
        return
    if not facts.driver:
        yield MachineFinding("driver", Level.ok, "no NVIDIA driver: jobs run on CPU here")
        return
    major = (_numbers(str(facts.devices.get("cuda", ""))) or (0,))[0]
    least = LEAST_DRIVER.get(major, 0)
    told = f"driver {facts.driver}"
    if facts.driver_cuda:
        told += f", CUDA up to {facts.driver_cuda}"
    if (_numbers(facts.driver) or (0,))[0] < least:
        remedy = f"update the driver to {least} or newer, or take a torch for an older CUDA"
        told = f"{told}: too old for torch's CUDA {facts.devices.get('cuda')}"
        yield MachineFinding("driver", Level.error, told, remedy)
    else:
        yield MachineFinding("driver", Level.ok, told)


def cuda(facts: MachineFacts) -> Iterator[MachineFinding]:
    """What torch was built for, and whether it finds the devices."""
    error, found = facts.devices.get("error"), facts.devices.get("devices", [])
    version = str(facts.devices.get("cuda", ""))
    if error:
        yield MachineFinding(
            "cuda", Level.error, str(error), "python -c 'import torch' shows all of it"
        )
    elif facts.driver and not version:
        remedy = "install a torch built for CUDA 12.1 or newer, or take NVIDIA's PyTorch image"
        yield MachineFinding(
            "cuda", Level.error, "this torch is one for CPUs, and there are GPUs", remedy
        )
    elif facts.driver and not found:
        remedy = "look at CUDA_VISIBLE_DEVICES, and at the container's --gpus"
        yield MachineFinding(
            "cuda", Level.error, "torch sees no device, and the driver runs", remedy
        )
    elif version and _numbers(version) < LEAST_CUDA:
        remedy = "FP8 needs CUDA 12.1: install a newer torch"
        yield MachineFinding("cuda", Level.error, f"torch is built for CUDA {version}", remedy)
    elif found:
        yield MachineFinding(
            "cuda", Level.ok, f"CUDA {version}, NCCL {facts.devices.get('nccl') or '?'}"
        )


def devices(facts: MachineFacts) -> Iterator[MachineFinding]:
    """Which recipes the devices allow, on Transformer Engine."""
    found = facts.devices.get("devices", [])
    if not found:
        if not facts.driver and not facts.devices.get("error"):
            told = "no GPU: FP8 runs in Octavo's own float8 numerics (native), every recipe"
            yield MachineFinding("devices", Level.ok, told)
        return
    kinds = sorted({(d["name"], tuple(d["capability"])) for d in found})
    for name, capability in kinds:
        count = sum(d["name"] == name for d in found)
        recipes = recipes_on((capability[0], capability[1]))
        told = f"{count} × {name}, capability {capability[0]}.{capability[1]}: "
        if recipes:
            yield MachineFinding("devices", Level.ok, told + f"FP8 recipes {', '.join(recipes)}")
        else:
            remedy = "FP8 in hardware begins with 8.9; elsewhere use precision: bf16"
            told += "no FP8 in hardware, native numerics only"
            yield MachineFinding("devices", Level.warning, told, remedy)
    if len(kinds) > 1:
        remedy = "make a node group of each kind: ranks wait for the slowest"
        yield MachineFinding("devices", Level.warning, "the devices of this machine differ", remedy)


def engine(facts: MachineFacts) -> Iterator[MachineFinding]:
    """Transformer Engine, and its own reasons."""
    told = facts.devices.get("engine")
    if not isinstance(told, Mapping):
        if not facts.devices.get("devices") and not facts.devices.get("error"):
            yield MachineFinding("transformer-engine", Level.ok, "not needed without a GPU")
        return
    if not told["version"]:
        problem = str(told["problem"] or "it is not installed")
        remedy = "take NVIDIA's PyTorch image, or pip install 'octavo[te]'; native runs meanwhile"
        yield MachineFinding("transformer-engine", Level.warning, problem, remedy)
        return
    yield MachineFinding("transformer-engine", Level.ok, f"Transformer Engine {told['version']}")
    for recipe, why in sorted(told["unsupported"].items()):
        # Not a fault: an older device can't, and says so.
        yield MachineFinding("transformer-engine", Level.ok, f"{recipe} can't run here: {why}")


def topology(facts: MachineFacts) -> Iterator[MachineFinding]:
    """How the GPUs of a machine reach each other."""
    links = gpu_links(facts.topology)
    if not links:
        return
    worst = {kind for kind in links if not kind.startswith("NV")}
    if not worst:
        yield MachineFinding("topology", Level.ok, f"GPUs over NVLink ({', '.join(sorted(links))})")
        return
    slow = worst & {"SYS", "NODE", "PHB"}
    told = f"GPUs reach each other by {', '.join(sorted(links))}"
    remedy = "keep tensor parallelism at 1: it speaks every layer, and this is PCIe"
    if slow:
        remedy += "; between sockets (SYS, NODE) it is slowest"
    yield MachineFinding("topology", Level.warning, told, remedy)


def network(facts: MachineFacts) -> Iterator[MachineFinding]:
    """Interfaces, and those that gloo and NCCL are told to take."""
    up = [i for i in facts.interfaces if i.up and _reached(i)]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        named = facts.environment.get(variable, "").lstrip("^=")
        names = [name for name in named.split(",") if name]
        if facts.environment.get(variable, "").startswith("^"):
            continue
        for name in names:
            if not any(i.name == name or i.name.startswith(name) for i in up):
                there = ", ".join(i.name for i in up) or "none"
                told = f"{variable}={name}, which is not up here; there are {there}"
                yield MachineFinding("network", Level.error, told, f"set {variable} to one of them")
    if not up:
        told = "no interface but the loopback is up: one machine alone"
        yield MachineFinding(
            "network", Level.warning, told, "for several nodes, see to its network"
        )
        return
    shown = ", ".join(f"{i.name} ({_speed(i.mbit_s)}{_reached(i)})" for i in up[:6])
    yield MachineFinding("network", Level.ok, shown)
    if facts.rdma:
        yield MachineFinding("network", Level.ok, f"RDMA: {', '.join(facts.rdma)}")
    elif len(facts.devices.get("devices", [])) > 1:
        remedy = "for several GPU nodes see that /dev/infiniband is in the container"
        yield MachineFinding("network", Level.warning, "no RDMA adapter is seen", remedy)


def shared_memory(facts: MachineFacts) -> Iterator[MachineFinding]:
    """Room for Ray's objects and NCCL's buffers."""
    told = f"/dev/shm has {_gb(facts.shm_bytes)}"
    remedy = "give the container more: --shm-size or --ipc=host; in Kubernetes shared_memory:"
    if facts.shm_bytes < LEAST_SHM:
        yield MachineFinding("shared-memory", Level.error, told, remedy)
    elif facts.shm_bytes < SHM_SHARE * facts.memory_bytes:
        told = f"{told} of {_gb(facts.memory_bytes)} of memory"
        yield MachineFinding("shared-memory", Level.warning, told, remedy)
    else:
        yield MachineFinding("shared-memory", Level.ok, told)


def limits(facts: MachineFacts) -> Iterator[MachineFinding]:
    """What one user may have at once."""
    files = facts.open_files
    if files != UNLIMITED and files < OPEN_FILES[1]:
        level = Level.error if files < OPEN_FILES[0] else Level.warning
        remedy = "ulimit -n 65536 before `ray start`, on every node"
        yield MachineFinding("limits", level, f"{files} open files at most", remedy)
    else:
        yield MachineFinding("limits", Level.ok, f"{_number(files)} open files")
    if facts.processes != UNLIMITED and facts.processes < LEAST_PROCESSES:
        told = f"{facts.processes} processes at most"
        yield MachineFinding(
            "limits", Level.warning, told, "ulimit -u 65536; Ray starts threads by dozens"
        )
    if facts.rdma and facts.locked_memory != UNLIMITED:
        told = f"{_gb(facts.locked_memory)} of locked memory, and RDMA locks what it sends"
        remedy = "ulimit -l unlimited; of containers, --ulimit memlock=-1 or LimitMEMLOCK"
        yield MachineFinding("limits", Level.error, told, remedy)


def clock(facts: MachineFacts) -> Iterator[MachineFinding]:
    """Whether somebody holds the clock."""
    if facts.clock_synchronised is None:
        yield MachineFinding(
            "clock", Level.ok, "not to be asked here; nodes are compared with --group"
        )
    elif facts.clock_synchronised:
        yield MachineFinding("clock", Level.ok, "held by a time service")
    else:
        remedy = "start chronyd or systemd-timesyncd: events of nodes are ordered by their clocks"
        yield MachineFinding("clock", Level.warning, "not held by any time service", remedy)


def storage(facts: MachineFacts) -> Iterator[MachineFinding]:
    """Whether jobs' directories can be made, and how fast they are."""
    told = facts.storage
    folder = str(told.get("folder", ""))
    if error := told.get("error"):
        remedy = "name a folder that the controller and all ranks may write to"
        yield MachineFinding("storage", Level.error, f"{folder}: {error}", remedy)
        return
    if told.get("seen") is False:
        remedy = "mount the same folder there: checkpoints are written by all nodes"
        told_so = f"{folder} is another one here: a file of the first node is not in it"
        yield MachineFinding("storage", Level.error, told_so, remedy)
        return
    speed, free = float(told.get("mb_s", 0.0)), int(told.get("free_bytes", 0))
    shown = f"{folder}: {speed:.0f} MB/s written, {_gb(free)} free"
    if free < LEAST_FREE:
        remedy = "make room: a checkpoint takes 16 bytes a parameter"
        yield MachineFinding("storage", Level.warning, shown, remedy)
    elif speed < SLOW_MB_S:
        remedy = "checkpoints are written beside training; raise checkpoint.every if some are left"
        yield MachineFinding("storage", Level.warning, shown, f"{remedy} out")
    else:
        yield MachineFinding("storage", Level.ok, shown)


def token(facts: MachineFacts) -> Iterator[MachineFinding]:
    """Ray's token, with which anyone runs anything on the cluster."""
    if not facts.token_file:
        yield MachineFinding("ray-token", Level.ok, "no file with Ray's token here")
    elif facts.token_mode & 0o077:
        told = f"{facts.token_file} can be read by others ({facts.token_mode:04o})"
        yield MachineFinding("ray-token", Level.error, told, f"chmod 600 {facts.token_file}")
    else:
        yield MachineFinding("ray-token", Level.ok, f"{facts.token_file} is its owner's alone")


def wandb(facts: MachineFacts) -> Iterator[MachineFinding]:
    """Whether runs reach W&B's server."""
    told = facts.wandb
    if not told:
        return
    if told.get("mode") in ("offline", "disabled", "dryrun"):
        yield MachineFinding("wandb", Level.ok, f"WANDB_MODE is {told['mode']}")
    elif error := told.get("error"):
        where = told.get("url", "its server")
        remedy = "runs are kept offline and `wandb sync` sends them; WANDB_MODE=offline says so"
        yield MachineFinding("wandb", Level.warning, f"{where} can't be reached: {error}", remedy)
    elif not told.get("key"):
        remedy = "`wandb login` as the user that Ray runs as, or WANDB_API_KEY by a secret"
        yield MachineFinding("wandb", Level.warning, "no key: runs are kept offline", remedy)
    else:
        yield MachineFinding("wandb", Level.ok, f"{told['url']} answers, and there is a key")


CHECKS: tuple[Check, ...] = (
    python,
    packages,
    driver,
    cuda,
    devices,
    engine,
    topology,
    network,
    shared_memory,
    limits,
    clock,
    storage,
    token,
    wandb,
)


def examine(facts: MachineFacts, node: str = "") -> list[MachineFinding]:
    """All findings of one machine."""
    return [
        MachineFinding(f.check, f.level, f.message, f.remedy, node)
        for check in CHECKS
        for f in check(facts)
    ]


def gpu_links(matrix: str) -> set[str]:
    """Kinds of links between GPUs in what `nvidia-smi topo -m` shows: NV18, PIX, PHB, SYS, …"""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", matrix)
    kinds = set()
    rows = [line.split() for line in plain.splitlines()]
    header = next((row for row in rows if row and row[0] == "GPU0"), [])
    count = sum(bool(re.fullmatch(r"GPU\d+", word)) for word in header)
    for row in rows:
        if row and re.fullmatch(r"GPU\d+", row[0]) and row is not header:
            kinds |= {word for word in row[1 : count + 1] if word != "X"}
    return kinds


def _reached(interface: Interface) -> str:
    """Its first address that others reach, IPv4's first; empty: none."""
    beyond = [a for a in interface.addresses if not a.startswith(("fe80:", "169.254."))]
    return min(beyond, key=lambda address: ":" in address, default="")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text))


def _number(value: int) -> str:
    return "any number of" if value == UNLIMITED else str(value)


def _speed(mbit_s: int) -> str:
    return f"{mbit_s / 1000:g} Gbit/s, " if mbit_s > 0 else ""


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g} GB"
