"""How the sides of a benchmark write down the ends of their steps."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.benchmarks.peers.recorded import RANK, Recorder, read, watch_optimizers


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    monkeypatch.setenv(RANK, "1")
    made = Recorder(tmp_path)
    handle = watch_optimizers(made)
    yield made
    handle.remove()


def step(recorder: Recorder, optimizer: torch.optim.Optimizer, *losses: float) -> None:
    for value in losses:
        recorder.loss(torch.tensor(value))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def adamw() -> torch.optim.AdamW:
    return torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], fused=True)


def test_the_end_of_a_step_is_a_line_with_the_mean_of_its_micro_batches(
    recorder: Recorder, tmp_path: Path
) -> None:
    optimizer = adamw()
    step(recorder, optimizer, 4.0, 2.0)
    step(recorder, optimizer, 1.0, 2.0)
    ends = read(tmp_path)
    assert [(end.step, end.loss, end.rank, end.pid) for end in ends] == [
        (0, 3.0, 1, os.getpid()),
        (1, 1.5, 1, os.getpid()),
    ]
    assert ends[0].time < ends[1].time


def test_a_step_that_is_done_again_after_its_state_was_put_back_has_its_own_number(
    recorder: Recorder, tmp_path: Path
) -> None:
    optimizer = adamw()
    step(recorder, optimizer, 1.0)
    saved = copy.deepcopy(optimizer.state_dict())
    step(recorder, optimizer, 2.0)
    step(recorder, optimizer, 3.0)
    optimizer.load_state_dict(saved)
    step(recorder, optimizer, 2.0)
    assert [(end.step, end.loss) for end in read(tmp_path)] == [
        (0, 1.0),
        (1, 2.0),
        (2, 3.0),
        (1, 2.0),
    ]


def test_an_optimizer_that_steps_group_by_group_ends_a_step_once(
    recorder: Recorder, tmp_path: Path
) -> None:
    groups = [adamw(), adamw()]
    for value in (1.0, 2.0):
        recorder.loss(torch.tensor(value))
        for optimizer in groups:
            step(recorder, optimizer)
    assert [(end.step, end.loss) for end in read(tmp_path)] == [(0, 1.0), (1, 2.0)]
