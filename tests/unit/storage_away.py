"""A storage that answers every look at a job's checkpoints with an error, as a mount does that is
away or refuses."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.unit.scripted_job import Bench


class Storage:
    """``number``: what it answers now; 0: it is there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, within: str = "checkpoints") -> None:
        self.number = 0
        self.looks = 0
        self.within = within
        """Of paths that have this in them."""
        for name in ("stat", "scandir", "mkdir", "rename", "open"):
            monkeypatch.setattr(os, name, self._instead(getattr(os, name)))

    def _instead(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def answer(path: Any = ".", *more: Any, **named: Any) -> Any:
            if isinstance(path, str | os.PathLike) and self.within in os.fspath(path):
                self.looks += 1
                if self.number:
                    raise OSError(self.number, os.strerror(self.number), os.fspath(path))
            return call(path, *more, **named)

        return answer


def saved_at(job: Bench, step: int) -> None:
    """Trained to ``step``, with a checkpoint of it."""
    job.train(step)
    job.ranks._write_checkpoint()
    job.step()
    assert job.settled().event("checkpoint_written").detail["step"] == step


def restarted(job: Bench, passes: int = 3, seconds: float = 1.0) -> None:
    """A rank dies, and the supervisor does what it does."""
    job.ranks.lose(1)
    for _ in range(passes):
        job.step(seconds)
