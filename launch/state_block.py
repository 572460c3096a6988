"""A rank's state as one block of bytes: laid out, described, read, copied back in place.

The block is a safetensors file: a header (names, dtypes, shapes, and our JSON under
``__metadata__``), padded to a fixed size, then all tensors without gaps. The same bytes
lie in the ring, in the keeper and on disk. Promises: no pickle; nothing is loaded from a
block that doesn't fit the live tensors in every name, dtype and shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from launch.data import MOST_SKIPPED
from launch.digests import Payload
from launch.state_header import META_KEY, parse_header

# The skip ledger grows, by at most 18 digits and two characters a batch, and so does what
# waits to return to FP8.
_META_SLACK = 20 * MOST_SKIPPED + 256 * 1024
_ALIGN = 4096

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "I64": torch.int64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "U8": torch.uint8,
    "I8": torch.int8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class StateLayout:
    """Where each tensor of a state lies in its block; the same for every snapshot of a rank."""

    def __init__(self, tensors: Mapping[str, Tensor], meta_bytes: int = 0) -> None:
        # Widest dtypes first: every tensor is aligned without gaps, which the format forbids.
        self.names = tuple(sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)))
        self.entries: dict[str, dict[str, Any]] = {}
        end = 0
        for name in self.names:
            tensor = tensors[name]
            begin, end = end, end + tensor.numel() * tensor.itemsize
            self.entries[name] = {
                "dtype": _DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [begin, end],
            }
        wanted = len(json.dumps(self.entries)) + 2 * meta_bytes + _META_SLACK
        self.data_start = -(-(8 + wanted) // _ALIGN) * _ALIGN
        self.nbytes = self.data_start + end

    def views(self, block: Tensor) -> dict[str, Tensor]:
        """The tensors inside ``block`` (uint8 [nbytes]), by name, sharing its memory."""
        return _views(block[self.data_start :], self.entries)

    def header(self, meta: Mapping[str, Any]) -> bytes:
        """``data_start`` bytes; ValueError when ``meta`` has outgrown them."""
        described = {"__metadata__": {META_KEY: json.dumps(meta)}, **self.entries}
        text = json.dumps(described).encode()
        room = self.data_start - 8
        if len(text) > room:
            raise ValueError(f"the state's description has {len(text)} bytes, {room} fit")
        return room.to_bytes(8, "little") + text.ljust(room)


def _views(data: Tensor, entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    found = {}
    for name, entry in entries.items():
        begin, end = entry["data_offsets"]
        found[name] = data[begin:end].view(dtype_of(entry)).view(entry["shape"])
    return found


def unpack(payload: Payload) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(meta, tensors by name) of a packed state; the tensors share the payload's memory.

    Raises ValueError when the bytes aren't such a state. Don't write to the tensors.
    """
    flat = np.frombuffer(payload, dtype=np.uint8)
    if not flat.flags.writeable:
        # torch warns of read-only memory; nothing here writes to it.
        flat = np.array(flat)
    try:
        size = int.from_bytes(flat[:8].tobytes(), "little")
        meta, entries = parse_header(flat[8 : 8 + size].tobytes())
        return meta, _views(torch.from_numpy(flat[8 + size :]), entries)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"not a packed state: {error}") from error


def dtype_of(entry: Mapping[str, Any]) -> torch.dtype:
    """Of a tensor, by what ``parse_header`` says of it."""
    return _DTYPES[entry["dtype"]]


def load_into(tensors: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Copy ``source`` into the live ``tensors``, in place; ValueError if they don't fit.

    Nothing is written unless every name, dtype and shape fits.
    """
    problems = [f"{name} is missing" for name in tensors.keys() - source.keys()]
    problems += [f"{name} is unknown" for name in source.keys() - tensors.keys()]
    for name in tensors.keys() & source.keys():
        live, copy = tensors[name], source[name]
        if live.shape != copy.shape or live.dtype != copy.dtype:
            problems.append(
                f"{name} is {copy.dtype} {list(copy.shape)}, "
                f"this rank has {live.dtype} {list(live.shape)}"
            )
    if problems:
        shown = "; ".join(sorted(problems)[:5])
        raise ValueError(f"{len(problems)} tensors don't fit: {shown}")
    names = list(tensors)
    if not names:
        return
    with torch.no_grad():
        torch._foreach_copy_([tensors[n] for n in names], [source[n] for n in names])
