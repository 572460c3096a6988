"""What preflight does on a node, in a worker that has imported torch already.

Promises: nothing raises for a fault of the node, it is told in the ``Probe``; what a probe takes
of a device is given back; collectives are in groups of their own, with a time-out, so that the
process can become a rank afterwards. What is for GPUs (devices, NCCL) is written after the docs
and has not run on one.
"""

from __future__ import annotations

import os
import queue
import shutil
import socket
import tempfile
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.node_memory import free_bytes
from launch.preflight import SPEC_FILE, Demand, Link, Probe

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch.distributed as dist

SIDE = 512
"""Of the matrices multiplied; larger on GPU."""
GPU_SIDE = 2048
PAYLOAD_BYTES = 2 << 20
"""Sent over each link: 0.2 s at 100 Mbit/s."""

LEFT = (-3, 1, 2)
RIGHT = (5, -2, -4, 1)
"""What the matrices' rows and columns repeat: each sums to 0, so that no partial sum of products
leaves the whole numbers that BF16 holds (256)."""

KNOWN_CASTS = {
    "float8_e4m3fn": {
        1.0: 0x38,
        -1.0: 0xB8,
        240.0: 0x77,
        448.0: 0x7E,
        # Halfway between 1 and 1.125, and between 1.125 and 1.25: to the even one.
        1.0625: 0x38,
        1.1875: 0x3A,
        2.0**-9: 0x01,
        0.0: 0x00,
    },
    "float8_e5m2": {1.0: 0x3C, -1.0: 0xBC, 57344.0: 0x7B, 1.125: 0x3C, 2.0**-16: 0x01, 0.0: 0x00},
}
"""Values and their bytes, by the formats' definition (OCP FP8, round to nearest even)."""


FIND_S = 3.0
"""Seconds for the one to reach the other; torch's store tries once more, later, after as long."""
FOLDER_S = 8.0
"""Seconds that the job's folder may take to answer: a mount whose server is away never does."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where two nodes meet for their collectives."""

    pair: tuple[int, int]
    """Places in the order of nodes; the first is the host."""
    place: int
    """Of this node, one of the pair."""
    address: str
    port: int
    """Of the host."""
    here: str
    """This node's own address, whose interface is used."""
    timeout_s: float
    on_gpu: bool


def probe_node(demand: Demand, here: str) -> Probe:
    """Look at this node; ``here``: its address."""
    clock = time.time()
    started = time.perf_counter()
    device_error, devices, device, memory = _devices(demand.on_gpu)
    matmul_error = cast_error = ""
    if not device_error:
        names = [f"cuda:{i}" for i in range(devices)] if demand.on_gpu else ["cpu"]
        matmul_error = _first(_wrong_product, names)
        cast_error = _first(_wrong_cast, names)
    folder_error, disk = _folder_in_time(Path(demand.folder))
    return Probe(
        clock=clock,
        port=_free_port(here),
        memory_bytes=memory,
        disk_bytes=disk,
        devices=devices,
        device=device,
        device_error=device_error,
        folder_error=folder_error,
        backend_error=_engine_error() if demand.transformer_engine else "",
        matmul_error=matmul_error,
        cast_error=cast_error,
        seconds=time.perf_counter() - started,
        host_bytes=free_bytes(),
    )


def meet(meeting: Meeting) -> Link:
    """Meet the other node of the pair, and check what a collective of the two gives."""
    import torch
    import torch.distributed as dist

    me = meeting.pair.index(meeting.place)
    other = meeting.pair[1 - me]
    try:
        store = dist.TCPStore(
            meeting.address,
            meeting.port,
            2,
            is_master=me == 0,
            timeout=timedelta(seconds=min(FIND_S, meeting.timeout_s)),
            wait_for_workers=False,
        )
        group, device = _pair_group(meeting, me, store)
        words = torch.full((1024,), float(meeting.place + 1), device=device)
        group.allreduce([words]).wait()
        wanted = float(sum(meeting.pair) + 2)
        if not bool((words == wanted).all()):
            told = f"a sum came out as {words[0].item():g}, not {wanted:g}"
            return Link(meeting.place, other, 0.0, told)
        payload = torch.zeros(PAYLOAD_BYTES // 4, device=device)
        started = time.perf_counter()
        group.allreduce([payload]).wait()
        payload[0].item()
        seconds = time.perf_counter() - started
    except Exception as error:  # noqa: BLE001 — a link's fault, whatever it is
        return Link(meeting.place, other, 0.0, _line(error))
    return Link(meeting.place, other, PAYLOAD_BYTES * 8 / 1e6 / max(seconds, 1e-9))


def _pair_group(meeting: Meeting, me: int, store: dist.Store) -> tuple[Any, str]:
    import torch.distributed as dist

    timeout = timedelta(seconds=meeting.timeout_s)
    if meeting.on_gpu:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, me, 2, options), "cuda:0"
    gloo: Any = dist.ProcessGroupGloo
    chosen = gloo._Options()
    chosen._devices = [gloo.create_device(hostname=meeting.here)]
    chosen._timeout = timeout
    return gloo(store, me, 2, chosen), "cpu"


def _devices(on_gpu: bool) -> tuple[str, int, str, int]:
    """(error, number, what they are, free memory of the one that has least)."""
    import torch

    if not on_gpu:
        return "", 0, "cpu", free_bytes()
    try:
        if not torch.cuda.is_available():
            return "torch sees no CUDA device: look at the driver, nvidia-smi shows it", 0, "", 0
        count = torch.cuda.device_count()
        free = min(torch.cuda.mem_get_info(i)[0] for i in range(count))
        name = f"{torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}"
    except Exception as error:  # noqa: BLE001 — a driver fails in many ways
        return _line(error), 0, "", 0
    return "", count, name, free


def _wrong_product(device: str) -> str:
    """A product of small whole numbers, exact in every order of sums; empty when it is right."""
    import torch

    side = SIDE if device == "cpu" else GPU_SIDE
    index = torch.arange(side)
    left = torch.tensor(LEFT)[(index[:, None] + index[None, :]) % len(LEFT)]
    right = torch.tensor(RIGHT)[(index[:, None] + index[None, :]) % len(RIGHT)]
    # Whole matrices repeat themselves, so that the exact product is that of a few rows.
    block = left[: len(LEFT)] @ right[:, : len(RIGHT)]
    wanted = block[index % len(LEFT)][:, index % len(RIGHT)].float().to(device)
    for dtype in (torch.float32, torch.bfloat16):
        got = (left.to(device, dtype) @ right.to(device, dtype)).float()
        wrong = int((got != wanted).sum())
        if wrong:
            name = str(dtype).removeprefix("torch.")
            return f"{wrong} of {side * side} elements in {name} on {device}"
    return ""


def _wrong_cast(device: str) -> str:
    import torch

    for name, known in KNOWN_CASTS.items():
        values = torch.tensor(list(known), device=device)
        got = values.to(getattr(torch, name)).view(torch.uint8).tolist()
        for value, byte, wanted in zip(known, got, known.values(), strict=True):
            if byte != wanted:
                return f"{value:g} to {name} is 0x{byte:02x} on {device}, not 0x{wanted:02x}"
    return ""


def _first(check: Callable[[str], str], devices: Sequence[str]) -> str:
    for device in devices:
        try:
            wrong = check(device)
        except Exception as error:  # noqa: BLE001 — a broken device fails in many ways
            wrong = _line(error)
        if wrong:
            return wrong
    return ""


def _folder_in_time(folder: Path) -> tuple[str, int]:
    """``_folder``, told as the folder's fault where it never answers."""
    answers: queue.Queue[tuple[str, int]] = queue.Queue()
    # It stays for as long as the mount hangs, and holds up nobody.
    asked = threading.Thread(target=lambda: answers.put(_folder(folder)), daemon=True)
    asked.start()
    try:
        return answers.get(timeout=FOLDER_S)
    except queue.Empty:
        return f"it has not answered for {FOLDER_S:.0f} s: is the storage behind it away?", 0


def _folder(folder: Path) -> tuple[str, int]:
    """(why it can't be written, free bytes). It is not made: the controller has made it, on the
    storage that all nodes share, and one that is made here would be this node's alone."""
    try:
        if not (folder / SPEC_FILE).is_file():
            return f"the job's {SPEC_FILE} isn't there: is the shared storage mounted here?", 0
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"preflight")
            file.flush()
            os.fsync(file.fileno())
        return "", shutil.disk_usage(folder).free
    except OSError as error:
        return error.strerror or str(error), 0


def _engine_error() -> str:
    from parallel.precision import transformer_engine

    facts = transformer_engine.facts()
    return "" if facts.version else facts.problem or "it is not installed"


def _free_port(address: str) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        return int(listener.getsockname()[1])


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
