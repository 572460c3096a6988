"""Tests of the numbers on a GPU: skipped, with the reason, where there is none or no library.

make test-gpu OUT=folder      # every comparison, and what it measured in folder
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.config import FP8Config
from parallel.precision.choice import BackendRefusal, choose
from parallel.precision.detection import device_facts

OUT_VARIABLE = "OCTAVO_GPU_OUT"
"""Folder that what was measured is written to; unset: pytest's temporary one."""


def reason_to_skip(recipe: str) -> str:
    """Why Transformer Engine doesn't run ``recipe`` here; empty where it does."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    from parallel.precision import transformer_engine

    config = FP8Config.model_validate({"recipe": recipe, "backend": "transformer_engine"})
    decided = choose("fp8", config, device_facts("cuda"), transformer_engine.facts())
    return str(decided) if isinstance(decided, BackendRefusal) else ""


class Measurements:
    """What the comparisons of this run found, by recipe."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, recipe: str, what: str, **found: float | str | bool) -> None:
        """One line of the table."""
        self.rows.append({"recipe": recipe, "what": what, **found})

    def write(self, folder: Path) -> None:
        """``transformer_engine_vs_native.{json,md}``."""
        folder.mkdir(parents=True, exist_ok=True)
        machine = {"torch": torch.__version__, "device": str(device_facts("cuda"))}
        if torch.cuda.is_available():
            from parallel.precision import transformer_engine

            machine["transformer_engine"] = str(transformer_engine.facts().version)
        name = folder / "transformer_engine_vs_native"
        told = {"machine": machine, "rows": self.rows}
        name.with_suffix(".json").write_text(json.dumps(told, indent=1) + "\n")
        lines = [f"{key}: {value}  " for key, value in machine.items()]
        lines += ["", "| recipe | what | found |", "|---|---|---|"]
        for row in self.rows:
            found = ", ".join(
                f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}"
                for k, v in row.items()
                if k not in ("recipe", "what")
            )
            lines.append(f"| {row['recipe']} | {row['what']} | {found} |")
        name.with_suffix(".md").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measurements]:
    measurements = Measurements()
    yield measurements
    if measurements.rows:
        given = os.environ.get(OUT_VARIABLE)
        measurements.write(Path(given) if given else tmp_path_factory.mktemp("gpu"))
