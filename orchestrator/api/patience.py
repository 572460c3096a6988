"""How long a controller that can't answer for a moment is asked again, and what counts as that.

    Patience(time.monotonic() + 60.0).ask(client.job, "toy")

Promises: a store that is locked, an answer that is late, a controller that restarts, and one that
is asked too often refuse nothing: whoever has time says the same again until it is up. What the
controller understood and won't do is told at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from orchestrator.api.client_errors import ServerError, TooManyRequestsError, UnreachableError

Answer = TypeVar("Answer")

MOMENTARY = (UnreachableError, ServerError, TooManyRequestsError)
"""What says nothing of the job that was asked for: the same may be answered a moment later."""
AGAIN_S = 0.2


def _nobody_knows() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Patience:
    """Until ``until``, of the monotonic clock, or until the controller's host is known to be gone,
    as ``gone`` tells."""

    until: float
    gone: Callable[[], bool] = _nobody_knows

    def ask(self, ask: Callable[..., Answer], *args: Any, **kwargs: Any) -> Answer:
        """``ask(...)``, again while it is refused for a moment; raises the last refusal. An order
        asked so has to be the same one when it is heard twice."""
        while True:
            try:
                return ask(*args, **kwargs)
            except MOMENTARY:
                if time.monotonic() >= self.until or self.gone():
                    raise
                time.sleep(AGAIN_S)
