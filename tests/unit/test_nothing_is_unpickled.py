"""No code of ours unpickles a file: neither a checkpoint of anybody's nor anything else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("orchestrator", "launch", "parallel", "monitoring", "deploy")
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
"""Whose loading runs code."""
CALLS = {
    ("torch", "load"),
    ("torch.jit", "load"),
    ("torch.serialization", "load"),
    ("numpy", "load"),
    ("np", "load"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
    ("yaml", "full_load"),
    ("pandas", "read_pickle"),
    ("torch.distributed.checkpoint", "load"),
}


def unpickling(text: str) -> Iterator[str]:
    """Imports and calls in a module's text that unpickle, as ``torch.load in line 3``."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] in MODULES:
                    yield f"import {name.name} in line {node.lineno}"
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for name in node.names:
                if node.module.split(".")[0] in MODULES or (node.module, name.name) in CALLS:
                    yield f"{node.module}.{name.name} in line {node.lineno}"
        elif isinstance(node, ast.Attribute):
            if (ast.unparse(node.value), node.attr) in CALLS:
                yield f"{ast.unparse(node)} in line {node.lineno}"
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            yield f"allow_pickle in line {node.value.lineno}"


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_is_unpickled(package: str) -> None:
    modules = sorted((ROOT / package).rglob("*.py"))
    found = {str(m.relative_to(ROOT)): list(unpickling(m.read_text())) for m in modules}
    assert {module: calls for module, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nx = torch.load(path)",
        "from torch import load",
        "import pickle",
        "from pickle import loads",
        "import cloudpickle as p",
        "np.load(path)",
        "f(path, allow_pickle=True)",
        "load = torch.load",
        "import yaml\nyaml.load(text)",
    ],
)
def test_it_would_be_seen(text: str) -> None:
    assert list(unpickling(text))


def test_safe_ways_are_not_taken_for_it() -> None:
    text = "json.load(f)\nyaml.safe_load(t)\nsafetensors.torch.load_file(p)\nnp.fromfile(p)"
    assert not list(unpickling(text))
