"""Ray's head for a cluster whose tables are in a Redis; its GCS is started again when it dies.

    export RAY_REDIS_ADDRESS=10.0.0.9:6379 RAY_external_storage_namespace=my-cluster
    RAY_REDIS_PASSWORD=… python -m orchestrator.cluster.head --node-ip-address ADDRESS

takes the place of ``ray start --head --block`` on the head and takes its options; the other
hosts are started as ever. Promises: the GCS that dies is started again at the same address, with
the tables it had, within a second; a whole head that is started again on the same Redis finds
the other hosts, and what runs on them, within ``RECONNECT_S``. The password comes from the
environment and is on no command line: Ray's own option would show it in every list of processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from orchestrator.cluster.environment import CLUSTER_ENVIRONMENT, RECONNECT_S, RECONNECT_VARIABLE
from orchestrator.home.redis_tables import PASSWORD_VARIABLE, RedisError, RedisTables

PAUSE_S = (0.1, 5.0)
"""Shortest and longest pause before a GCS is started again."""
STEADY_S = 30.0
"""Seconds that one has to live before the pause is short again."""

logger = logging.getLogger(__name__)


class LastingGcs:
    """Ray's GCS, for Ray like one process (``Popen``) that never ends by itself.

    ``start`` starts it, the first time and whenever it has died; where it doesn't stay for
    ``give_up_s``, Ray is told that it has ended, and ``given_up`` is called.
    """

    def __init__(
        self,
        start: Callable[[], subprocess.Popen[bytes]],
        *,
        given_up: Callable[[], object] = lambda: None,
        give_up_s: float = RECONNECT_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._start = start
        self._tell = given_up
        self._give_up_s = give_up_s
        self._sleep = sleep
        self._ending = threading.Event()
        self._given_up = threading.Event()
        self._lock = threading.Lock()
        self._process = start()
        # This thread must not end: Linux ends what it started with it (PR_SET_PDEATHSIG).
        threading.Thread(target=self._watch, name="gcs", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        """None while it lives or is about to live again."""
        if self._ending.is_set() or self._given_up.is_set():
            return self._process.poll()
        return None

    def wait(self, timeout: float | None = None) -> int:
        return self._process.wait(timeout)

    def terminate(self) -> None:
        """End it, for good."""
        with self._lock:
            self._ending.set()
            self._process.terminate()

    def kill(self) -> None:
        """End it at once, for good."""
        with self._lock:
            self._ending.set()
            self._process.kill()

    def _watch(self) -> None:
        pause, away_since = PAUSE_S[0], None
        while True:
            began = time.monotonic()
            code = self._process.wait()
            now = time.monotonic()
            if now - began >= STEADY_S:
                pause, away_since = PAUSE_S[0], None
            away_since = now if away_since is None else away_since
            if self._ending.is_set():
                break
            if now - away_since > self._give_up_s:
                logger.error("Ray's GCS doesn't stay: it is given up")
                self._given_up.set()
                self._tell()
                break
            logger.warning("Ray's GCS has ended with %d; it is started again", code)
            self._sleep(pause)
            pause = min(2 * pause, PAUSE_S[1])
            with self._lock:
                if self._ending.is_set():
                    break
                self._process = self._start()
        threading.Event().wait()


@contextlib.contextmanager
def lasting_tables(
    tables: RedisTables, given_up: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Heads of Ray that this process starts in the block keep their tables there, and last.

    ``given_up``: called when a GCS no longer does. Raises RedisError when the Redis can't be used.
    """
    tables.check()
    from ray._private import node, ray_constants, services

    ask, start = node.get_session_key_from_storage, services.start_ray_process

    def with_password(
        host: str, port: int, username: str, password: str, tls: bool, *rest: Any
    ) -> Any:
        return ask(host, port, tables.username, tables.password, tls, *rest)

    def lasting(
        command: list[str],
        process_type: str,
        *arguments: Any,
        env_updates: dict[str, str] | None = None,
        **options: Any,
    ) -> Any:
        if process_type != ray_constants.PROCESS_TYPE_GCS_SERVER:
            return start(command, process_type, *arguments, env_updates=env_updates, **options)
        secret, flags = _from_environment(tables)
        first: list[Any] = []

        def again() -> subprocess.Popen[bytes]:
            info = start(
                [*(_same_port(command) if first else command), *flags],
                process_type,
                *arguments,
                env_updates={**(env_updates or {}), **secret},
                **options,
            )
            first.append(info)
            process: subprocess.Popen[bytes] = info.process
            return process

        gcs = LastingGcs(again, given_up=given_up)
        return first[0]._replace(process=gcs)

    ours = {RECONNECT_VARIABLE: str(RECONNECT_S), **tables.environment()}
    before = {name: os.environ.get(name) for name in (*ours, PASSWORD_VARIABLE)}
    os.environ.pop(PASSWORD_VARIABLE, None)
    os.environ.update(ours)
    node.get_session_key_from_storage, services.start_ray_process = with_password, lasting
    try:
        yield
    finally:
        node.get_session_key_from_storage, services.start_ray_process = ask, start
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _from_environment(tables: RedisTables) -> tuple[dict[str, str], list[str]]:
    """Variables and flags by which the GCS, whose flags are gflags', finds user and password."""
    given = {"redis_username": tables.username, "redis_password": tables.password}
    given = {flag: value for flag, value in given.items() if value}
    flags = [f"--fromenv={','.join(given)}"] if given else []
    return {f"FLAGS_{flag}": value for flag, value in given.items()}, flags


def _same_port(command: list[str]) -> list[str]:
    """The command with the port that the first one took, where it was to choose."""
    options = dict(word.split("=", 1) for word in command if word.startswith("--") and "=" in word)
    if options.get("--gcs_server_port") != "0":
        return command
    written = Path(options["--session-dir"]) / f"gcs_server_port_{options['--node-id']}"
    port = written.read_text().strip()
    return [f"--gcs_server_port={port}" if w == "--gcs_server_port=0" else w for w in command]


def main() -> None:
    """Entry of ``python -m orchestrator.cluster.head``."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # Ray's settings must be those of the nodes.
    os.environ.update({k: v for k, v in CLUSTER_ENVIRONMENT.items() if k not in os.environ})
    try:
        tables = RedisTables.of_environment(os.environ)
        if tables is None:
            sys.exit("orchestrator.cluster.head: $RAY_REDIS_ADDRESS names no Redis (HOST:PORT)")
        with lasting_tables(tables):
            from ray.scripts.scripts import start

            start.main(["--head", "--block", *sys.argv[1:]], prog_name="ray start")
    except (ValueError, RedisError) as error:
        sys.exit(f"orchestrator.cluster.head: {error}")


if __name__ == "__main__":
    main()
