"""A side's run: what is done now and then is in its time a step, and a disturbed one is none."""

from __future__ import annotations

from itertools import accumulate

import pytest

from tests.benchmarks.peers.processes import SideError
from tests.benchmarks.sides import run_of


def test_work_at_each_tenth_step_is_in_the_time_of_a_step() -> None:
    even = run_of(0.0, list(accumulate([1.0] * 240)), [2.0] * 240, 240)
    stalls = [2.5 if step % 10 == 9 else 1.0 for step in range(240)]
    stalled = run_of(0.0, list(accumulate(stalls)), [2.0] * 240, 240)
    assert even.step_s == pytest.approx(1.0)
    assert stalled.step_s == pytest.approx(1.15, rel=0.01)


def test_work_at_each_hundredth_step_is_in_it_too() -> None:
    stalls = [13.0 if step % 100 == 99 else 1.0 for step in range(240)]
    stalled = run_of(0.0, list(accumulate(stalls)), [2.0] * 240, 240)
    assert stalled.step_s == pytest.approx(1.1, rel=0.01)


def test_a_run_that_did_steps_again_is_none() -> None:
    with pytest.raises(SideError, match="247 steps were told of 240"):
        run_of(0.0, list(range(247)), [2.0] * 247, 240)
