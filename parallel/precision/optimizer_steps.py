"""Steps of optimizers that autograd doesn't count.

A linear quantizes its weight once and keeps that until autograd counts a change in place. Fused
optimizers (``AdamW(fused=True)`` and the like) change parameters without its counting, so a
converted model in a loop that never calls ``finish_step`` would go on with its first weights.
Promises: after any ``torch.optim`` optimizer's step, scopes that were told here have forgotten
their quantized weights; a scope that nobody holds any more is not kept alive.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol
from weakref import WeakSet

from torch.optim.optimizer import register_optimizer_step_post_hook


class _Scope(Protocol):
    def forget_weights(self) -> None: ...


_scopes: WeakSet[_Scope] = WeakSet()


def forget_weights_after_steps(scope: _Scope) -> None:
    """From now on, for the life of ``scope``."""
    _listen()
    _scopes.add(scope)


@cache
def _listen() -> None:
    register_optimizer_step_post_hook(_after_step)


def _after_step(*_: Any) -> None:
    for scope in list(_scopes):
        scope.forget_weights()
