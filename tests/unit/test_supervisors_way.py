"""How a supervisor takes what its calls of the controller came to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorUnavailableError, RayTaskError

from orchestrator.controller.supervisors import (
    SILENCE_S,
    STARTING_S,
    LastWords,
    Presence,
    RaySupervisors,
    _Known,
)
from orchestrator.protocol import FencedError
from orchestrator.store.errors import StoreUnavailableError
from orchestrator.supervision.outbox import ControllerUnreachableError
from orchestrator.supervision.supervisor import RayController, Supervisor


def controller_that_raised(cause: Exception, patch: pytest.MonkeyPatch) -> RayController:
    def get(reference: Any, timeout: float) -> None:
        raise RayTaskError("report", "the traceback", cause)

    patch.setattr(ray, "get", get)
    controller = RayController()
    controller._actor = SimpleNamespace(history=SimpleNamespace(remote=lambda *_: None))
    return controller


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What actors were asked and have answered; a test fills it."""
    given: set[str] = set()
    monkeypatch.setattr(ray, "wait", lambda asked, timeout: ([a for a in asked if a in given], []))
    monkeypatch.setattr(ray, "get", lambda reference: True)
    return given


def test_a_store_that_is_held_is_waited_for_as_a_controller_that_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    controller = controller_that_raised(StoreUnavailableError("locked"), monkeypatch)
    with pytest.raises(ControllerUnreachableError, match="locked"):
        controller.history("job")


def test_a_refusal_is_none_of_that(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = controller_that_raised(FencedError("another attempt"), monkeypatch)
    with pytest.raises(FencedError):
        controller.history("job")


def test_a_supervisor_that_has_yet_to_start_is_waited_for_longer_than_one_that_falls_silent(
    answers: set[str],
) -> None:
    actor = SimpleNamespace(ping=SimpleNamespace(remote=lambda: "ping"))
    supervisors = RaySupervisors(object)
    supervisors._known["job"] = _Known(actor, "run")
    assert supervisors.look("job", 0.0) is Presence.WORKING
    assert supervisors.look("job", STARTING_S) is Presence.WORKING
    answers.add("ping")
    assert supervisors.look("job", STARTING_S) is Presence.WORKING
    answers.clear()
    began = STARTING_S + 1.0
    assert supervisors.look("job", began) is Presence.WORKING
    assert supervisors.look("job", began + SILENCE_S) is Presence.WORKING
    assert supervisors.look("job", began + SILENCE_S + 1.0) is Presence.DONE
    assert supervisors.last_words("job").told == f"no answer for {SILENCE_S:.0f} s"
    supervisors._known["job"] = _Known(actor, "run")
    assert supervisors.look("job", 0.0) is Presence.WORKING
    assert supervisors.look("job", STARTING_S + 1.0) is Presence.DONE


def test_one_that_another_controller_started_may_be_starting_still(
    answers: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = SimpleNamespace(ping=SimpleNamespace(remote=lambda: "ping"))
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: actor)
    supervisors = RaySupervisors(object)
    assert supervisors.look("job", 0.0) is Presence.WORKING
    assert supervisors.look("job", STARTING_S) is Presence.WORKING
    answers.add("ping")
    assert supervisors.look("job", STARTING_S) is Presence.WORKING
    answers.clear()
    assert supervisors.look("job", STARTING_S) is Presence.WORKING
    assert supervisors.look("job", STARTING_S + SILENCE_S + 1.0) is Presence.DONE


@pytest.mark.parametrize(("answer", "begun"), [(False, True), (None, False)])
def test_one_that_nobody_told_to_run_is_told_apart_from_one_that_ended(
    monkeypatch: pytest.MonkeyPatch, answer: bool | None, begun: bool
) -> None:
    monkeypatch.setattr(ray, "wait", lambda asked, timeout: (asked, []))
    monkeypatch.setattr(ray, "get", lambda reference: answer)
    actor = SimpleNamespace(ping=SimpleNamespace(remote=lambda: "ping"))
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: actor)
    supervisors = RaySupervisors(object)
    assert supervisors.look("job", 0.0) is Presence.DONE
    assert supervisors.last_words("job") == LastWords(begun=begun)


def test_a_supervisor_has_not_begun_before_it_is_told_to_run() -> None:
    assert Supervisor().ping() is None


def test_one_that_cannot_be_reached_for_a_moment_is_not_lost(
    answers: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unavailable = True

    def get(reference: str) -> bool:
        if unavailable:
            raise ActorUnavailableError("connection reset by peer", None)
        return True

    monkeypatch.setattr(ray, "get", get)
    actor = SimpleNamespace(ping=SimpleNamespace(remote=lambda: "ping"))
    supervisors = RaySupervisors(object)
    supervisors._known["job"] = _Known(actor, "run")
    # Both calls are broken off: whether it still runs is for itself to say.
    answers |= {"run", "ping"}
    for second in range(30):
        assert supervisors.look("job", float(second)) is Presence.WORKING
    unavailable = False
    assert supervisors.look("job", 31.0) is Presence.WORKING
    unavailable = True
    answers.clear()
    assert supervisors.look("job", 32.0) is Presence.WORKING
    answers |= {"ping"}
    assert supervisors.look("job", 33.0) is Presence.WORKING
    answers.clear()
    assert supervisors.look("job", 33.0 + SILENCE_S) is Presence.DONE, "no longer than any silence"
