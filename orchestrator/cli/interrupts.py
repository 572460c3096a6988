"""Signals that end a command, as an exception in its main thread."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


class Interrupted(KeyboardInterrupt):
    """One of ``SIGNALS`` came."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(number)
        self.number = number

    @property
    def code(self) -> int:
        """The exit code that a shell gives to it: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.number

    @property
    def word(self) -> str:
        """What happened to the command."""
        return "interrupted" if self.number == signal.SIGINT else "told to end"


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end a command as Ctrl-C does."""

    def interrupt(number: int, _: object) -> NoReturn:
        raise Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def uninterruptible() -> Iterator[None]:
    """Cleaning up is finished, whatever is pressed."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
