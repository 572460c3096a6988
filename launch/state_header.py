"""What a packed state says of itself, readable without torch.

A block's header is that of a safetensors file, with our JSON under ``__metadata__``.
"""

from __future__ import annotations

import json
from typing import Any

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
