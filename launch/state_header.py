"""What a packed state says of itself, readable without torch.

A block's header is that of a safetensors file, with our JSON under ``__metadata__``.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from launch.digests import Payload

META_KEY = "octavo"
"""Under ``__metadata__``."""
LAYOUT = "layout"
"""Of the meta: what of the model the state holds, ``parallel.layout.RankLayout.to_json``."""


def parse_header(text: bytes) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """(meta; dtype, shape and place of each tensor) of a block's header, without its length.

    Raises KeyError, ValueError or TypeError.
    """
    entries = json.loads(text)
    meta = json.loads(entries.pop("__metadata__")[META_KEY])
    return meta, entries


def ranks_of(payload: Payload) -> int:
    """Ranks of the job that a packed state is a part of; 0 where it doesn't say."""
    flat = np.frombuffer(payload, dtype=np.uint8)
    size = int.from_bytes(flat[:8].tobytes(), "little")
    try:
        meta, _ = parse_header(flat[8 : 8 + size].tobytes())
        return math.prod(int(degree) for degree in meta[LAYOUT]["degrees"])
    except (KeyError, ValueError, TypeError):
        return 0
