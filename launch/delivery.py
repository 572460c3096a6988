"""How a rank's reports get to its supervisor: by its node's relay where there is one, or directly.

Promises: what the relay does not take, whatever the reason, goes to the supervisor at once; a relay
that failed is left alone for a while. What is delivered twice is the supervisor's to tell apart.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from launch.commands import Report
from launch.reporter import Outbox

REST_S = 60.0
"""Seconds for which a relay that failed isn't asked again."""

logger = logging.getLogger(__name__)


class Delivery:
    """An ``Outbox`` of two ways."""

    def __init__(
        self,
        direct: Outbox,
        relayed: Outbox | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._direct = direct
        self._relayed = relayed
        self._clock = clock
        self._rests_until = float("-inf")

    def __call__(self, batch: Sequence[Report]) -> None:
        """Raises what the direct way raised."""
        if self._relayed is not None and self._clock() >= self._rests_until:
            try:
                self._relayed(batch)
                return
            except Exception as error:  # noqa: BLE001 - the other way is open
                self._rests_until = self._clock() + REST_S
                what = f"{type(error).__name__}: {error}".partition("\n")[0]
                logger.warning(
                    "the node's relay failed, reports go straight to the supervisor: %s", what
                )
        self._direct(batch)
