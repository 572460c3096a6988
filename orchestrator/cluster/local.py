"""A Ray cluster and a controller on this machine, in processes of their own.

The *host* is one process that holds a local Ray and starts the controller in it:

    python -m orchestrator.cluster.local HOME --slots N [--tied]

Promises: Ray's processes end with the host, however it ends, and the host of ``--tied``
ends with whoever holds its stdin; ports are free ones, on the loopback; two hosts know
nothing of each other; the host's temporary folder, which is that of its jobs too, is removed
with it, or by the next host where it couldn't be, and so is what it keeps in a Redis
(``HomeConfig.redis``), with which Ray's own tables outlive the process that has them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from orchestrator.cluster.head import lasting_tables
from orchestrator.home.folder import Home, replace_file
from orchestrator.home.lock import HomeLock, HomeTakenError
from orchestrator.home.redis_tables import PASSWORD_VARIABLE, RAY_VARIABLES, RedisError, RedisTables

START_TIMEOUT_S = 180.0
"""The first start in a new environment compiles every module; later ones take seconds."""
END_TIMEOUT_S = 20.0
RAY_STARTS = 3
TAKEN = "taken:"
"""What a host says in place of ``ready`` when the home has one."""
SWEEP_S = 3.0
"""Seconds that processes have to end by themselves before they are killed."""

SOCKET_ROOM = 40
"""Longest temporary folder that leaves room for Ray's names in a socket path (107)."""

RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Its name hides that it means "on the loopback only", on any system.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "PYTHONWARNINGS": "ignore",
}

_PR_SET_CHILD_SUBREAPER = 36


class LocalError(RuntimeError):
    """The host didn't come up."""


class AnotherHostError(LocalError):
    """Somebody else's host has the home, or is about to."""


@dataclass(frozen=True, slots=True)
class Host:
    """A host that was started, as written to ``host.json``."""

    pid: int
    created: float
    """When the process was created, to tell it from a later one of the same number."""
    temp_dir: str
    slots: int
    url: str

    def alive(self) -> bool:
        """Whether that very process still runs."""
        import psutil

        try:
            process = psutil.Process(self.pid)
            return (
                abs(process.create_time() - self.created) < 0.01
                and process.status() != psutil.STATUS_ZOMBIE
            )
        except psutil.Error:
            return False


def running_host(home: Home) -> Host | None:
    """The host of ``home`` if it runs."""
    try:
        host = Host(**json.loads((home.path / "host.json").read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return host if host.alive() else None


def host_soon(home: Home, timeout_s: float = START_TIMEOUT_S) -> Host | None:
    """The host of ``home`` that somebody else starts, once it is ready; None: not in the time."""
    deadline = time.monotonic() + timeout_s
    while (found := running_host(home)) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


class Starting:
    """A host on its way. ``tied``: it ends when this process closes it or dies."""

    def __init__(self, home: Home, slots: int, *, tied: bool) -> None:
        home.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._home = home
        self._log = home.path / "host.log"
        command = [sys.executable, "-m", "orchestrator.cluster.local", str(home.path)]
        command += ["--slots", str(slots)] + (["--tied"] if tied else [])
        # A cluster of the user's is not this one, nor are its tables.
        theirs = ("RAY_ADDRESS", *RAY_VARIABLES)
        environment = {k: v for k, v in os.environ.items() if k not in theirs}
        if password := home.redis_password():
            environment[PASSWORD_VARIABLE] = password
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if tied else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                # A token of this cluster's own: no other user of the machine gets in.
                env={**environment, **RAY_ENVIRONMENT, "RAY_AUTH_TOKEN": secrets.token_hex(32)},
                # Ctrl-C at the terminal is for the command, which then ends the host.
                start_new_session=True,
            )

    def wait(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """Block until the controller answers; its URL. Raises ``LocalError``, and
        ``AnotherHostError`` where somebody else began to start one before."""
        assert self._process.stdout is not None
        line = _read_line(self._process.stdout, timeout_s)
        if line.startswith("ready "):
            return line.removeprefix("ready ").strip()
        if line.startswith(TAKEN):
            raise AnotherHostError(line.removeprefix(TAKEN).strip())
        with contextlib.suppress(OSError):
            self.end()
        text = self._log.read_text(errors="replace").strip() if self._log.exists() else ""
        tail = "\n".join(text.splitlines()[-15:])
        why = "in time" if not line else f"({line.strip()})"
        raise LocalError(f"the local Ray did not start {why}:\n{tail}")

    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """End the host and all that it started; returns when it has ended."""
        for act in (self._close_stdin, self._process.terminate, self._process.kill):
            with contextlib.suppress(OSError):
                act()
            try:
                self._process.wait(END_TIMEOUT_S)
                return
            except subprocess.TimeoutExpired:
                continue

    def _close_stdin(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        else:
            self._process.terminate()


def end_host(host: Host, home: Home) -> None:
    """End a host by its record, and what is left of it should it have been killed."""
    import psutil

    if host.alive():
        os.kill(host.pid, signal.SIGTERM)
        with contextlib.suppress(psutil.Error):
            psutil.Process(host.pid).wait(END_TIMEOUT_S)
    if host.alive():
        os.kill(host.pid, signal.SIGKILL)
    # Ray's processes all carry the session folder in their command line.
    for process in psutil.process_iter(["cmdline"]):
        if any(host.temp_dir in word for word in process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.Error):
                process.kill()
    shutil.rmtree(host.temp_dir, ignore_errors=True)
    (home.path / "host.json").unlink(missing_ok=True)


def _read_line(stream: IO[bytes], timeout_s: float) -> str:
    """One line, or what came of it in the time."""
    import select

    ready, _, _ = select.select([stream], [], [], timeout_s)
    return stream.readline().decode(errors="replace") if ready else ""


# What follows runs in the host.


def serve(home: Home, slots: int, *, tied: bool) -> None:
    """Hold Ray and the controller until told to end; says so where another host does."""
    lock = HomeLock(home, "host")
    try:
        lock.take()
    except HomeTakenError as error:
        print(f"{TAKEN} {error}", flush=True)
        return
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: ended.set())
    if tied:
        threading.Thread(target=_wait_for_eof, args=(ended,), daemon=True).start()
    _adopt_orphans()
    folder = _temp_dir()
    # What W&B, PyTorch and a job's own code leave there goes with the folder.
    os.environ["TMPDIR"] = str(folder / "tmp")
    (folder / "tmp").mkdir()
    try:
        with contextlib.ExitStack() as stack:
            tables = _tables(home)
            if tables is not None:
                stack.callback(_forget, home, tables)
                stack.enter_context(lasting_tables(tables, given_up=ended.set))
            try:
                url = _start(home, folder, slots)
                print(f"ready {url}", flush=True)
                ended.wait()
            finally:
                _end(home, folder)
    except RedisError as error:
        sys.exit(str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _tables(home: Home) -> RedisTables | None:
    """Where Ray's tables go, under a name that no host had before; None: nowhere.

    What a host before this one kept and could not take away is taken away: all that it tells of
    has ended with it.
    """
    redis = home.config().redis
    record = home.path / "redis.json"
    # None of those that the host starts needs to have it.
    password = os.environ.pop(PASSWORD_VARIABLE, "")
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        left = json.loads(record.read_text())
        _forget(home, RedisTables.of(left["redis"], left["namespace"], password))
    if redis is None:
        return None
    tables = RedisTables.of(redis, f"octavo-{secrets.token_hex(8)}", password)
    replace_file(record, json.dumps({"redis": redis, "namespace": tables.namespace}))
    return tables


def _forget(home: Home, tables: RedisTables) -> None:
    with contextlib.suppress(RedisError):
        tables.check()
        tables.forget()
        (home.path / "redis.json").unlink(missing_ok=True)


def _start(home: Home, folder: Path, slots: int) -> str:
    import psutil

    from orchestrator.cluster.controller_actor import start_controller
    from orchestrator.protocol import NAMESPACE

    _start_ray(
        address="local",
        num_cpus=slots,
        namespace=NAMESPACE,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        _temp_dir=str(folder),
    )
    home.create()
    home.write_ray_address("")
    url = start_controller(home)
    host = Host(os.getpid(), psutil.Process().create_time(), str(folder), slots, url)
    replace_file(home.path / "host.json", json.dumps(asdict(host)))
    return url


def _start_ray(**how: Any) -> None:
    """Ray gives its own processes half a minute, which an overworked machine may not have."""
    import ray

    for left in range(RAY_STARTS, 0, -1):
        try:
            ray.init(**how)
            return
        except Exception as error:
            if left == 1 or "timed out during startup" not in str(error):
                raise
            print(f"Ray did not start in time, and is started again: {error}", file=sys.stderr)
            ray.shutdown()


def _end(home: Home, folder: Path) -> None:
    import psutil
    import ray

    # From here on nothing may interrupt: what is left behind would stay.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    started = psutil.Process().children(recursive=True)
    with contextlib.suppress(Exception):
        ray.shutdown()
    _, left = psutil.wait_procs(started, timeout=SWEEP_S)
    # Those that were orphaned on the way are our children now.
    for process in {*left, *psutil.Process().children(recursive=True)}:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(left, timeout=SWEEP_S)
    (home.path / "host.json").unlink(missing_ok=True)
    home.forget_server()


def _wait_for_eof(ended: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    ended.set()


def _adopt_orphans() -> None:
    """Processes whose parents die become ours, so that ``_end`` finds them (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _temp_dir() -> Path:
    """A new short folder for Ray, after removing those of hosts that are dead."""
    import psutil

    base = Path(tempfile.gettempdir())
    if len(str(base)) > SOCKET_ROOM:
        base = Path("/tmp")
    prefix = f"octavo-{os.getuid()}-"
    for old in base.glob(f"{prefix}*"):
        pid = old.name.removeprefix(prefix).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=base))


def main() -> None:
    """Entry of ``python -m orchestrator.cluster.local``."""
    import argparse

    parser = argparse.ArgumentParser(description="hold a local Ray and a controller")
    parser.add_argument("home", type=Path)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--tied", action="store_true")
    arguments = parser.parse_args()
    began = time.monotonic()
    serve(Home(arguments.home), arguments.slots, tied=arguments.tied)
    print(f"ended after {time.monotonic() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
