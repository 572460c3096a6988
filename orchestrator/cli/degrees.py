"""``--parallelism tensor=2,data=1`` as words and numbers."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from orchestrator.cli.show import USAGE, CommandError


def degrees_of(words: Sequence[str]) -> dict[str, int]:
    """``["tensor=2,data=1", "num_nodes=4"]`` → numbers by word; a usage error for anything else."""
    from orchestrator.spec.degrees import WORDS

    found: dict[str, int] = {}
    for part in (part.strip() for word in words for part in word.split(",")):
        name, _, number = part.partition("=")
        if name not in WORDS:
            near = difflib.get_close_matches(name, WORDS, n=1)
            offered = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(WORDS)}"
            raise CommandError(f"--parallelism: {part!r}: no degree {name!r}", offered, USAGE)
        if not number.isascii() or not number.isdigit():
            message = f"--parallelism: {part!r} has no number"
            raise CommandError(message, f"write it as {name}=2", USAGE)
        found[name] = int(number)
    return found
