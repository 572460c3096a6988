"""Calls on the node that asks itself; Ray is replaced at its edge."""

from __future__ import annotations

from types import ModuleType

import pytest

from launch.node_calls import Call, call_all


def test_what_raises_on_this_node_is_told_like_anothers_and_costs_the_others_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", ModuleType("ray"))

    def no_port(address: str) -> int:
        raise OSError(99, "Cannot assign requested address")

    calls = [Call("here", None, no_port, ("10.99.99.99",))]
    answers = call_all(calls, 10.0, here="here")
    assert answers.values == {}
    assert answers.silent == {"here": "OSError: [Errno 99] Cannot assign requested address"}
