"""Stops before a host ends: one refused moment cuts off no checkpoint, and time is the job's."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deploy.serve import PAUSED, REASON, Service, paused_by_host
from orchestrator.api.client_errors import (
    ClientError,
    NotAllowedError,
    NotFoundError,
    RefusedError,
    ServerError,
    TooManyRequestsError,
    UnreachableError,
)
from orchestrator.api.stops import TELL_TIME, Stops
from orchestrator.cli.run import _Work
from orchestrator.cli.show import Output
from orchestrator.cli.up import bring_down
from orchestrator.home.folder import Home
from orchestrator.lifecycle import AFTER_STOP_S, LONGEST_STOP_S
from orchestrator.supervision.notices import STOPPING

LOCKED = ServerError("the store is locked; try again")
LATE = UnreachableError("the controller doesn't answer, though its host runs: timed out")
OFTEN = TooManyRequestsError("the controller is asked too often")
MOMENTS = pytest.mark.parametrize("moment", [LOCKED, LATE, OFTEN])


class Clock:
    """Time that passes as somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Plane:
    """A client whose jobs stop ``takes_s`` after they are told to; ``refusals`` are met first."""

    def __init__(self, clock: Clock, *names: str, takes_s: float = 60.0) -> None:
        self.clock = clock
        self.takes_s = takes_s
        self.rescue_s = 0.0
        self.given_s: float | None = None
        self.refusals: dict[str, list[ClientError]] = {}
        self.answered: list[str] = []
        self.open: list[dict[str, Any]] = []
        self.told: dict[str, tuple[float, str]] = {}
        self.found = {name: self._job(name, "running") for name in names}

    def _job(self, name: str, state: str) -> dict[str, Any]:
        return {
            "id": name,
            "state": state,
            "settled": state in ("paused", "cancelled"),
            "reason": "",
            "job_dir": "/nowhere",
            "attempt": 1,
            "nodes": [],
        }

    def _asked(self, what: str) -> None:
        if waiting := self.refusals.get(what):
            raise waiting.pop(0)
        self.answered.append(what)

    def patiently(self, ask: Callable[..., Any], *args: Any) -> Any:
        return ask(*args)

    def jobs(self) -> list[dict[str, Any]]:
        self._asked("jobs")
        return list(self.found.values())

    def job(self, name: str) -> dict[str, Any]:
        self._asked(f"job {name}")
        if name in self.told:
            since, after = self.told[name]
            waited = self.clock.now - since
            if waited >= self.takes_s:
                settled = waited >= self.takes_s + self.rescue_s
                self.found[name] |= {"state": after, "settled": settled}
        return dict(self.found[name])

    def events(self, name: str, after: int) -> dict[str, Any]:
        told = []
        if self.given_s is not None and name in self.told and not after:
            detail = {"given_s": self.given_s}
            told = [{"id": 1, "kind": "stopping", "attempt": 1, "detail": detail}]
        return {"events": told, "next": 1 if told else after}

    def cancel(self, name: str, _: str) -> dict[str, Any]:
        self._asked(f"cancel {name}")
        self.found[name] |= {"state": "cancelling"}
        self.told[name] = (self.clock.now, "cancelled")
        return self.found[name]

    def pause(self, name: str, **_: str) -> dict[str, Any]:
        self._asked(f"pause {name}")
        self.told[name] = (self.clock.now, "paused")
        return {}

    def resume(self, name: str, _: str) -> dict[str, Any]:
        self._asked(f"resume {name}")
        return {}

    def controls(self, _: str) -> list[dict[str, Any]]:
        return self.open

    def close(self) -> None:
        pass


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    for module in ("orchestrator.api.stops", "orchestrator.api.patience", "deploy.serve"):
        monkeypatch.setattr(f"{module}.time", found)
    return found


def stop(plane: Plane, **others: Any) -> Stops:
    def order(job: str) -> object:
        return plane.cancel(job, "why")

    settings: dict[str, Any] = {"gone": lambda: False, **others}
    return Stops(plane, plane.found, asked=list(plane.found), order=order, **settings)  # type: ignore[arg-type]


@MOMENTS
def test_a_poll_and_an_order_that_are_refused_for_a_moment_are_said_again(
    clock: Clock, moment: ClientError
) -> None:
    plane = Plane(clock, "a", "b")
    plane.refusals = {"cancel a": [moment], "job a": [moment, moment], "job b": [moment]}
    found = stop(plane)
    found.wait()
    assert [job["state"] for job in found.jobs.values()] == ["cancelled", "cancelled"]
    assert found.going_on() == []


def test_all_have_their_orders_before_any_is_looked_at(clock: Clock) -> None:
    plane = Plane(clock, "a", "b", "c")
    stop(plane).wait()
    assert plane.answered[:4] == ["cancel a", "cancel b", "cancel c", "job a"]


def test_an_order_that_is_refused_or_finds_no_job_is_not_said_again(clock: Clock) -> None:
    plane = Plane(clock, "a", "b", takes_s=5.0)
    plane.told = {"a": (clock.now, "succeeded"), "b": (clock.now, "succeeded")}
    plane.refusals = {"cancel a": [RefusedError("ended")], "cancel b": [NotFoundError("none")]}
    found = stop(plane)
    found.wait()
    assert found.going_on() == [] and not any("cancel" in one for one in plane.answered)


def test_an_order_that_the_token_may_not_give_is_told_at_once(clock: Clock) -> None:
    plane = Plane(clock, "a")
    plane.refusals = {"cancel a": [NotAllowedError("this needs admin")]}
    with pytest.raises(NotAllowedError):
        stop(plane).wait()


def test_only_a_host_that_is_known_to_be_gone_ends_the_wait(clock: Clock) -> None:
    plane = Plane(clock, "a")
    plane.refusals = {"job a": [LATE] * 10_000}
    began = clock.now
    found = stop(plane, gone=lambda: clock.now > began + 30.0)
    found.wait()
    assert clock.now < began + 31.0 and found.going_on() == ["a"]


def test_a_stop_is_waited_for_as_long_as_the_job_says_that_it_may_take(clock: Clock) -> None:
    plane = Plane(clock, "a", takes_s=3500.0)
    plane.given_s = 3600.0
    found = stop(plane)
    found.wait()
    assert found.going_on() == [] and found.given == {"a": 3600.0}


def test_a_stop_that_says_nothing_is_given_up_in_time(clock: Clock) -> None:
    plane = Plane(clock, "a", takes_s=3500.0)
    began = clock.now
    found = stop(plane)
    found.wait()
    assert found.going_on() == ["a"]
    assert LONGEST_STOP_S <= clock.now - began < LONGEST_STOP_S + 5


def test_where_the_platform_ends_the_host_its_grace_is_the_end_of_the_wait(clock: Clock) -> None:
    plane = Plane(clock, "a", takes_s=3500.0)
    plane.given_s = 3600.0
    began = clock.now
    found = stop(plane, bound=began + 700.0)
    found.wait()
    assert found.going_on() == ["a"] and clock.now - began < 705.0
    assert found.given["a"] + AFTER_STOP_S > 700.0


@pytest.fixture
def down(clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Plane], int]:
    def run(plane: Plane) -> int:
        host = SimpleNamespace(slots=4, alive=lambda: True)
        monkeypatch.setattr("orchestrator.cli.up.running_host", lambda _: host)
        monkeypatch.setattr("orchestrator.cli.up.Client.of_home", lambda _: plane)
        monkeypatch.setattr(
            "orchestrator.cli.up.end_host", lambda *_: plane.answered.append("host ended")
        )
        return bring_down(Home(tmp_path), "alice", Output.table)

    return run


@MOMENTS
def test_down_ends_the_host_after_the_last_checkpoint_though_a_poll_is_refused(
    clock: Clock, down: Callable[[Plane], int], moment: ClientError
) -> None:
    plane = Plane(clock, "a")
    plane.refusals = {"job a": [moment]}
    assert down(plane) == 0
    assert plane.found["a"]["state"] == "cancelled"
    assert plane.answered[-1] == "host ended"


def test_down_that_cuts_a_job_off_says_so_by_its_exit_code_and_how_it_goes_on(
    clock: Clock, down: Callable[[Plane], int], capsys: pytest.CaptureFixture[str]
) -> None:
    plane = Plane(clock, "a", takes_s=3500.0)
    assert down(plane) == 1
    told = capsys.readouterr().out
    assert "a was ended before its last checkpoint was written" in told
    assert "octavo resume a" in told


def test_run_waits_for_the_last_checkpoint_though_a_poll_is_refused(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = Plane(clock, "a")
    plane.refusals = {"cancel a": [LOCKED], "job a": [LATE]}
    work = _Work(None, "job.yaml", None, sys.stdout)  # type: ignore[arg-type]
    work.job = {**plane.found["a"], "state": "queued"}  # as it was when it was submitted
    work._host = SimpleNamespace(alive=lambda: True)  # type: ignore[assignment]
    work._cancel(plane, "a", "interrupted")  # type: ignore[arg-type]
    assert work.job["state"] == "cancelled"


@pytest.fixture
def serving(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Service]:
    def of(plane: Plane) -> Service:
        monkeypatch.setattr("deploy.serve.Client.of_home", lambda _: plane)
        return Service(Home(tmp_path), "127.0.0.1:1", 1, grace_s=700.0)

    return of


@MOMENTS
def test_a_host_that_ends_waits_for_its_jobs_though_it_is_refused_for_a_moment(
    clock: Clock, serving: Callable[..., Service], moment: ClientError
) -> None:
    plane = Plane(clock, "a")
    plane.refusals = {"jobs": [moment], "pause a": [moment], "job a": [moment]}
    serving(plane)._pause_all()
    assert plane.found["a"]["state"] == "paused"


def test_a_host_that_ends_waits_until_what_memory_holds_is_written(
    clock: Clock, serving: Callable[..., Service]
) -> None:
    plane = Plane(clock, "a", takes_s=0.0)
    plane.rescue_s = 300.0
    serving(plane)._pause_all()
    assert plane.found["a"]["settled"]


def test_a_host_that_ends_waits_for_what_somebody_else_stops_too(
    clock: Clock, serving: Callable[..., Service], tmp_path: Path
) -> None:
    plane = Plane(clock, "a")
    plane.cancel("a", "a person")
    serving(plane)._pause_all()
    assert plane.found["a"]["state"] == "cancelled"
    assert not (tmp_path / PAUSED).exists() and "pause a" not in plane.answered


def test_a_host_whose_grace_is_too_short_tells_what_is_lost(
    clock: Clock, serving: Callable[..., Service], capsys: pytest.CaptureFixture[str]
) -> None:
    plane = Plane(clock, "a", takes_s=3500.0)
    plane.given_s = 3600.0
    serving(plane)._pause_all()
    told = capsys.readouterr().out
    assert "a is not at rest after 700 s" in told and "3600 s for its last checkpoint" in told


def test_a_host_that_ends_again_keeps_what_it_has_not_resumed_yet(
    clock: Clock, serving: Callable[..., Service], tmp_path: Path
) -> None:
    (tmp_path / PAUSED).write_text(json.dumps(["before"]))
    serving(Plane(clock, "a"))._pause_all()
    assert paused_by_host(Home(tmp_path)) == ["before", "a"]


@MOMENTS
def test_a_resume_that_is_refused_for_a_moment_is_asked_again(
    clock: Clock, serving: Callable[..., Service], tmp_path: Path, moment: ClientError
) -> None:
    plane = Plane(clock, "c", "d")
    plane.refusals = {"resume c": [moment]}
    (tmp_path / PAUSED).write_text(json.dumps(["c", "d"]))
    serving(plane)._resume_paused()
    assert plane.answered == ["resume c", "resume d"]
    assert not (tmp_path / PAUSED).exists()


def test_a_job_waits_to_be_resumed_until_it_has_an_answer(
    clock: Clock, serving: Callable[..., Service], tmp_path: Path
) -> None:
    plane = Plane(clock, "c", "d", "e")
    plane.refusals = {"resume c": [RefusedError("it runs")], "resume d": [LOCKED] * 10_000}
    (tmp_path / PAUSED).write_text(json.dumps(["c", "d", "e"]))
    service = serving(plane)
    service._resume_paused()
    assert paused_by_host(Home(tmp_path)) == ["d"] and plane.answered == ["resume e"]
    plane.refusals = {}
    service._resume_paused()
    assert plane.answered == ["resume e", "resume d"] and not (tmp_path / PAUSED).exists()


def test_a_job_whose_host_ended_before_its_pause_is_resumed_once_that_came(
    clock: Clock, serving: Callable[..., Service], tmp_path: Path
) -> None:
    plane = Plane(clock, "a")
    plane.open = [{"kind": "pause", "state": "accepted", "reason": REASON}]
    plane.refusals = {"resume a": [RefusedError("a is running already")]}
    (tmp_path / PAUSED).write_text(json.dumps(["a"]))
    service = serving(plane)
    service._resume_paused()
    assert paused_by_host(Home(tmp_path)) == ["a"]
    service._resume_paused()
    assert plane.answered == ["resume a"] and not (tmp_path / PAUSED).exists()


def test_time_of_a_stop_is_read_from_the_events_that_tell_it() -> None:
    assert STOPPING in TELL_TIME
