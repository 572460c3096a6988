"""``octavo up`` with Ray's tables in a real Redis: Ray's own control plane may die.

Skips where redis-server isn't installed (Debian: apt-get install redis-server).
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import redis

from tests.hosts.network import ROOT
from tests.ranks.launch_ranks import free_port

OCTAVO = [str(Path(sys.executable).with_name("octavo"))]
DEPLOY = ROOT / "deploy"
PASSWORD = secrets.token_hex(16)

pytestmark = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="redis-server is not installed"
)


class Server:
    """A Redis as ``deploy/redis.conf`` has it, which wants ``PASSWORD``."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.client = redis.Redis(port=self.port, password=PASSWORD)
        self._folder = folder
        self.start()

    def start(self) -> None:
        settings = [f"include {DEPLOY / 'redis.conf'}", "bind 127.0.0.1", f"port {self.port}"]
        settings += [f"requirepass {PASSWORD}", f"dir {self._folder}"]
        self._process = subprocess.Popen(
            ["redis-server", "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        assert self._process.stdin is not None
        self._process.stdin.write("\n".join(settings).encode())
        self._process.stdin.close()
        until(self._answers)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.exceptions.RedisError:
            return False


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.kill()


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


@pytest.mark.timeout(300)
def test_gcs_and_redis_may_die_and_what_a_host_kept_goes_with_it(
    server: Server, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    address = f"127.0.0.1:{server.port}"
    environment = {**os.environ, "OCTAVO_HOME": str(home)}
    environment.pop("RAY_REDIS_PASSWORD", None)

    def octavo(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*OCTAVO, *words], env=environment, capture_output=True, text=True, cwd=tmp_path
        )

    refused = octavo("up", "--slots", "1", "--redis", address)
    assert refused.returncode == 1 and "wants a password" in refused.stderr
    file = home / "redis-password"
    file.touch(0o600)
    file.write_text(PASSWORD)
    started = octavo("up", "--slots", "1", "--redis", address)
    try:
        assert started.returncode == 0, started.stderr
        host = psutil.Process(json.loads((home / "host.json").read_text())["pid"])
        (gcs,) = [p for p in host.children() if p.name() == "gcs_server"]
        assert not any(PASSWORD in word for p in psutil.process_iter() for word in told_by(p))
        os.kill(gcs.pid, signal.SIGKILL)
        until(lambda: [p for p in host.children() if p.name() == "gcs_server" and p != gcs])
        # Which nodes there are only the GCS knows.
        until(lambda: "127.0.0.1" in octavo("nodes").stdout)
        other = octavo("up", "--redis", "none")
        assert other.returncode == 1 and f"it runs with the Redis {address}" in other.stderr
        server.kill()
        server.start()
        assert server.client.keys("*"), "what the head was told is on disk"
        until(lambda: "127.0.0.1" in octavo("nodes").stdout)
    finally:
        ended = octavo("down")
    assert ended.returncode == 0, ended.stderr
    assert server.client.keys("*") == []


def told_by(process: psutil.Process) -> list[str]:
    """What a list of processes shows of one."""
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []
