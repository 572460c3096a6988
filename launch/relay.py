"""A place between ranks and their supervisor where the reports of a step are put together.

Large jobs have one on every node, and some above those (``launch.report_tree``): what reaches the
supervisor grows with the places just below it, not with the ranks. Promises: ``take`` returns when
all of it has been received above, and raises when it hasn't, so that nothing is lost with a relay
that dies: whoever sent it sends it another way; steps go up in order, and what a rank told between
two of them stays between them; a rank that is late holds up the others by ``LINGER_S`` at most;
what comes twice does no harm. Without Ray: whoever runs it says how to send on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from launch.commands import RankReport, Report
from launch.step_part import Sent, StepPart, merged, part_of

LINGER_S = 0.5
"""Seconds that a step waits for the rest of its ranks, which finish it together."""
BEGIN_S = 10.0
"""Seconds that reports of an attempt wait until the relay is told of it."""

Forward = Callable[[Sequence[Sent]], Awaitable[None]]
"""Sends on; returns when it was received, raises when it wasn't."""
Place = tuple[int, int]
"""Timeline and step: the order of what ranks report."""

logger = logging.getLogger(__name__)


class NotOurAttemptError(RuntimeError):
    """Reports of an attempt that this relay knows nothing of, or no longer."""


@dataclass(eq=False)
class _Step:
    """What came of one step so far."""

    alone: list[RankReport] = field(default_factory=list)
    parts: list[StepPart] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)
    after: list[Report] = field(default_factory=list)
    """What ranks told after it."""
    gone: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Settled when all of it was received above, or wasn't."""
    sealed: bool = False

    def add(self, sent: RankReport | StepPart) -> bool:
        """Whether it could be taken in, or is in already; not where a part is in by half."""
        ranks = {sent.rank} if isinstance(sent, RankReport) else set(sent.ranks.tolist())
        known = ranks & self.ranks
        if known:
            return known == ranks
        self.ranks |= ranks
        if isinstance(sent, RankReport):
            self.alone.append(sent)
        else:
            self.parts.append(sent)
        return True

    def together(self) -> list[Sent]:
        """One part, and what was told after it."""
        apart: list[Sent] = [*self.alone, *self.parts]
        try:
            alone = [part_of(*self.alone)] if self.alone else []
            whole: list[Sent] = [merged([*alone, *self.parts])] if apart else []
        except ValueError as error:
            # The supervisor is the place to say so.
            logger.error("reports of a step can't be put together: %s", error)
            whole = apart
        return [*whole, *self.after]


class Relay:
    """One place, in one event loop."""

    def __init__(self, linger_s: float = LINGER_S, begin_s: float = BEGIN_S) -> None:
        self._linger_s = linger_s
        self._begin_s = begin_s
        self._attempt = 0
        self._begun = asyncio.Condition()
        self._ranks = 0
        self._open: dict[Place, _Step] = {}
        self._queue: list[_Step] = []
        self._sending: asyncio.Task[None] | None = None
        self._forward: Forward | None = None

    async def begin(self, attempt: int, ranks: int, forward: Forward) -> None:
        """From now on take reports of ``attempt``, of ``ranks`` ranks, and send them by
        ``forward``; what is here of one before is given up, by an error to who sent it."""
        async with self._begun:
            given_up = [*self._open.values(), *self._queue]
            self._open, self._queue = {}, []
            for step in given_up:
                step.sealed = True
                _fail(step, NotOurAttemptError(f"attempt {attempt} has begun"))
            self._attempt, self._ranks, self._forward = attempt, ranks, forward
            self._begun.notify_all()

    async def take(self, attempt: int, sent: Sequence[Sent]) -> None:
        """Pass on; returns when all of it was received above.

        Raises NotOurAttemptError, or what sending it on raised.
        """
        await self._wait_for(attempt)
        touched: list[_Step] = []
        for one in sent:
            step = self._take_in(one, touched[-1] if touched else None)
            if not touched or touched[-1] is not step:
                touched.append(step)
        for future in [step.gone for step in touched]:
            await asyncio.shield(future)

    async def _wait_for(self, attempt: int) -> None:
        if attempt > self._attempt:
            async with self._begun:
                try:
                    async with asyncio.timeout(self._begin_s):
                        await self._begun.wait_for(lambda: attempt <= self._attempt)
                except TimeoutError:
                    why = f"nothing was told of attempt {attempt} in {self._begin_s:g} s"
                    raise NotOurAttemptError(why) from None
        if attempt < self._attempt:
            raise NotOurAttemptError(f"attempt {self._attempt} has begun, this is of {attempt}")

    def _take_in(self, sent: Sent, before: _Step | None) -> _Step:
        """Where it is now; ``before``: what the same rank sent just before."""
        if not isinstance(sent, RankReport | StepPart):
            if before is not None and not before.sealed:
                before.after.append(sent)
                return before
            told = _Step(after=[sent])
            self._send(told)
            return told
        place = (sent.timeline, sent.step)
        step = self._open.get(place)
        if step is None:
            step = self._open[place] = _Step()
            asyncio.get_running_loop().call_later(self._linger_s, self._seal, place, step)
        if not step.add(sent):
            odd = _Step()
            odd.add(sent)
            self._send(odd)
            return odd
        if len(step.ranks) >= self._ranks:
            self._seal(place, step)
        return step

    def _seal(self, place: Place, step: _Step) -> None:
        """Send a step as it is, after all before it: a supervisor that has a whole step takes none
        of an earlier one."""
        if step.sealed:
            return
        for earlier in sorted(at for at in self._open if at <= place):
            self._send(self._open.pop(earlier))

    def _send(self, step: _Step) -> None:
        step.sealed = True
        self._queue.append(step)
        if self._sending is None or self._sending.done():
            self._sending = asyncio.get_running_loop().create_task(self._send_all())

    async def _send_all(self) -> None:
        """One call at a time, or they might arrive in another order."""
        while self._queue:
            steps, self._queue = self._queue, []
            assert self._forward is not None
            try:
                await self._forward([one for step in steps for one in step.together()])
            except Exception as error:  # noqa: BLE001 - who sent it is told, whatever it is
                for step in steps:
                    _fail(step, error)
            else:
                for step in steps:
                    if not step.gone.done():
                        step.gone.set_result(None)


def _fail(step: _Step, error: Exception) -> None:
    if not step.gone.done():
        step.gone.set_exception(error)
        # Nobody may be left to hear of it.
        step.gone.exception()
