from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from orchestrator.cluster.environment import CLUSTER_ENVIRONMENT
from orchestrator.cluster.on_ray import address_towards


def test_the_own_address_is_that_of_the_interface_on_the_way() -> None:
    assert address_towards("127.0.0.1:6379") == "127.0.0.1"


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
def test_an_address_in_brackets_is_ipv6() -> None:
    try:
        assert address_towards("[::1]:6379") == "::1"
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")


def test_a_shell_takes_the_environment_over() -> None:
    me = f"{sys.executable} -m orchestrator.cluster.on_ray --environment"
    shown = subprocess.run(
        ["sh", "-c", f'eval "$({me})"; env'], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert {f"{key}={value}" for key, value in CLUSTER_ENVIRONMENT.items()} <= set(shown)


def test_a_killed_node_is_noticed_within_seconds_and_a_short_silence_is_borne() -> None:
    seconds = {
        key.removeprefix("RAY_health_check_"): int(value) / 1000
        for key, value in CLUSTER_ENVIRONMENT.items()
        if key.startswith("RAY_health_check_")
    }
    checks = int(CLUSTER_ENVIRONMENT["RAY_health_check_failure_threshold"])
    # One whose processes are gone refuses at once, so that only the pauses between count.
    assert checks * seconds["period_ms"] <= 1.0
    # A silent one takes the time-out each time; the first may have been asked a time-out ago.
    assert (checks - 1) * (seconds["timeout_ms"] + seconds["period_ms"]) > 5.0
