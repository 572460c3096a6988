"""Where a job's time went: the four uses add up to the wall time, whatever happened."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monitoring.environment import environment, environment_of
from monitoring.goodput import WAITING, goodput
from monitoring.job_view import JobView
from monitoring.records import StepRecord
from monitoring.summary import summarize
from tests.unit.monitoring_traces import recovered_view


def done(
    step: int, time: float, attempt: int = 1, timeline: int = 0, took: float = 1.0
) -> StepRecord:
    return StepRecord(attempt, timeline, step, time, step, 2.0, 1.0, 1e-3, 10, took)


def state(time: float, to: str) -> dict[str, Any]:
    return {"kind": "state", "time": time, "message": to, "detail": {"from": "?", "to": to}}


def event(time: float, kind: str, **detail: Any) -> dict[str, Any]:
    return {"kind": kind, "time": time, "message": kind, "detail": detail}


def action(
    time: float, kind: str, seen: float, attempt: int = 1, timeline: int = 0
) -> dict[str, Any]:
    return {"kind": kind, "time": time, "attempt": attempt, "timeline": timeline, "step": 2,
            "in_place": kind != "restart", "to_step": 1, "incidents": [{"time": seen}]}  # fmt: skip


def test_each_second_of_a_job_with_a_restart_a_rollback_and_a_pause_is_told() -> None:
    view = JobView(
        "toy-1",
        "succeeded",
        {},
        steps=[
            *(done(n, 21.0 + n) for n in range(4)),  # 20..24: steps 0 to 3
            done(2, 31.0, 2),  # after the restart; 2 and 3 are done again
            done(3, 32.0, 2),
            done(1, 34.0, 2, 1),  # rolled back to 1: 1, 2 and 3 are done again
            done(2, 35.0, 2, 1),
            done(3, 49.0, 3, 1),
            done(4, 50.5, 3, 1),
        ],
        actions=[
            action(26.0, "restart", 25.5),
            action(32.5, "rollback", 32.2, attempt=2),
        ],
        events=[
            event(10.0, "submitted"),
            state(15.0, "starting"),
            state(21.0, "running"),
            state(35.0, "paused"),
            state(40.0, "queued"),
            state(42.0, "starting"),
            state(49.0, "running"),
            state(52.0, "succeeded"),
        ],
    )
    told = goodput(view)
    assert told.to_json() == {
        "wall_s": 42.0,
        # Step 0 of the first attempt, 1 and 2 of the second's new timeline, and the last two.
        "productive_s": 5.0,
        "lost_s": 5.0,
        # 24 to 30, and 32 to 33.
        "recovering_s": 7.0,
        "waiting_s": 25.0,
        "waiting": {
            "queued_s": 5.0 + 2.0,
            "starting_s": 5.0 + 6.0,
            "paused_s": 5.0,
            "between_s": 0.5 + 1.5,
        },
    }
    assert told.spans[0].use == "queued"
    assert [(s.begin, s.end) for s in told.spans if s.use == "recovering"] == [(24, 30), (32, 33)]


def test_without_events_a_jobs_time_begins_with_its_first_step() -> None:
    told = goodput(JobView("toy-1", "running", {}, steps=[done(n, 10.0 + 2 * n) for n in range(3)]))
    assert (told.wall_s, told.seconds("productive"), told.seconds("between")) == (5.0, 3.0, 2.0)
    assert goodput(JobView("toy-1", "queued", {})).to_json()["wall_s"] == 0.0


def test_a_trouble_that_nothing_followed_yet_is_still_recovering() -> None:
    view = JobView(
        "toy-1",
        "recovering",
        {},
        steps=[done(0, 1.0), done(1, 2.0)],
        actions=[action(4.0, "restart", 3.0)],
        events=[event(9.0, "attempt")],
    )
    assert goodput(view).seconds("recovering") == 7.0


times = st.floats(0, 1000, allow_nan=False)


STEPS = st.tuples(st.integers(0, 9), times, st.integers(1, 3), st.floats(0, 50))
ACTIONS = st.tuples(times, st.sampled_from(["restart", "rollback", "skip_step"]), times)
STATES = st.tuples(times, st.sampled_from(["queued", "starting", "running", "paused", "failed"]))


@given(
    steps=st.lists(STEPS, max_size=20),
    actions=st.lists(ACTIONS, max_size=5),
    events=st.lists(STATES, max_size=9),
)
@settings(max_examples=100, deadline=None)
def test_the_uses_add_up_to_the_wall_time_whatever_is_recorded(
    steps: list[Any], actions: list[Any], events: list[Any]
) -> None:
    view = JobView(
        "toy-1",
        "running",
        {},
        steps=[done(n, at, attempt, 0, took) for n, at, attempt, took in steps],
        actions=[action(at, kind, seen) for at, kind, seen in actions],
        events=[state(at, to) for at, to in events],
    )
    told = goodput(view)
    row = told.to_json()
    parts = row["productive_s"] + row["lost_s"] + row["recovering_s"] + row["waiting_s"]
    assert math.isclose(parts, row["wall_s"], abs_tol=1e-6)
    assert math.isclose(sum(row["waiting"].values()), row["waiting_s"], abs_tol=1e-6)
    for before, after in zip(told.spans, told.spans[1:], strict=False):
        assert before.end == after.begin and before.use != after.use
    assert all(span.end > span.begin for span in told.spans)


def test_a_summary_has_the_accounting() -> None:
    told = summarize(recovered_view())["goodput"]
    assert told["lost_s"] > 0 and told["recovering_s"] > 0
    assert told["wall_s"] == pytest.approx(
        sum(told[f"{use}_s"] for use in ("productive", "lost", "recovering", "waiting"))
    )
    assert set(told["waiting"]) == {f"{use}_s" for use in WAITING}


def test_the_environment_is_that_of_the_newest_attempt_and_has_no_path() -> None:
    here = environment()
    assert {"python", "cpus", "torch", "deepspeed", "ray", "octavo"} <= set(here)
    assert not any("/" in value for value in here.values())
    view = recovered_view()
    assert environment_of(view) == {}
    events = [
        {"kind": "attempt_started", "time": 0.0, "message": "", "detail": {"environment": {"a": n}}}
        for n in "12"
    ]
    assert environment_of(dataclasses.replace(view, events=events)) == {"a": "2"}
