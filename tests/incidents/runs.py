"""Runs scenarios on layouts, beside undisturbed jobs of the same layout, and judges them."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.incidents.local_ranks import Told, run_job
from tests.incidents.scenarios import Healthy, Scenario, Seen, job, rehearsal, seen, wrongs

SEEDS = (0, 1, 2)
LEAST_SPREAD = 0.03
"""Share of the loss that undisturbed runs are taken to differ by at least: the mean of ten steps of
eight sequences has noise of its own, and a batch that is skipped moves every one after it."""


class Runs:
    """Jobs in one folder; undisturbed ones are run once a layout."""

    def __init__(self, folder: Path, seeds: int = len(SEEDS)) -> None:
        self._folder = folder
        self._seeds = SEEDS[:seeds]
        self.undisturbed = cache(self._undisturbed)

    def train(self, layout: str, **sections: Any) -> Told:
        """One job to its end."""
        return run_job(job(self._folder, layout, **sections), folder=self._new())

    def stay_healthy(self, healthy: Healthy, layout: str) -> tuple[Told, list[str]]:
        """What became of a job in which nothing is wrong, and what of that is."""
        specs = [job(self._folder, layout, **sections) for sections in healthy.stretches]
        told = run_job(*specs, folder=self._new())
        answers = tuple(action.kind for action in told.actions)
        wrong = [] if answers == healthy.answers else [a.reason for a in told.actions]
        if told.state != "succeeded" or len(told.kept) != specs[-1].training.steps:
            wrong.append(f"the job {told.state} after {len(told.kept)} steps")
        return told, wrong

    def _undisturbed(self, layout: str, steps: int) -> tuple[float, float]:
        """Final loss of the job without a drill, and how far other orders of its data end."""
        runs = [
            self.train(layout, training={"steps": steps}, data={"shuffle_seed": seed})
            for seed in self._seeds
        ]
        for told in runs:
            assert not told.actions, f"undisturbed, and {told.actions[0].reason}"
        losses = [told.final_loss() for told in runs]
        spread = max(abs(loss - losses[0]) for loss in losses)
        return losses[0], max(spread, LEAST_SPREAD * losses[0])

    def rehearse(self, scenario: Scenario, layout: str) -> tuple[Seen, list[str]]:
        """What became of a drill, and what of that is wrong."""
        spec = rehearsal(self._folder, scenario, layout)
        found = seen(run_job(spec, folder=self._new()))
        loss, spread = self.undisturbed(layout, spec.training.steps)
        return found, wrongs(scenario, found, loss, spread)

    def _new(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="job-", dir=self._folder))


def rows(scenario: Scenario, layout: str, found: Seen, wrong: list[str]) -> Iterator[str]:
    """The scenario's line of the table, as its cells."""
    yield scenario.name
    yield layout
    yield "nothing" if found.incident is None else found.incident.kind
    yield "-" if found.delay is None else str(found.delay)
    yield ", ".join(found.suspects[:2]) or "-"
    yield ", ".join(found.answers) or "-"
    yield str(found.lost)
    yield f"{found.final_loss:.3f}"
    yield "; ".join(wrong) or "as it must be"
