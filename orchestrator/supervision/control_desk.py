"""Where a supervisor keeps what people ask, from its arrival to its answer. No I/O.

Promises: safe from any thread where it says so; one that comes again (the controller sends
until it has an answer) is taken once; they are taken in the order in which they came, but for a
stop, which need not wait for what can't be done yet; what an earlier supervisor decided is not
decided again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Container, Iterable, Sequence

from orchestrator.actions import Action
from orchestrator.recovery.controls import Control


class ControlDesk:
    """Controls of one job: those that wait, and those whose command is under way."""

    def __init__(self, actions: Iterable[Action]) -> None:
        """``actions``: all of the job's."""
        self._arriving = threading.Lock()
        self._seen: set[str] = set()
        self._waiting: deque[Control] = deque()
        self._decided = {a.asked.key: a for a in actions if a.asked is not None}
        self._posted: list[tuple[int, Control]] = []
        self._restarting: list[Control] = []
        self._measuring: list[Control] = []

    def offer(self, controls: Sequence[Control]) -> bool:
        """Take in what is new, from any thread; whether anything was."""
        with self._arriving:
            new = [control for control in controls if control.key not in self._seen]
            self._seen.update(control.key for control in new)
            self._waiting.extend(new)
            return bool(new)

    def first(self, kinds: Container[str] | None = None) -> Control | None:
        """The one whose turn it is, of these kinds."""
        with self._arriving:
            return next((c for c in self._waiting if kinds is None or c.kind in kinds), None)

    def take(self, control: Control) -> None:
        """Its turn has come."""
        with self._arriving:
            self._waiting.remove(control)

    def decided(self, control: Control) -> Action | None:
        """What a supervisor before this one decided on it."""
        return self._decided.get(control.key)

    def posted(self, control: Control, number: int) -> None:
        """Its command has this number in the present attempt."""
        self._posted.append((number, control))

    def applied(self, number: int) -> list[Control]:
        """A rank says that it has applied all commands up to ``number``: whose are they."""
        done = [control for posted, control in self._posted if posted <= number]
        self._posted = [(posted, control) for posted, control in self._posted if posted > number]
        return done

    def measure(self, control: Control) -> None:
        """The ranks were told to measure; it is done when they tell what they found."""
        self._measuring.append(control)

    def measured(self) -> list[Control]:
        """They told; all that had asked for it."""
        controls, self._measuring = self._measuring, []
        return controls

    @property
    def measures(self) -> bool:
        """Whether the ranks were told to measure."""
        return bool(self._measuring)

    def restart(self, control: Control | None = None) -> None:
        """The attempt is over. The next one starts with all that was decided; ``control``
        is what ended it."""
        self._restarting += [control for _, control in self._posted]
        if control is not None:
            self._restarting.append(control)
        self._posted = []
        # Nobody knows what was found: asked anew in the next attempt.
        with self._arriving:
            self._waiting.extendleft(reversed(self._measuring))
        self._measuring = []

    def restarted(self) -> list[Control]:
        """The next attempt has begun to train: what is in force with that."""
        done, self._restarting = self._restarting, []
        return done

    def note(self, action: Action) -> None:
        """An action that a person asked for is stored."""
        if action.asked is not None:
            self._decided[action.asked.key] = action
