"""Times for people and for programs."""

from __future__ import annotations

import time

import pytest

from monitoring.clock import clock, day, moment, stamp, utc, zone

AT = 1796035199.97
"""2026-11-30T10:39:59.970Z."""


@pytest.mark.parametrize(
    ("name", "at", "told", "alone"),
    [
        ("UTC", "2026-11-30 10:39:59", "UTC", "UTC"),
        ("America/New_York", "2026-11-30 05:39:59", "EST (UTC-05:00)", "EST"),
        ("Asia/Kolkata", "2026-11-30 16:09:59", "IST (UTC+05:30)", "IST"),
        ("Etc/GMT-14", "2026-12-01 00:39:59", "UTC+14:00", "UTC+14:00"),
        ("America/Sao_Paulo", "2026-11-30 07:39:59", "UTC-03:00", "UTC-03:00"),
    ],
)
def test_a_time_is_local_with_its_zone(
    name: str, at: str, told: str, alone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", name)
    time.tzset()
    try:
        assert (clock(AT), zone(AT), moment(AT)) == (at, told, f"{at} {alone}")
        assert (day(AT), clock(AT, date=False)) == tuple(at.split())
        assert stamp(AT).startswith(f"{at}.970") and stamp(AT)[-6] in "+-"
        assert utc(AT) == "2026-11-30T10:39:59.970Z"
    finally:
        monkeypatch.undo()
        time.tzset()
