"""Times for people: local, with the zone told; for machines UTC, as ISO 8601 has it. Pure.

One rule for everything that is shown: what a person reads is the local time of where it is shown,
its zone is told once (in a heading, or behind a time that stands alone), and the date stands there
wherever more than a day is shown. What a program reads is seconds since the epoch, or UTC with Z.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime


def clock(seconds: float, *, date: bool = True) -> str:
    """``2026-11-30 05:39:59`` or ``05:39:59``, local."""
    return time.strftime("%Y-%m-%d %H:%M:%S" if date else "%H:%M:%S", time.localtime(seconds))


def day(seconds: float) -> str:
    """``2026-11-30``, local."""
    return time.strftime("%Y-%m-%d", time.localtime(seconds))


def zone(seconds: float) -> str:
    """The local zone of that moment: ``UTC``, ``EST (UTC-05:00)``, ``UTC+03:00``."""
    at = time.localtime(seconds)
    if not at.tm_gmtoff:
        return "UTC"
    hours, minutes = divmod(abs(at.tm_gmtoff) // 60, 60)
    offset = f"UTC{'+' if at.tm_gmtoff > 0 else '-'}{hours:02d}:{minutes:02d}"
    return f"{at.tm_zone} ({offset})" if at.tm_zone.isalpha() else offset


def moment(seconds: float) -> str:
    """A time that stands alone: ``2026-11-30 05:39:59 EST``, ``2026-11-30 10:39:59 UTC``."""
    return f"{clock(seconds)} {zone(seconds).partition(' (')[0]}"


def stamp(seconds: float) -> str:
    """A time of a line that may be cut out of its surroundings, local, to the millisecond and with
    its offset: ``2026-11-30 05:39:59.970-05:00``."""
    return datetime.fromtimestamp(seconds, UTC).astimezone().isoformat(" ", "milliseconds")


def utc(seconds: float) -> str:
    """For programs, to the millisecond: ``2026-11-30T10:39:59.970Z``."""
    at = datetime.fromtimestamp(seconds, UTC).isoformat("T", "milliseconds")
    return at.replace("+00:00", "Z")
