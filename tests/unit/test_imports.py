"""What is imported ahead, and compiled only for who calls it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from deepspeed.runtime import compiler

from launch.imports import _compiled_when_called


def test_what_is_decorated_to_be_compiled_is_compiled_once_and_when_it_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[str] = []

    def compile(backend: str) -> Callable[..., Any]:
        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            compiled.append(f"{function.__name__} for {backend}")
            return function

        return decorate

    monkeypatch.setattr(compiler, "compile", compile)
    with _compiled_when_called():

        @compiler.compile("cpu")  # type: ignore[misc]
        def update(gradient: float, *, momentum: float) -> float:
            """As a module that is imported has it."""
            return gradient * momentum

    assert compiler.compile is compile and compiled == []
    assert [update(2.0, momentum=0.5), update(4.0, momentum=0.5)] == [1.0, 2.0]
    assert compiled == ["update for cpu"]
    assert update.__name__ == "update"
