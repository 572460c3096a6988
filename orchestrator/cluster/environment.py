"""What every ``ray start`` of a cluster of several hosts should have in its environment.

Promises: a host that is lost is noticed within seconds, one that is out for five is kept, and one
whose head is away waits ``RECONNECT_S`` for it.
"""

from __future__ import annotations

RECONNECT_S = 300
"""Seconds that hosts wait for a head that is away before they give themselves up."""
RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"

CLUSTER_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_AUTH_MODE": "token",
    "PYTHONWARNINGS": "ignore",
    # The head asks every node so often; five answers missing make it dead. A node whose processes
    # are gone refuses at once, which makes a second (Ray's own settings: half a minute). One that
    # is silent, frozen or cut off, takes the time-out each time: 11 s, so that a cable may be out
    # for 5 s, and answers late by a second, without a node being given up.
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "200",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "5",
    # How long a host waits for a head that is away, before it gives itself up.
    RECONNECT_VARIABLE: str(RECONNECT_S),
}
