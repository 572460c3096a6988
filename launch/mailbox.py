"""Where commands wait until the loop reaches a step boundary.

Promises: safe between the actor's threads and the loop's; commands come out once, in
order of their numbers, whatever order they came in; one of another attempt is refused.
"""

from __future__ import annotations

import threading

from launch.commands import Command


class CommandRefusedError(ValueError):
    """A command of another attempt reached this rank."""


class MissingCommandError(RuntimeError):
    """All ranks agreed to apply a command that this rank was never given."""


class Mailbox:
    """The commands of one attempt on one rank."""

    def __init__(self, attempt: int) -> None:
        self._attempt = attempt
        self._arrived = threading.Condition()
        self._commands: dict[int, Command] = {}
        self._newest = 0
        self._taken = 0

    def post(self, command: Command) -> None:
        """Take in one command; one already here is left as it is. Raises CommandRefusedError."""
        if command.attempt != self._attempt:
            raise CommandRefusedError(
                f"command {command.number} is of attempt {command.attempt}, "
                f"this rank is in attempt {self._attempt}"
            )
        with self._arrived:
            if command.number > self._taken:
                self._commands.setdefault(command.number, command)
            # An actor with several threads may run two posts in either order: a number
            # counts as seen only when all before it are here too.
            while self._newest + 1 in self._commands:
                self._newest += 1
            self._arrived.notify_all()

    def newest(self) -> int:
        """The highest number up to which every command is here; 0 for none."""
        return self._newest

    def take(self, up_to: int, timeout_s: float = 10.0) -> list[Command]:
        """Commands not yet taken up to number ``up_to``, in order.

        Rank 0 is posted to last, so they are here; a post still on its way is waited for.
        Raises MissingCommandError after ``timeout_s``.
        """
        if up_to <= self._taken:
            return []
        with self._arrived:
            if not self._arrived.wait_for(lambda: self._newest >= up_to, timeout_s):
                raise MissingCommandError(
                    f"command {up_to} was to be applied, but only {self._newest} arrived "
                    f"within {timeout_s:g} s"
                )
            numbers = range(self._taken + 1, up_to + 1)
            self._taken = up_to
            return [self._commands.pop(number) for number in numbers]
