"""What recorded steps of a run with a killed rank come to."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.peers.jobs import EARLIEST, LATEST, planned_fault
from tests.benchmarks.peers.judging import (
    Fault,
    HowEnded,
    Verdict,
    final_difference,
    judge,
    losses,
    step_seconds,
)
from tests.benchmarks.peers.recorded import StepEnd, read

STEP_S = 0.2
WORLD = 2
STEPS = 30


def trained(first: int, last: int, begin: float, *, pid: int, rank: int) -> list[StepEnd]:
    """Steps ``first`` to ``last`` of one process at the usual pace, the first at ``begin``."""
    return [
        StepEnd(begin + i * STEP_S, step, 5.0 - 0.1 * step, rank, pid)
        for i, step in enumerate(range(first, last + 1))
    ]


def before(last: tuple[int, int]) -> list[StepEnd]:
    """Both ranks from step 0, up to these."""
    return [end for rank in (0, 1) for end in trained(0, last[rank], 100.0, pid=rank, rank=rank)]


def again(first: int, begin: float, last: int = STEPS - 1) -> list[StepEnd]:
    """Both ranks in new processes."""
    return [end for rank in (0, 1) for end in trained(first, last, begin, pid=10 + rank, rank=rank)]


def judged(ends: list[StepEnd], fault: Fault | None, how: HowEnded = "finished") -> Verdict:
    ordered = sorted(ends, key=lambda end: end.time)
    return judge(ordered, fault, world=WORLD, steps=STEPS, how=how)


def at(step: int, part: float = 0.5, rank: int = 0) -> Fault:
    """Rank's SIGKILL, ``part`` of a step after the end of ``step``."""
    return Fault(100.0 + (step + part) * STEP_S, rank, rank)


class TestRecovery:
    def test_the_outage_ends_with_the_first_step_that_nobody_had_done(self) -> None:
        fault = at(14)
        verdict = judged(before((14, 14)) + again(10, fault.time + 3.0), fault)
        assert verdict.outcome == "recovered"
        assert verdict.redone == 5  # 10 to 14
        assert verdict.outage_s == pytest.approx(3.0 + 5 * STEP_S)
        assert verdict.again_s == pytest.approx(3.0)
        assert verdict.whole_s == pytest.approx(verdict.outage_s)
        assert verdict.alone == 0

    def test_a_step_in_flight_that_the_survivor_finishes_is_no_recovery(self) -> None:
        fault = at(14)
        verdict = judged(before((14, 15)) + again(10, fault.time + 3.0), fault)
        assert verdict.redone == 6  # 15 was done, and is done again
        assert verdict.outage_s == pytest.approx(3.0 + 6 * STEP_S)
        assert verdict.again_s == pytest.approx(3.0)

    def test_a_step_that_the_killed_rank_had_ended_and_the_survivor_ends_is_not_redone(
        self,
    ) -> None:
        fault = Fault(100.0 + 14 * STEP_S + 0.001, 0, 0)
        late = [
            replace(end, time=end.time + 0.002) if end.rank == 1 and end.step == 14 else end
            for end in before((14, 14))
        ]
        assert judged(late + again(15, fault.time + 3.0), fault).redone == 0

    def test_a_survivor_that_goes_on_alone_ends_the_outage_but_is_not_whole(self) -> None:
        fault = at(14)
        alone = trained(15, STEPS - 1, fault.time + 1.0, pid=1, rank=1)
        rejoined = [replace(e, rank=0, pid=10, time=e.time + 0.01) for e in alone if e.step >= 20]
        verdict = judged(before((14, 14)) + alone + rejoined, fault)
        assert verdict.outage_s == verdict.again_s == pytest.approx(1.0)
        assert verdict.whole_s == pytest.approx(1.0 + 5 * STEP_S + 0.01)
        assert (verdict.redone, verdict.alone) == (0, 5)

    @given(
        last=st.integers(1, STEPS - 3),
        lag=st.integers(0, 1),
        part=st.floats(0.01, 0.99),
        back=st.integers(0, STEPS),
        away_s=st.floats(1.0, 60.0),
    )
    def test_of_a_restart_both_are_as_it_was_made(
        self, last: int, lag: int, part: float, back: int, away_s: float
    ) -> None:
        fault = at(last, part)
        resumed = max(0, last - back)
        ends = before((last, last + lag)) + again(resumed, fault.time + away_s)
        verdict = judged(ends, fault)
        done = last + lag
        assert verdict.redone == done - resumed + 1
        assert verdict.outage_s == pytest.approx(away_s + (done + 1 - resumed) * STEP_S)
        assert verdict.outcome == "recovered"


class TestOtherEnds:
    def test_no_new_step_until_it_was_ended_is_a_hang(self) -> None:
        verdict = judged(before((14, 14)), at(14), "stalled")
        assert (verdict.outcome, verdict.outage_s, verdict.whole_s) == ("hang", None, None)

    def test_steps_done_again_and_none_new_are_a_hang_too(self) -> None:
        ends = before((14, 14)) + again(10, 120.0, last=13)
        verdict = judged(ends, fault := at(14), "stalled")
        assert verdict == Verdict("hang", None, None, 120.0 - fault.time, 4, 0)

    def test_an_exit_is_a_failure_even_after_new_steps(self) -> None:
        ends = before((14, 14)) + again(15, 120.0, last=20)
        verdict = judged(ends, at(14), "exited")
        assert verdict.outcome == "failed"
        assert verdict.outage_s is not None

    def test_an_end_without_the_last_step_is_a_failure(self) -> None:
        ends = before((14, 14)) + again(15, 120.0, last=STEPS - 2)
        assert judged(ends, at(14)).outcome == "failed"

    @pytest.mark.parametrize(
        ("how", "outcome"),
        [("finished", "undisturbed"), ("stalled", "hang"), ("exited", "failed")],
    )
    def test_without_a_fault_there_is_no_outage(self, how: HowEnded, outcome: str) -> None:
        verdict = judged(before((STEPS - 1, STEPS - 1)), None, how)
        assert verdict == Verdict(outcome, None, None, None, 0, 0)  # type: ignore[arg-type]


class TestLosses:
    def test_the_last_record_of_a_step_counts_and_ranks_are_averaged(self) -> None:
        first = [StepEnd(1.0, 0, 4.0, 0, 0), StepEnd(1.1, 0, 2.0, 1, 1)]
        redone = [StepEnd(5.0, 0, 3.0, 0, 10)]
        assert losses(first + redone) == {0: 2.5}

    def test_a_stage_without_the_loss_says_nothing(self) -> None:
        assert losses([StepEnd(1.0, 0, math.nan, 0, 0), StepEnd(1.0, 0, 2.0, 1, 1)]) == {0: 2.0}

    def test_final_losses_are_compared_over_the_last_steps_of_the_undisturbed_run(self) -> None:
        undisturbed = dict.fromkeys(range(20), 2.0)
        found = {**undisturbed, 3: 9.0, **dict.fromkeys(range(10, 20), 2.2)}
        assert final_difference(found, undisturbed) == pytest.approx(0.1)
        assert final_difference({k: v for k, v in found.items() if k != 15}, undisturbed) is None
        assert final_difference(found, {}) is None


def test_a_line_that_a_kill_cut_off_is_none(tmp_path: Path) -> None:
    end = StepEnd(1.0, 0, 4.0, 0, 7)
    line = json.dumps(asdict(end)) + "\n"
    (tmp_path / "rank-0.jsonl").write_text(line + line[:20])
    (tmp_path / "rank-1.jsonl").write_text(
        json.dumps(asdict(replace(end, time=0.5, rank=1))) + "\n"
    )
    assert read(tmp_path) == [replace(end, time=0.5, rank=1), end]


@given(seed=st.integers(), turn=st.integers(0, 100), steps=st.integers(8, 1000))
def test_a_planned_fault_is_the_same_for_every_side_and_within_the_run(
    seed: int, turn: int, steps: int
) -> None:
    planned = planned_fault(seed, turn, steps=steps, world=WORLD)
    assert planned == planned_fault(seed, turn, steps=steps, world=WORLD)
    assert planned.rank in range(WORLD)
    assert int(steps * EARLIEST) <= planned.after_step <= steps * LATEST
    assert 0 <= planned.delay < 1


def test_a_step_takes_what_it_takes_in_the_second_half_on_the_first_rank() -> None:
    slow = [StepEnd(float(step), step, 2.0, 0, 0) for step in range(10)]
    fast = [StepEnd(10.0 + 0.5 * step, 10 + step, 2.0, 0, 0) for step in range(10)]
    other = [StepEnd(12.25, 15, 2.0, 1, 1)]
    assert step_seconds([*other, *slow, *fast]) == pytest.approx(0.5)
    assert step_seconds(slow[:1]) is None
