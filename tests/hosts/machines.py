"""Hosts whose processes see neither each other's processes nor Ray's folders, as real machines.

    with Machines(2) as machines:
        machines.hosts[0].run("ray start --head …")

A host of ``tests.hosts.network`` shares processes and folders with the others, and `ray stop` ends
every Ray that it sees: what is rendered for a cluster runs it, so it is run in here. Promises: on
leaving the block all of it has ended; nothing outside is seen, signalled or stopped.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.hosts.network import ROOT, Host, Network

START_S = 10.0
BATCH = "octavo-1"
"""Folder below /tmp that a batch script of allocation 1 has for Ray's files."""


class Machine:
    """A host with processes of its own, and a /tmp/ray and /tmp/octavo-1 of its own."""

    def __init__(self, host: Host, folder: Path) -> None:
        self.host, self.folder = host, folder
        private = [folder / name for name in ("ray", BATCH)]
        binds = []
        for own in private:
            own.mkdir(parents=True)
            seen = Path("/tmp") / own.name
            seen.mkdir(exist_ok=True)
            binds.append(f"mount --bind {shlex.quote(str(own))} {seen}")
        hold = " && ".join([*binds, "exec sleep infinity"])
        unshare = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._holder = host.popen([*unshare, "sh", "-c", hold])
        self.pid = self._inside()

    @property
    def address(self) -> str:
        return self.host.address

    def command(self, words: Sequence[str]) -> list[str]:
        """``words`` as a command that runs them in here."""
        return ["nsenter", "--target", str(self.pid), "--mount", "--pid", "--net", "--", *words]

    def run(
        self, script: str, env: Mapping[str, str], *, timeout_s: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """A script of bash, as over ssh; its output in one, by way of a file: what it leaves
        running holds the file, and nobody waits for that."""
        log = self.folder / "run.log"
        with log.open("w") as out:
            done = subprocess.run(
                self.command(["bash", "-c", script]),
                env=dict(env),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
            )
        told = log.read_text(errors="replace")
        return subprocess.CompletedProcess(script, done.returncode, told, "")

    def _inside(self) -> int:
        """Id, out here, of the process that holds the machine, once its folders are its own."""
        holder = self._holder.pid
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError):
                children = Path(f"/proc/{holder}/task/{holder}/children").read_text().split()
                child = int(children[0]) if children else 0
                if child and Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"sleep"):
                    return child
            if self._holder.poll() is not None:
                break
            time.sleep(0.02)
        raise RuntimeError(f"no machine on {self.host.name}: {self._holder.poll()}")


class Machines:
    """So many, on one network, with a folder that all of them see."""

    def __init__(self, count: int) -> None:
        """Raises RuntimeError, saying why, where there can be none."""
        self._network = Network(count)
        self.folder = Path(tempfile.mkdtemp(prefix=f"octm-{os.getpid()}-", dir="/tmp"))
        try:
            self.hosts = [
                Machine(host, self.folder / f"m{i}") for i, host in enumerate(self._network.hosts)
            ]
        except BaseException:
            self.close()
            raise

    @property
    def addresses(self) -> list[str]:
        return [machine.address for machine in self.hosts]

    def close(self) -> None:
        self._network.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Machines:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def environment(folder: Path, **more: str) -> dict[str, Any]:
    """Of a user on a machine: none of ours, but for what a small machine needs."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    kept |= {k: v for k, v in os.environ.items() if k.startswith("OPENBLAS")}
    return {**kept, "HOME": str(folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}
