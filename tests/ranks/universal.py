"""What DeepSpeed's universal checkpoint says of a checkpoint of DeepSpeed's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

STATES = {"masters": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
"""Our word → DeepSpeed's."""


def universal_state(folder: Path, num_layers: int) -> dict[str, dict[str, Tensor]]:
    """Each parameter's FP32 state by our names, of ``folder/saved``; converted when first asked."""
    converted = folder / "universal"
    if not converted.exists():
        subprocess.run(
            [
                *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"),
                *("--input_folder", str(folder / "saved"), "--output_folder", str(converted)),
                "--inject_missing_state",
                *("--num_extract_workers", "1", "--num_merge_workers", "1"),
            ],
            check=True,
            capture_output=True,
            timeout=100,
        )
    found = {}
    for path in (converted / "zero").glob("[0-9]*"):
        layer, _, rest = path.name.partition(".")
        number = int(layer)
        where = {0: "embedding", num_layers + 1: "head"}.get(number, f"layers.{number - 1}")
        name = f"{where}.{rest}".replace(".linear.weight", ".weight")
        found[name] = {
            ours: torch.load(path / f"{theirs}.pt", weights_only=True)["param"]
            for ours, theirs in STATES.items()
        }
    return found
