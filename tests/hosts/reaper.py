"""Takes a process' clusters away when it is gone: ``python -m tests.hosts.reaper PID``.

Reads standard input, a pipe whose other end only that process has: a byte means that all was
taken away in order, the end without one that nobody did.
"""

from __future__ import annotations

import signal
import sys


def main() -> None:
    """Wait, then sweep where nobody did."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if not sys.stdin.buffer.read():
        from tests.hosts.cluster import sweep

        sweep(int(sys.argv[1]))


if __name__ == "__main__":
    main()
