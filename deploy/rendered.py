"""What is rendered, how it is written, and how it differs from what is there.

Promises: pure but for ``write`` and ``differences``, which touch the folder that they are given
and nothing else; a file that is the same is not written again.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


@dataclass(frozen=True, slots=True)
class Rendered:
    """One file."""

    name: str
    text: str
    executable: bool = False


@dataclass(frozen=True, slots=True)
class Difference:
    """How one file would change."""

    name: str
    new: bool
    lines: tuple[str, ...]
    """A unified diff."""


class _Dumper(yaml.SafeDumper):
    """Without aliases, which nobody wants to read, and lists indented below their key."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def yaml_text(documents: Sequence[Mapping[str, Any]], comment: str) -> str:
    """YAML documents below a comment of some lines."""
    head = "".join(f"# {line}".rstrip() + "\n" for line in comment.splitlines())
    each = [yaml.dump(d, Dumper=_Dumper, sort_keys=False, width=100) for d in documents]
    return head + "---\n".join(each)


def write(files: Sequence[Rendered], folder: Path) -> list[Path]:
    """Put the files there; those that were new or another."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for file in files:
        path = folder / file.name
        mode = 0o755 if file.executable else 0o644
        if path.exists() and path.read_text(encoding="utf-8") == file.text:
            continue
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(file.text, encoding="utf-8")
        beside.chmod(mode)
        beside.replace(path)
        written.append(path)
    return written


def differences(files: Sequence[Rendered], folder: Path) -> list[Difference]:
    """Against what the folder has; files there that aren't rendered are not looked at."""
    found = []
    for file in files:
        path = folder / file.name
        new = not path.exists()
        before = "" if new else path.read_text(encoding="utf-8")
        if before == file.text:
            continue
        lines = difflib.unified_diff(
            before.splitlines(),
            file.text.splitlines(),
            "/dev/null" if new else str(path),
            f"{file.name} (rendered)",
            lineterm="",
        )
        found.append(Difference(file.name, new, tuple(lines)))
    return found
