"""How a supervisor takes what its calls of the controller came to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayTaskError

from orchestrator.protocol import FencedError
from orchestrator.store.errors import StoreUnavailableError
from orchestrator.supervision.outbox import ControllerUnreachableError
from orchestrator.supervision.supervisor import RayController


def controller_that_raised(cause: Exception, patch: pytest.MonkeyPatch) -> RayController:
    def get(reference: Any, timeout: float) -> None:
        raise RayTaskError("report", "the traceback", cause)

    patch.setattr(ray, "get", get)
    controller = RayController()
    controller._actor = SimpleNamespace(history=SimpleNamespace(remote=lambda *_: None))
    return controller


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
