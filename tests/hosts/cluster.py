"""A Ray cluster of several hosts on one machine, with Octavo's controller, that can be broken.

    with Cluster(3, slots=2) as cluster:
        job = cluster.client.submit(spec, "job.yaml")["id"]
        cluster.node("n2").kill()

Every node is a host of ``tests.hosts.network`` with its own address, Ray processes, temporary
folder and object store; ``n0`` is Ray's head and, as a rule, has the controller. Files are shared,
as on a cluster with a network disk: ``storage`` is a small disk of its own that can be filled. What
a user does goes through ``client``, from outside, over the bridge. With ``redis`` Ray's tables are
in a Redis on one more host, which is no node.

Promises: whatever happens inside the block, on leaving it nothing of the cluster is left; where
the process had no chance to leave it (SIGKILL), a reaper does it within seconds, and else the
next cluster. ``running`` finds the clusters there are, to break one from another shell.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from orchestrator.api.client import Client
from orchestrator.cluster.environment import CLUSTER_ENVIRONMENT
from orchestrator.home.folder import HOME_VARIABLE, Home, HomeConfig
from orchestrator.home.redis_tables import PASSWORD_VARIABLE
from orchestrator.spec.config import QuarantineConfig
from tests.hosts import network as net
from tests.hosts.network import ROOT, Host, Network
from tests.hosts.redis_host import start_redis, why_no_redis

PORT = 6379
RAY = str(Path(sys.executable).with_name("ray"))
QUARANTINE = QuarantineConfig(ranks_lost=1_000_000, preflight_s=5, unfit_s=5, corruption_s=5)
"""Faults are done to the same few nodes again and again, and mended: none is to be left out for
what was done to it in the row before."""
PREFIX = "octh-"
"""Of clusters' folders; short, since sockets' names have 107 characters at most."""
STATE = "cluster.json"
START_S = 180.0
"""The first start in a new environment compiles every module; later ones take seconds."""
TRIES = 3
OBJECT_STORE_BYTES = 160_000_000
STORAGE = "512m"
"""Size of the storage disk."""
BALLAST = ".ballast"


@dataclass(frozen=True, slots=True)
class Layout:
    """What another process needs to know of a cluster, as in ``cluster.json``."""

    pid: int
    folder: str
    token: str
    """Ray's."""
    slots: tuple[int, ...]
    names: tuple[str, ...]
    """Network namespaces, by node."""
    addresses: tuple[str, ...]
    links: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of Ray's processes, above ``CLUSTER_ENVIRONMENT``."""
    controller: int = 0
    """Node that the controller is on."""
    redis: str = ""
    """Where Ray's tables are; empty: in the head's memory."""


class Node:
    """One host with its Ray node."""

    def __init__(self, cluster: Cluster, index: int) -> None:
        layout = cluster.layout
        self.name = f"n{index}"
        self.index = index
        self.host = Host(layout.names[index], layout.addresses[index], layout.links[index])
        self.broken = False
        """Ray's head may have noticed something, since the last start."""
        self._cluster = cluster

    @property
    def address(self) -> str:
        return self.host.address

    def start(self) -> None:
        """Start Ray here: the head on ``n0``, a joining node elsewhere; doesn't wait for it."""
        self.broken = False
        layout = self._cluster.layout
        folder = self._cluster.folder / self.name
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        environment = {**self._cluster.environment, "TMPDIR": str(folder / "tmp")}
        if self.index:
            command = [RAY, "start", "--address", f"{layout.addresses[0]}:{PORT}", "--block"]
        else:
            command = [RAY, "start", "--head", "--block"]
            if layout.redis:
                command = [sys.executable, "-m", "orchestrator.cluster.head"]
                environment |= {
                    "RAY_REDIS_ADDRESS": layout.redis,
                    "RAY_external_storage_namespace": self._cluster.folder.name,
                    # Any will do; Ray's is at hand.
                    PASSWORD_VARIABLE: layout.token,
                }
            command += ["--port", str(PORT), "--include-dashboard", "false"]
        command += ["--node-ip-address", self.address, "--num-cpus", str(layout.slots[self.index])]
        command += ["--object-store-memory", str(OBJECT_STORE_BYTES), "--temp-dir", str(folder)]
        with (folder / "ray.log").open("ab") as log:
            self.host.popen(
                command,
                env=environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        """End all its processes at once, as a power cut does."""
        self.broken = True
        self.host.kill()

    def restart(self) -> None:
        """Start it again after ``kill``, with nothing of what it had in memory."""
        if self.host.pids():
            raise RuntimeError(f"{self.name} runs; kill it first")
        shutil.rmtree(self._cluster.folder / self.name, ignore_errors=True)
        self.start()

    def freeze(self) -> None:
        """Stop all its processes where they are."""
        self.broken = True
        self.host.freeze()

    def thaw(self) -> None:
        """Let them go on."""
        self.host.thaw()

    def cut(self) -> None:
        """Pull its cable."""
        self.broken = True
        net.cut(self.host)

    def heal(self) -> None:
        """Plug it in again."""
        net.heal(self.host)

    def shape(self, **how: Any) -> None:
        """``rate``, ``delay_s`` and ``loss`` of what it sends; none: a plain cable again."""
        net.shape(self.host, **how)

    def titles(self) -> dict[int, str]:
        """Its processes' titles by id, as ``ray::Keeper``; a Ray actor's has its class."""
        found = {}
        for pid in self.host.pids():
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                found[pid] = line.split(b"\0")[0].decode(errors="replace")
        return found

    def processes(self, beginning: str) -> list[int]:
        """Ids of its processes whose title begins so, as ``ray::Worker``."""
        return [pid for pid, title in self.titles().items() if title.startswith(beginning)]


class Cluster:
    """``hosts`` nodes of ``slots`` CPU slots each; entering the block starts them."""

    def __init__(
        self,
        hosts: int = 3,
        *,
        slots: int | Sequence[int] = 2,
        standby: int = 0,
        controller: int = 0,
        redis: bool = False,
        environment: Mapping[str, str] | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """``slots``: of each node, or node by node; ``standby``: idle workers a node that the
        controller keeps, which is on node ``controller``; ``environment``: of Ray's processes,
        above ours; ``say`` is told what happens.

        Raises RuntimeError, saying why, where there can be no hosts, or no Redis.
        """
        if reason := net.why_not() or (why_no_redis() if redis else ""):
            raise RuntimeError(reason)
        self._say = say
        self._standby = standby
        self._stack = contextlib.ExitStack()
        sweep()
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir="/tmp"))
        self.layout = Layout(
            os.getpid(),
            str(folder),
            secrets.token_hex(16),
            (slots,) * hosts if isinstance(slots, int) else tuple(slots),
            (),
            (),
            (),
            dict(environment or {}),
            controller,
        )
        self._redis = redis

    @classmethod
    def running(cls) -> list[Cluster]:
        """Clusters of living processes, the newest last; never to be entered or closed."""
        found = []
        for folder in sorted(_folders(), key=lambda folder: folder.stat().st_mtime):
            with contextlib.suppress(OSError, ValueError, TypeError):
                layout = Layout(**json.loads((folder / STATE).read_text()))
                if net.lives(layout.pid):
                    cluster = cls.__new__(cls)
                    cluster.layout = layout
                    cluster._say = print
                    cluster.nodes = tuple(Node(cluster, i) for i in range(len(layout.names)))
                    found.append(cluster)
        return found

    @property
    def folder(self) -> Path:
        return Path(self.layout.folder)

    @property
    def storage(self) -> Path:
        """Where jobs' directories are: a small disk of its own, the same on every node."""
        return self.folder / "storage"

    @property
    def home(self) -> Home:
        """The controller's."""
        return Home(self.folder / "home")

    @property
    def environment(self) -> dict[str, str]:
        """Of all that runs on the cluster."""
        return {
            **CLUSTER_ENVIRONMENT,
            "RAY_AUTH_TOKEN": self.layout.token,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            HOME_VARIABLE: str(self.home.path),
            **self.layout.environment,
        }

    @property
    def client(self) -> Client:
        """The controller's API, as a user on the same network has it."""
        return Client.of_home(self.home)

    def node(self, name: str) -> Node:
        """By its name, as ``n2``. Raises KeyError."""
        try:
            return next(node for node in self.nodes if name in (node.name, node.address))
        except StopIteration:
            names = ", ".join(node.name for node in self.nodes)
            raise KeyError(f"no node is called {name}; there are {names}") from None

    def start(self) -> None:
        """Hosts, disk, Ray on each, the controller; returns when it answers."""
        began = time.monotonic()
        _start_reaper(self._stack)
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.storage.mkdir()
        _mount(self.storage)
        self._stack.callback(_unmount, self.storage)
        network = self._stack.enter_context(Network(len(self.layout.slots) + self._redis))
        hosts = network.hosts[: len(self.layout.slots)]
        redis = ""
        if self._redis:
            redis = start_redis(network.hosts[-1], self.folder / "redis", self.layout.token)
        self.layout = replace(
            self.layout,
            names=tuple(host.name for host in hosts),
            addresses=tuple(host.address for host in hosts),
            links=tuple(host.link for host in hosts),
            redis=redis,
        )
        self.nodes = tuple(Node(self, i) for i in range(len(hosts)))
        (self.folder / STATE).write_text(json.dumps(asdict(self.layout)))
        self.home.create(
            HomeConfig(
                jobs_dir=self.storage,
                host=self.nodes[self.layout.controller].address,
                plain_http=True,
                fixed_cluster=False,
                standby=self._standby,
                quarantine=QUARANTINE,
            )
        )
        self.start_all()
        self._say(f"{len(self.nodes)} hosts after {time.monotonic() - began:.1f} s")

    def start_all(self) -> None:
        """Ray on every node, and the controller, on the home and the storage there are.

        Ray gives itself 30 s, which a busy machine may exceed: it is tried ``TRIES`` times.
        """
        for left in reversed(range(TRIES)):
            try:
                self.start_head()
                for node in self.nodes[1:]:
                    node.start()
                self.start_controller()
                return
            except RuntimeError as error:
                if not left:
                    raise
                self._say(f"once more, since {str(error).splitlines()[0]}")
                self.kill_all()

    def start_head(self) -> None:
        """Ray's head alone; returns when it listens. Raises RuntimeError."""
        self.nodes[0].start()
        self._await_head()

    def restart_head(self) -> None:
        """Ray's head anew after ``kill``, and the controller: as an operator does, until they are
        there. Raises RuntimeError after ``TRIES``.
        """
        for left in reversed(range(TRIES)):
            try:
                self.nodes[0].kill()
                shutil.rmtree(self.folder / self.nodes[0].name, ignore_errors=True)
                self.start_head()
                self.start_controller()
                return
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                if not left:
                    raise
                self._say(f"once more, since {str(error).splitlines()[0]}")

    def kill_all(self) -> None:
        """Every node at once, and with it what it had in its folder."""
        for node in self.nodes:
            node.kill()
        for node in self.nodes:
            shutil.rmtree(self.folder / node.name, ignore_errors=True)

    def start_controller(self) -> None:
        """Start it on its node, or find it; returns when it answers. Raises RuntimeError."""
        node = self.nodes[self.layout.controller]
        command = [sys.executable, "-m", "orchestrator.cluster.on_ray", str(self.home.path)]
        command += ["--address", f"{self.nodes[0].address}:{PORT}", "--hosts", str(len(self.nodes))]
        starting = node.host.popen(
            command,
            env=self.environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        said, _ = starting.communicate(timeout=START_S)
        node.host.processes.remove(starting)
        if starting.returncode != 0:
            raise RuntimeError(f"the controller did not start:\n{said[-4000:]}\n{self.told()}")

    def fill_disk(self) -> None:
        """Leave no byte free on the storage disk."""
        with contextlib.suppress(OSError), (self.storage / BALLAST).open("ab", buffering=0) as out:
            while True:
                out.write(bytes(1 << 16))

    def free_disk(self) -> None:
        """Take away what ``fill_disk`` put there."""
        (self.storage / BALLAST).unlink(missing_ok=True)

    def mend(self) -> None:
        """Undo what was done to it: cables plain and plugged in, the disk free, every node alive
        and joined. Raises RuntimeError where that can't be had.
        """
        self.free_disk()
        for node in self.nodes:
            node.heal()
            node.thaw()
            node.shape()
        for node in self.nodes[1:]:
            # Ray's head may have given up one that was out of reach, and then it ends itself.
            raylet = any(title.endswith("/raylet") for title in node.titles().values())
            if node.broken or not raylet:
                node.kill()
                node.restart()
        self.start_controller()

    def told(self) -> str:
        """The last lines of every node's Ray, for whoever looks for what went wrong."""
        parts = []
        for node in self.nodes:
            log = self.folder / node.name / "ray.log"
            lines = log.read_text(errors="replace").splitlines()[-5:] if log.exists() else []
            parts += [f"--- {node.name}", *lines]
        return "\n".join(parts)

    def close(self) -> None:
        """Take everything away; whatever fails, the rest is tried."""
        self._stack.close()

    def _await_head(self) -> None:
        import socket

        head = self.nodes[0]
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection((head.address, PORT), timeout=1).close()
                return
            if time.monotonic() > deadline or not head.host.runs():
                raise RuntimeError(f"Ray's head did not start:\n{self.told()}")
            time.sleep(0.05)

    def __enter__(self) -> Cluster:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def sweep(owner: int | None = None) -> None:
    """Take away what clusters left whose process is gone, or what process ``owner`` left."""
    net.sweep(owner)
    for folder in _folders():
        pid = int(folder.name.removeprefix(PREFIX).partition("-")[0])
        if pid == owner or (owner is None and not net.lives(pid)):
            _unmount(folder / "storage")
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP leave the block as Ctrl-C does, so that clusters in it are taken away."""

    def leave(number: int, frame: object) -> None:
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = {s: signal.signal(s, leave) for s in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _folders() -> list[Path]:
    folders = Path("/tmp").glob(f"{PREFIX}*-*")
    return [f for f in folders if f.name.removeprefix(PREFIX).partition("-")[0].isdigit()]


def _start_reaper(stack: contextlib.ExitStack) -> None:
    """A process that sweeps when this one is gone without having closed the pipe in order."""
    reaper = subprocess.Popen(
        [sys.executable, "-m", "tests.hosts.reaper", str(os.getpid())],
        stdin=subprocess.PIPE,
        cwd=ROOT,
        # A session of its own: what ends us must not end it.
        start_new_session=True,
    )

    def dismiss() -> None:
        assert reaper.stdin is not None
        with contextlib.suppress(OSError):
            reaper.stdin.write(b".")
            reaper.stdin.close()
        reaper.wait(timeout=60)

    stack.callback(dismiss)


def _mount(folder: Path) -> None:
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={STORAGE}", "octavo", str(folder)],
        check=True,
        capture_output=True,
    )


def _unmount(folder: Path) -> None:
    # Lazily: a process in its last moment may still hold a file of it.
    subprocess.run(["umount", "-l", str(folder)], capture_output=True)
