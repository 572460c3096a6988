"""What preflight came to on a job's nodes, attempt by attempt. Pure.

Promises: the same check is known again whatever it measured; a node counts as one that passed it
only where it was tried.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from launch.preflight import Failure


@dataclass(frozen=True, slots=True)
class Checked:
    """What preflight came to in an attempt."""

    attempt: int
    time: float
    nodes: tuple[str, ...]
    """That have ranks, by Ray's id."""
    failed: Mapping[str, Failure]
    """Of these; none where the attempt trained."""

    def passed(self, check: str) -> set[str]:
        """Nodes that came through ``check``. Links are tried once every node has passed alone."""
        if of_links(check) and self.failed and not any(map(of_links, self._reasons())):
            return set()
        return set(self.nodes) - self.failed.keys()

    def _reasons(self) -> list[str]:
        return [check_of(failure.reason) for failure in self.failed.values()]


def check_of(message: str) -> str:
    """Which check of preflight a failure's reason tells of, without what it measured."""
    return re.sub(r"[\w.:/]*\d[\w.:/]*", "#", message.partition(": ")[0])


def of_links(check: str) -> bool:
    """Whether it is one of what is between nodes."""
    return re.search(r"\blinks\b", check) is not None
