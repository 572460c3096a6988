"""Hosts on one machine: a network namespace each, joined by a bridge that can be shaped.

    with Network(3) as network:
        network.shape(rate="1gbit")
        process = network.hosts[0].popen([sys.executable, "-m", "…"])
        sent = network.hosts[0].sent_bytes()

Each host has an address of its own, sees only its own interfaces and ports, and shares files
and processors with the others. Promises: whatever happens inside the block, on leaving it the
processes that were started in the hosts have ended, by their own ids, and namespaces, links and
bridge are gone; where that could not be done (SIGKILL), the next network of anybody does it, or
``sweep``. Two networks at once don't meet. The bridge has an address of its own, ``gateway``, as
a user's machine on the same network has: this process reaches the hosts, and they it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

INTERFACE = "eth0"
"""A host's interface, by its name inside."""
END_S = 10.0
"""Seconds that a host's processes may take to end after SIGKILL."""

FROZEN_S = 5.0
"""Seconds that a host's processes may take to stand still after SIGSTOP."""
ROOT = Path(__file__).parents[2]
GATEWAY = 254
"""Last number of the bridge's own address."""

_NAME = re.compile(r"\boct([0-9a-f]+)n\d+[bhvix]\d*")
"""Of a namespace, bridge or cable; the number is that of the process that made it."""
_numbers = itertools.count()


def why_not() -> str:
    """Why there can be no hosts here, or an empty string."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need iproute2, which has {' and '.join(missing)}"
    probe = f"octavo-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode != 0:
        return f"network namespaces can't be made here: {made.stderr.strip()}"
    _run("ip", "netns", "delete", probe)
    return ""


@dataclass(frozen=True, slots=True)
class Host:
    """One host; made by ``Network``."""

    name: str
    """Of its network namespace."""
    address: str
    """IPv4, reachable from the network's other hosts."""
    link: str
    """The bridge's end of its cable."""
    processes: list[subprocess.Popen[Any]] = field(default_factory=list)

    def popen(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a process on this host; it is ended with the network at the latest."""
        inside = ["ip", "netns", "exec", self.name, *command]
        environment = {**os.environ, **(env or {})}
        # A session of its own: what it starts itself is ended along with it.
        process = subprocess.Popen(inside, env=environment, start_new_session=True, **options)
        self.processes.append(process)
        return process

    def sent_bytes(self) -> int:
        """Bytes that left this host, headers and all, as its interface counts them."""
        shown = _run("ip", "-n", self.name, "-s", "-j", "link", "show", INTERFACE)
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])

    def kill(self) -> None:
        """End every process on this host at once, as a power cut does."""
        deadline = time.monotonic() + END_S
        # One that was started a moment ago may not have entered the namespace yet.
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {pids} on {self.name} do not end")
            time.sleep(0.02)
        for process in self.processes:
            process.wait(END_S)
        self.processes.clear()

    def runs(self) -> bool:
        """Whether a process that was started here still runs, or is on its way here."""
        return any(process.poll() is None for process in self.processes) or bool(self.pids())

    def freeze(self) -> None:
        """Stop every process on this host where it is (SIGSTOP); its sockets stay open."""
        deadline = time.monotonic() + FROZEN_S
        frozen: set[int] = set()
        # What a process starts before its own turn has come must not run on.
        while new := set(self.pids()) - frozen:
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            frozen |= new
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} goes on starting processes")

    def thaw(self) -> None:
        """Let them go on."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def pids(self) -> list[int]:
        """Ids of the processes that run on this host."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.name).split()]


class Network:
    """Hosts behind one bridge, each with a cable that can be shaped or cut."""

    def __init__(self, hosts: int) -> None:
        """Raises RuntimeError, saying why, where ``why_not`` has a reason."""
        if reason := why_not():
            raise RuntimeError(reason)
        sweep()
        # Interface names have 15 characters at most, so a process number has room.
        tag = f"oct{os.getpid():x}n{next(_numbers)}"
        self._bridge = f"{tag}b"
        subnet = f"10.{77 + os.getpid() % 100}.{next(_numbers) % 250}"
        self.gateway = f"{subnet}.{GATEWAY}"
        self.hosts = tuple(
            Host(f"{tag}h{i}", f"{subnet}.{i + 1}", f"{tag}v{i}") for i in range(hosts)
        )
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        _run("ip", "link", "set", self._bridge, "up")
        _run("ip", "addr", "add", f"{self.gateway}/24", "dev", self._bridge)
        for host in self.hosts:
            inside = ("ip", "-n", host.name)
            _run("ip", "netns", "add", host.name)
            end = ("peer", "name", INTERFACE, "netns", host.name)
            _run("ip", "link", "add", host.link, "type", "veth", *end)
            _run("ip", "link", "set", host.link, "master", self._bridge, "up")
            _run(*inside, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            _run(*inside, "link", "set", INTERFACE, "up")
            _run(*inside, "link", "set", "lo", "up")

    def shape(self, **how: Any) -> None:
        """``shape`` for every host."""
        for host in self.hosts:
            shape(host, **how)

    def cut(self, host: Host) -> None:
        """Pull the host's cable; its processes go on and hear of nobody."""
        cut(host)

    def heal(self, host: Host) -> None:
        """Plug it in again."""
        heal(host)

    def close(self) -> None:
        """End the hosts' processes and take everything away; whatever fails, the rest is tried."""
        with contextlib.ExitStack() as stack:
            stack.callback(_discard, "ip", "link", "delete", self._bridge)
            for host in self.hosts:
                stack.callback(_discard, "ip", "netns", "delete", host.name)
                stack.callback(_discard, "ip", "link", "delete", host.link)
                stack.callback(_discard, "ip", "link", "delete", host.link.replace("v", "i"))
                if host.name in _run("ip", "netns", "list").split():
                    stack.callback(host.kill)

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def shape(host: Host, *, rate: str | None = None, delay_s: float = 0.0, loss: float = 0.0) -> None:
    """Limit what a host sends (``"100mbit"``), delay it (seconds), lose a share of its packets;
    what is unset is as on a plain cable.
    """
    queue = ("tc", "-n", host.name, "qdisc")
    # There may be none to take away.
    subprocess.run([*queue, "del", "dev", INTERFACE, "root"], capture_output=True)
    if rate is not None:
        bucket = ("tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
        _run(*queue, "add", "dev", INTERFACE, "root", *bucket)
    _carry(host, delay_s, loss)


def _carry(host: Host, delay_s: float, loss: float) -> None:
    """Put ``tests.hosts.cable`` between the host's cable and the bridge, or take it out."""
    bridge = host.link.replace("v", "b").rstrip("0123456789")
    inner, outer = host.link.replace("v", "i"), host.link.replace("v", "x")
    # With its interfaces the process that carries is gone too.
    _discard("ip", "link", "delete", inner)
    if not (delay_s or loss):
        _run("ip", "link", "set", host.link, "promisc", "off", "master", bridge)
        return
    _run("ip", "link", "set", host.link, "nomaster")
    _run("ip", "link", "set", host.link, "promisc", "on")
    _run("ip", "link", "add", inner, "type", "veth", "peer", "name", outer)
    _run("ip", "link", "set", outer, "master", bridge, "up")
    _run("ip", "link", "set", inner, "promisc", "on", "up")
    command = [sys.executable, "-m", "tests.hosts.cable", host.link, inner]
    command += ["--delay", str(delay_s), "--loss", str(loss)]
    carrier = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert carrier.stdout is not None
    if carrier.stdout.readline() != "up\n":
        raise RuntimeError(f"no cable for {host.name}: {carrier.wait(timeout=10)}")


def cut(host: Host) -> None:
    """Pull a host's cable; its processes go on and hear of nobody."""
    _run("ip", "link", "set", host.link, "down")


def heal(host: Host) -> None:
    """Plug it in again."""
    _run("ip", "link", "set", host.link, "up")


def sweep(owner: int | None = None) -> None:
    """Take away what a process left that could not: all such, or those of process ``owner``."""
    listed = _run("ip", "netns", "list") + _run("ip", "-br", "link")
    names = sorted({found[0] for found in _NAME.finditer(listed)})
    for name in names:
        pid = int(_NAME.fullmatch(name)[1], 16)  # type: ignore[index]
        if pid != owner and (owner is not None or pid == os.getpid() or lives(pid)):
            continue
        if "h" in name:
            with contextlib.suppress(RuntimeError, TimeoutError):
                Host(name, "", "").kill()
            _discard("ip", "netns", "delete", name)
        else:
            _discard("ip", "link", "delete", name)


def lives(pid: int) -> bool:
    """Whether there is a process of that number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _discard(*command: str) -> None:
    """Take something away that may not be there."""
    subprocess.run(command, capture_output=True)
