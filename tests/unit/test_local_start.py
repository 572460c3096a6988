"""A machine that is overworked for a moment doesn't keep the local Ray from starting."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from orchestrator.cluster.local import RAY_STARTS, _start_ray

SLOW = "The current node timed out during startup. This could happen because ..."


@pytest.mark.parametrize(
    ("errors", "starts", "raised"),
    [
        ([], 1, ""),
        ([SLOW], 2, ""),
        ([SLOW] * RAY_STARTS, RAY_STARTS, "timed out"),
        (["no room in /dev/shm"], 1, "no room"),
    ],
)
def test_a_start_that_takes_too_long_is_tried_again(
    errors: list[str], starts: int, raised: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, began = list(errors), []

    def init(**how: Any) -> None:
        began.append(how)
        if left:
            raise RuntimeError(left.pop(0))

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    if raised:
        with pytest.raises(RuntimeError, match=raised):
            _start_ray(num_cpus=2)
    else:
        _start_ray(num_cpus=2)
    assert began == [{"num_cpus": 2}] * starts
