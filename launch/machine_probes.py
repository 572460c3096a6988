"""What ``machine_facts`` asks in child processes, since it may hang: ``python -m … NAME``.

Promises: one line of JSON on standard output; what stands in the way is its ``error``; of a folder
that is tried nothing is left behind.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

CHUNK = 4 << 20
MOST_BYTES = 64 << 20
MOST_S = 3.0
"""Written until one of both is reached."""
CONNECT_S = 4.0
WANDB_URL = "https://api.wandb.ai"


def devices() -> dict[str, Any]:
    """CUDA devices as torch sees them, and what Transformer Engine says of them."""
    try:
        import torch
    except (ImportError, OSError, RuntimeError) as error:
        return {"error": f"torch can't be imported: {_line(error)}"}
    found: dict[str, Any] = {"cuda": torch.version.cuda or "", "devices": [], "nccl": ""}
    try:
        if not torch.cuda.is_available():
            return found
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            found["devices"].append(
                {
                    "name": facts.name,
                    "capability": [facts.major, facts.minor],
                    "memory_bytes": facts.total_memory,
                }
            )
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    except (RuntimeError, AssertionError) as error:
        return found | {"error": _line(error)}
    from parallel.precision import transformer_engine

    engine = transformer_engine.facts()
    found["engine"] = {
        "version": engine.version or "",
        "problem": engine.problem or "",
        "unsupported": dict(engine.unsupported),
    }
    return found


def storage(folder: str, seen: str = "") -> dict[str, Any]:
    """Whether files can be made in the nearest folder that there is, and how fast."""
    wanted = Path(folder)
    nearest = next((p for p in (wanted, *wanted.parents) if p.exists()), Path("/"))
    found: dict[str, Any] = {"folder": folder, "tried": str(nearest), "seen": True}
    try:
        if seen:
            found["seen"] = Path(seen).exists()
        found["free_bytes"] = shutil.disk_usage(nearest).free
        most = min(MOST_BYTES, found["free_bytes"] // 4)
        block = os.urandom(CHUNK)
        written = 0
        began = time.monotonic()
        with tempfile.TemporaryFile(dir=nearest) as file:
            while written < most and time.monotonic() - began < MOST_S:
                file.write(block)
                written += len(block)
            file.flush()
            os.fsync(file.fileno())
        found["mb_s"] = written / 1e6 / max(time.monotonic() - began, 1e-6)
    except OSError as error:
        found["error"] = error.strerror or str(error)
    return found


def wandb() -> dict[str, Any]:
    """Whether W&B's server can be reached, and whether there is a key for it; never the key."""
    url = os.environ.get("WANDB_BASE_URL") or WANDB_URL
    parts = urlsplit(url)
    mode = os.environ.get("WANDB_MODE", "")
    found: dict[str, Any] = {"url": f"{parts.scheme}://{parts.hostname}", "mode": mode}
    found["key"] = bool(os.environ.get("WANDB_API_KEY")) or _in_netrc(parts.hostname or "")
    if mode in ("offline", "disabled", "dryrun"):
        return found
    port = parts.port or (80 if parts.scheme == "http" else 443)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=CONNECT_S).close()
    except OSError as error:
        found["error"] = error.strerror or str(error)
    return found


def _in_netrc(host: str) -> bool:
    import netrc

    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc().authenticators(host) is not None
    return False


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


PROBES = {"devices": devices, "storage": storage, "wandb": wandb}


def main() -> None:
    """Entry."""
    name, *arguments = sys.argv[1:]
    # What libraries print goes elsewhere than the answer.
    out, sys.stdout = sys.stdout, sys.stderr
    found = PROBES[name](*arguments)  # type: ignore[operator]
    print(json.dumps(found), file=out, flush=True)
    # Without the libraries' own farewells, which may hang too.
    os._exit(0)


if __name__ == "__main__":
    main()
