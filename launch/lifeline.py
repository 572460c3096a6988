"""A connection that ends with the process at its other end, however that ends.

Ray tells a rank of its supervisor's death by way of its own control plane, which may be down at
that very moment: the head is lost, and both with it. The system's own word comes at once: a
process that is gone has no open sockets. Promises: nothing crosses a lifeline, so that a cable
that is out for a while doesn't end it; a connection that was cut by somebody between is tied
anew, and only one that is refused is told as an end.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

CONNECT_S = 5.0
"""Seconds that the other end may take to answer."""
PAUSE_S = 1.0
"""Between two tries to reach a host that doesn't answer."""
CUT_PAUSE_S = 0.02
MOST = 65536
"""Connections held at once."""


class Lifeline:
    """The end of the process that others depend on; ``where`` is for them."""

    def __init__(self, address: str) -> None:
        """Listens on ``address``, one of this host's. Raises OSError."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listening = socket.create_server((address, 0), family=family, backlog=1024)
        self._held: list[socket.socket] = []
        port: int = self._listening.getsockname()[1]
        self.where = (address, port)
        threading.Thread(target=self._accept, name="lifeline", daemon=True).start()

    def forget(self) -> None:
        """Those at the other ends so far have ended; one that has not ties itself anew."""
        held, self._held = self._held, []
        for connection in held:
            connection.close()

    def close(self) -> None:
        """Let go: for those at the other ends this process is gone."""
        # Closing alone would leave the thread in its call, and with it the port open.
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.forget()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while len(self._held) < MOST:
                self._held.append(self._listening.accept()[0])


def depend_on(where: tuple[str, int], gone: Callable[[], object]) -> threading.Thread:
    """Call ``gone`` once the process at the other end is no more; from a thread, which is given."""
    thread = threading.Thread(target=_hold, args=(where, gone), name="lifeline", daemon=True)
    thread.start()
    return thread


def _hold(where: tuple[str, int], gone: Callable[[], object]) -> None:
    while True:
        try:
            with socket.create_connection(where, timeout=CONNECT_S) as held:
                held.settimeout(None)
                held.recv(1)
            # Of a process that ends, the port may be open for a moment more.
            time.sleep(CUT_PAUSE_S)
        except ConnectionRefusedError:
            gone()
            return
        except OSError:
            # Out of reach, which is no end; or cut by somebody between.
            time.sleep(PAUSE_S)
