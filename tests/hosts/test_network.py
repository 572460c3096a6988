"""The hosts that other tests stand on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import psutil
import pytest

from tests.hosts.network import Host, Network, shape, sweep

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


def test_a_host_that_is_killed_at_once_ends_what_had_not_entered_it_yet(
    make_network: MakeNetwork,
) -> None:
    (host,) = make_network(1).hosts
    started = [host.popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)]
    assert host.runs()
    host.kill()
    assert started[0].poll() is not None and not host.runs()


@pytest.mark.parametrize("rate", ["100mbit", None])
def test_a_shaped_cable_carries_no_more_than_its_rate(
    make_network: MakeNetwork, rate: str | None
) -> None:
    network = make_network(2)
    network.shape(rate=rate)
    command = ["tc", "-n", network.hosts[0].name, "qdisc", "show", "dev", "eth0"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert ("rate 100Mbit" in shown) == (rate is not None)


SERVE = (
    "import socket; s = socket.create_server(('0.0.0.0', 4000)); print('up', flush=True); "
    "u = socket.socket(type=socket.SOCK_DGRAM); u.bind(('0.0.0.0', 4000))\n"
    "while True: u.sendto(*u.recvfrom(100))"
)
ASK = (
    "import socket, sys, time; u = socket.socket(type=socket.SOCK_DGRAM); u.settimeout(0.5)\n"
    "heard, took = 0, []\n"
    "for n in range(int(sys.argv[2])):\n"
    "    began = time.monotonic(); u.sendto(b'x', (sys.argv[1], 4000))\n"
    "    try: heard += len(u.recv(9)); took.append(time.monotonic() - began)\n"
    "    except TimeoutError: pass\n"
    "print(heard, min(took, default=9.0))"
)


def test_a_slow_cable_delays_and_a_bad_one_loses_until_it_is_plain_again(
    make_network: MakeNetwork,
) -> None:
    network = make_network(2)
    first, second = network.hosts
    serving = first.popen([sys.executable, "-c", SERVE], stdout=subprocess.PIPE, text=True)
    assert serving.stdout is not None and serving.stdout.readline() == "up\n"
    network.shape(delay_s=0.05)
    heard, fastest = _ask(second, first, 3)
    # There and back.
    assert heard == 3 and fastest >= 0.1
    shape(first)
    shape(second, loss=1.0)
    assert _ask(second, first, 2)[0] == 0
    network.shape()
    assert _ask(second, first, 3)[0] == 3


def _ask(host: Host, other: Host, times: int) -> tuple[int, float]:
    command = [sys.executable, "-c", ASK, other.address, str(times)]
    asking = host.popen(command, stdout=subprocess.PIPE, text=True)
    heard, fastest = asking.communicate(timeout=30)[0].split()
    return int(heard), float(fastest)


def test_a_frozen_host_stands_still_until_it_is_thawed(make_network: MakeNetwork) -> None:
    (host,) = make_network(1).hosts
    _listen(host)
    host.freeze()
    assert [psutil.Process(pid).status() for pid in host.pids()] == [psutil.STATUS_STOPPED]
    host.thaw()
    assert [psutil.Process(pid).status() for pid in host.pids()] != [psutil.STATUS_STOPPED]


def test_what_a_killed_process_left_is_swept(make_network: MakeNetwork) -> None:
    network = make_network(1)
    program = "import os; from tests.hosts.network import Network; n = Network(1); h = n.hosts[0]; "
    program += "h.popen(['sleep', '60'], stdout=-3); print(h.name, flush=True); "
    program += "os.kill(os.getpid(), 9)"
    ended = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    name = ended.stdout.strip()
    assert name in _names()
    sweep()
    assert name not in _names()
    assert network.hosts[0].name in _names(), "that of a living process was taken away"


def _names() -> list[str]:
    shown = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return shown.stdout.split()


def _listen(host: Host) -> subprocess.Popen[str]:
    program = LISTEN + "import time; time.sleep(60)"
    process = host.popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    return process


def _reaches(host: Host, other: Host) -> bool:
    command = [sys.executable, "-c", CONNECT, other.address]
    return host.popen(command, stderr=subprocess.DEVNULL).wait(timeout=20) == 0
