"""A cable that delays and loses, in user space: kernels of small machines have no netem.

    python -m tests.hosts.cable INNER OUTER [--delay 0.2] [--loss 0.05]

Carries frames between two interfaces of this machine. Only what comes from INNER, the host's
side, is delayed (seconds) and lost (a share of packets); segments that the kernel keeps
together, as it does inside one machine, are one packet here. Ends when an interface goes away.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import random
import socket
import threading
import time

ETH_P_ALL = 3
SOL_PACKET = 263
PACKET_VNET_HDR = 15
"""Frames come and go with the kernel's notes on checksums and segments to be made yet."""
PACKET_IGNORE_OUTGOING = 23
FRAME = 1 << 17
"""Bytes of the largest frame, segments kept together."""


def end_of(interface: str) -> socket.socket:
    """A raw socket on an interface that hears what comes in, and not what it sent itself."""
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    end.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    end.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 24)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)
    end.bind((interface, ETH_P_ALL))
    return end


def carry(source: socket.socket, target: socket.socket, delay_s: float, loss: float) -> None:
    """Frames from one end to the other until one of them is gone."""
    chance = random.Random(0)
    waiting: collections.deque[tuple[float, bytes]] = collections.deque()
    come = threading.Semaphore(0)

    def deliver() -> None:
        while True:
            come.acquire()
            due, frame = waiting.popleft()
            time.sleep(max(0.0, due - time.monotonic()))
            _send(target, frame)

    if delay_s:
        threading.Thread(target=deliver, daemon=True).start()
    while True:
        try:
            frame = source.recv(FRAME)
        except OSError:
            return
        if chance.random() < loss:
            continue
        if delay_s:
            waiting.append((time.monotonic() + delay_s, frame))
            come.release()
        else:
            _send(target, frame)


def _send(target: socket.socket, frame: bytes) -> None:
    # A full queue or an interface that is down loses a frame, as a cable does.
    with contextlib.suppress(OSError):
        target.send(frame)


def main() -> None:
    """Entry of ``python -m tests.hosts.cable``; says ``up`` when it carries."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inner")
    parser.add_argument("outer")
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--loss", type=float, default=0.0)
    given = parser.parse_args()
    inner, outer = end_of(given.inner), end_of(given.outer)
    threads = [
        threading.Thread(target=carry, args=(inner, outer, given.delay, given.loss)),
        threading.Thread(target=carry, args=(outer, inner, 0.0, 0.0)),
    ]
    for thread in threads:
        thread.daemon = True
        thread.start()
    print("up", flush=True)
    # The socket of an interface that is gone says so to who reads it, once.
    while all(thread.is_alive() for thread in threads):
        time.sleep(0.2)


if __name__ == "__main__":
    main()
