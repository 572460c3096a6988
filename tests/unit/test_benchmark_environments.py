"""Releases of peers are those of their own environments."""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks.peers.environments import WHOLE, releases


def test_a_whole_environment_tells_what_is_installed_in_it(tmp_path: Path) -> None:
    # A program that prints a number in the place of a Python.
    for name in ("torchft", "ray_train"):
        (tmp_path / name / "bin").mkdir(parents=True)
        python = tmp_path / name / "bin/python"
        python.write_text("#!/bin/sh\necho 0.2.0\n")
        python.chmod(0o755)
    (tmp_path / "torchft" / WHOLE).write_text("torchft\n")
    told = {"torchft's torchft": "0.2.0", "torchft's torch": "0.2.0"}
    assert releases(["torchft", "ray_train", None, "octavo"], tmp_path) == told
    assert releases(["ray_train"], tmp_path) == {}
