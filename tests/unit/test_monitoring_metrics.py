"""The metrics of one step, by the names that users know."""

from __future__ import annotations

import dataclasses

from monitoring.metrics import step_metrics
from tests.unit.monitoring_traces import healthy_trace


def test_an_exchange_tells_its_bytes_ratio_error_and_where_its_time_went() -> None:
    comm = {"bytes": 1e6, "uncompressed_bytes": 2e6, "relative_error": 0.02, "wire_s": 0.25}
    comm["wire_bits"] = 16.0
    record = dataclasses.replace(healthy_trace(1)[0], comm=comm)
    values = step_metrics(record, 0, "HYBRID")
    told = {name: value for name, value in values.items() if name.startswith("comm/")}
    assert told == {
        "comm/bytes": 1e6,
        "comm/compression_ratio": 2.0,
        "comm/relative_error": 0.02,
        "comm/wire_s": 0.25,
        "comm/wire_bits": 16.0,
        "comm/busbw_gbps": 0.032,
    }


def test_a_rank_that_exchanged_nothing_tells_nothing_of_it() -> None:
    record = dataclasses.replace(healthy_trace(1)[0], comm={"bytes": 0.0, "wire_s": 0.0})
    assert not [name for name in step_metrics(record, 0, "HYBRID") if name.startswith("comm/")]
