"""The hosts that other tests stand on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.hosts.network import Host, Network

MakeNetwork = Callable[[int], Network]

LISTEN = "import socket; s = socket.create_server(('0.0.0.0', 4000)); print('up', flush=True); "
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 4000), timeout=2)"


def test_hosts_reach_each_other_until_a_cable_is_cut_and_again_when_it_is_healed(
    make_network: MakeNetwork,
) -> None:
    network = make_network(2)
    first, second = network.hosts
    _listen(first)
    assert _reaches(second, first)
    network.cut(first)
    assert not _reaches(second, first)
    network.heal(first)
    assert _reaches(second, first)


def test_networks_do_not_meet_and_leave_nothing_behind(make_network: MakeNetwork) -> None:
    with Network(1) as one:
        two = make_network(1)
        process = _listen(one.hosts[0])
        assert not _reaches(two.hosts[0], one.hosts[0])
        names = {one.hosts[0].name, one.hosts[0].link}
    assert process.poll() is not None, "a process outlives its host"
    left = subprocess.run("ip netns list; ip link", shell=True, capture_output=True, text=True)
    assert not any(name in left.stdout for name in names)


def test_a_killed_host_ends_all_that_its_processes_started(make_network: MakeNetwork) -> None:
    (host,) = make_network(1).hosts
    nested = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; "
    nested += "time.sleep(60)']); print('up', flush=True); time.sleep(60)"
    process = host.popen([sys.executable, "-c", nested], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    assert len(host.pids()) == 2
    host.kill()
    assert host.pids() == [] and process.returncode != 0


@pytest.mark.parametrize("rate", ["100mbit", None])
def test_a_shaped_cable_carries_no_more_than_its_rate(
    make_network: MakeNetwork, rate: str | None
) -> None:
    network = make_network(2)
    network.shape(rate=rate)
    shown = subprocess.run(
        ["tc", "-n", network.hosts[0].name, "qdisc", "show", "dev", "eth0"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert ("rate 100Mbit" in shown) == (rate is not None)


def _listen(host: Host) -> subprocess.Popen[str]:
    program = LISTEN + "import time; time.sleep(60)"
    process = host.popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    return process


def _reaches(host: Host, other: Host) -> bool:
    command = [sys.executable, "-c", CONNECT, other.address]
    return host.popen(command, stderr=subprocess.DEVNULL).wait(timeout=20) == 0
