"""What one machine is: gathered here, judged elsewhere (``orchestrator.doctor.checks``).

Promises: gathering never raises and never hangs: whatever can hang (a driver, a file system over
the network, a name server) is asked in a child process that is left behind when its time is over,
and what it would have told is then an error with the seconds waited. Imports nothing heavy.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("octavo", "torch", "deepspeed", "ray", "wandb", "transformer-engine", "triton")
DEVICES_S = 90.0
"""Seconds that torch and Transformer Engine may take: cold files on a network disk are slow."""
SMI_S = 15.0
STORAGE_S = 20.0
WANDB_S = 8.0
UNLIMITED = -1
_NOT_SYNCHRONISED = 5
"""What adjtimex(2) returns then (TIME_ERROR)."""


@dataclass(frozen=True, slots=True)
class Interface:
    """One network interface that is no loopback."""

    name: str
    up: bool
    mbit_s: int
    """0: it doesn't say."""
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """One machine; errors are one line, empty where there is none."""

    host: str
    clock: float
    """Seconds since the epoch."""
    python: str
    packages: Mapping[str, str]
    """Versions, by name; those that aren't installed are left out."""
    devices: Mapping[str, Any]
    """Of ``machine_probes.devices``, or ``{"error": …}``."""
    driver: str
    """Version; empty: none."""
    driver_cuda: str
    """Newest CUDA that it runs."""
    driver_error: str
    topology: str
    """Of `nvidia-smi topo -m`."""
    interfaces: tuple[Interface, ...]
    rdma: tuple[str, ...]
    """Adapters, by name."""
    environment: Mapping[str, str]
    """The variables that gloo and NCCL choose an interface by."""
    memory_bytes: int
    shm_bytes: int
    open_files: int
    """Soft limit; -1: none. As the next two."""
    locked_memory: int
    processes: int
    clock_synchronised: bool | None
    """None: it can't be asked."""
    token_file: str
    """Of Ray; empty: there is none, or it has the token from its environment."""
    token_mode: int
    """Its permission bits."""
    storage: Mapping[str, Any]
    """Of ``machine_probes.storage``."""
    wandb: Mapping[str, Any]
    """Of ``machine_probes.wandb``; empty: not asked."""
    seconds: float


def gather(folder: str, seen: str = "", *, wandb: bool = True) -> MachineFacts:
    """Look at this machine; ``folder``: of jobs' directories. ``seen``: a file there that another
    machine has made."""
    began = time.monotonic()
    clock = time.time()
    asked = {
        "devices": Probe("devices", (), DEVICES_S),
        "storage": Probe("storage", (folder, seen), STORAGE_S),
    }
    if wandb:
        asked["wandb"] = Probe("wandb", (), WANDB_S)
    # All at once: the bounds don't add up.
    driver, driver_cuda, driver_error, topology = _driver()
    told = {name: probe.answer() for name, probe in asked.items()}
    token, mode = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token"), 0
    if "RAY_AUTH_TOKEN" not in os.environ:
        with suppress(OSError, RuntimeError):
            token = token.expanduser()
            mode = token.stat().st_mode & 0o777
    return MachineFacts(
        host=socket.gethostname(),
        clock=clock,
        python=".".join(map(str, sys.version_info[:3])),
        packages=_versions(),
        devices=told["devices"],
        driver=driver,
        driver_cuda=driver_cuda,
        driver_error=driver_error,
        topology=topology,
        interfaces=_interfaces(),
        rdma=_rdma(),
        environment={k: v for k, v in os.environ.items() if _chooses(k)},
        memory_bytes=_memory(),
        shm_bytes=_size("/dev/shm"),
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_memory=_limit(resource.RLIMIT_MEMLOCK),
        processes=_limit(resource.RLIMIT_NPROC),
        clock_synchronised=_synchronised(),
        token_file=str(token) if mode else "",
        token_mode=mode,
        storage=told["storage"],
        wandb=told.get("wandb", {}),
        seconds=time.monotonic() - began,
    )


class Probe:
    """One question in a child process, with a bound."""

    def __init__(self, name: str, arguments: Sequence[str], seconds: float) -> None:
        self._name, self._seconds = name, seconds
        self._deadline = time.monotonic() + seconds
        command = [sys.executable, "-m", "launch.machine_probes", name, *arguments]
        try:
            self._child: subprocess.Popen[bytes] | None = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            self._child, self._why = None, error.strerror or str(error)

    def answer(self) -> dict[str, Any]:
        """What it found, or ``{"error": …}``."""
        if self._child is None:
            return {"error": f"can't be asked: {self._why}"}
        try:
            said, _ = self._child.communicate(timeout=max(0.1, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            # Not waited for: a process in the middle of a dead disk's read can't be ended.
            with suppress(OSError):
                os.killpg(self._child.pid, signal.SIGKILL)
            return {"error": f"no answer in {self._seconds:.0f} s"}
        try:
            found = json.loads(said.decode(errors="replace").strip().splitlines()[-1])
        except (ValueError, IndexError):
            return {"error": f"it ended with {self._child.returncode} and said nothing"}
        return found if isinstance(found, dict) else {"error": "it said something else"}


def _driver() -> tuple[str, str, str, str]:
    """(version, newest CUDA, why not, topology) of NVIDIA's driver."""
    if shutil.which("nvidia-smi") is None:
        return "", "", "", ""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    said, error = _run(query)
    if error:
        return "", "", error, ""
    header, _ = _run(["nvidia-smi"])
    cuda = header.partition("CUDA Version:")[2].split() or [""]
    topology, _ = _run(["nvidia-smi", "topo", "-m"])
    return (said.split() or [""])[0], cuda[0], "", topology


def _run(command: Sequence[str]) -> tuple[str, str]:
    """(what it said, why it failed)."""
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        said, _ = child.communicate(timeout=SMI_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return "", f"`{' '.join(command)}` did not answer in {SMI_S:.0f} s"
    text = said.decode(errors="replace")
    if child.returncode != 0:
        return "", (text.strip().splitlines() or [f"it ended with {child.returncode}"])[-1]
    return text, ""


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _interfaces() -> tuple[Interface, ...]:
    import psutil

    stats = psutil.net_if_stats()
    found = []
    for name, entries in sorted(psutil.net_if_addrs().items()):
        kinds = (socket.AF_INET, socket.AF_INET6)
        addresses = tuple(entry.address for entry in entries if entry.family in kinds)
        if name == "lo" or name not in stats:
            continue
        found.append(Interface(name, stats[name].isup, int(stats[name].speed), addresses))
    return tuple(found)


def _rdma() -> tuple[str, ...]:
    with suppress(OSError):
        return tuple(sorted(entry.name for entry in Path("/sys/class/infiniband").iterdir()))
    return ()


def _chooses(variable: str) -> bool:
    return variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")


def _memory() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


def _size(folder: str) -> int:
    try:
        held = os.statvfs(folder)
    except OSError:
        return 0
    return held.f_frsize * held.f_blocks


def _limit(which: int) -> int:
    soft, _ = resource.getrlimit(which)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _synchronised() -> bool | None:
    """Whether the kernel's clock is held by a time service."""
    import ctypes

    try:
        # struct timex is 208 bytes, and zero modes set nothing.
        state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))
    except (OSError, AttributeError):
        return None
    return None if state < 0 else bool(state != _NOT_SYNCHRONISED)
