"""A Redis on a host of its own, Debian's redis-server with ``deploy/redis.conf``.

It needs no one of the cluster, wants a password, and ends with the network whose host it is on.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

from tests.hosts.network import ROOT, Host

PORT = 6390
START_S = 30.0
SERVER = "redis-server"


def why_no_redis() -> str:
    """Why there can be none here, or an empty string."""
    if shutil.which(SERVER) is None:
        return "redis-server is not installed (Debian: apt-get install redis-server)"
    return ""


def start_redis(host: Host, folder: Path, password: str) -> str:
    """Start it; its address as HOST:PORT, once it listens. Raises RuntimeError with its log."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = [
        f"include {ROOT / 'deploy' / 'redis.conf'}",
        f"bind {host.address}",
        f"port {PORT}",
        f"requirepass {password}",
        f"dir {folder}",
    ]
    log = folder / "redis.log"
    with log.open("ab") as out:
        # From stdin: nobody sees the password in a list of processes.
        server = host.popen(
            [SERVER, "-"], stdin=subprocess.PIPE, stdout=out, stderr=out, cwd=folder
        )
    assert server.stdin is not None
    server.stdin.write("\n".join(settings).encode())
    server.stdin.close()
    deadline = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection((host.address, PORT), timeout=1).close()
        except OSError as error:
            if server.poll() is not None or time.monotonic() > deadline:
                said = log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"redis-server did not start: {error}\n{said}") from None
            time.sleep(0.05)
        else:
            return f"{host.address}:{PORT}"
