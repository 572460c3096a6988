"""How often a token may ask: a bucket of tokens each, that fills at a steady rate.

Promises: pure but for its own state; time is an argument. ``burst`` requests may come at once, and
``per_second`` in the long run; what is refused takes nothing, so asking in vain costs no more. The
buckets are bounded in number: the one that was used longest ago goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

MOST_BUCKETS = 4096


class RateLimit(BaseModel):
    """How often one token may ask."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    per_second: float = Field(100.0, gt=0)
    burst: int = Field(500, ge=1)


@dataclass(slots=True)
class _Bucket:
    level: float
    at: float


class RateLimiter:
    """A bucket for each of those who ask."""

    def __init__(self, limit: RateLimit) -> None:
        self.limit = limit
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def admit(self, who: str, now: float) -> float:
        """0 where ``who`` may ask at ``now`` (seconds of any clock that never goes back), else the
        seconds until they may."""
        bucket = self._buckets.get(who)
        if bucket is None:
            bucket = self._buckets[who] = _Bucket(float(self.limit.burst), now)
            if len(self._buckets) > MOST_BUCKETS:
                self._buckets.popitem(last=False)
        self._buckets.move_to_end(who)
        filled = bucket.level + max(0.0, now - bucket.at) * self.limit.per_second
        bucket.level, bucket.at = min(float(self.limit.burst), filled), now
        if bucket.level >= 1:
            bucket.level -= 1
            return 0.0
        return (1 - bucket.level) / self.limit.per_second
