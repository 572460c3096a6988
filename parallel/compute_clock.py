"""How long a rank computes in a step, without its waiting for others.

A step takes as long on every rank, for the fast ones wait for the slow one in communication; what
tells them apart is the time outside of it. Counted are loading, forward and backward passes of
all micro-batches; not the exchange of gradients inside a backward pass, nor the update, whose
norm all ranks wait for. Collectives of tensor ranks inside a layer are counted: those ranks share
a node.

Promises: two readings of a clock a pass, and no wait for the device. On a GPU they are events on
its stream, read by whoever calls what ``take`` returns; written after the documentation and not
tried, for want of a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class ComputeClock:
    """Of one rank; used by the thread that trains."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._on_gpu = torch.device(device).type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []
        """Sign, start and end."""
        self._runs = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count the block."""
        self._runs = True
        try:
            with self._measured(+1):
                yield
        finally:
            self._runs = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Don't count the block, if it is inside one that is counted."""
        if not self._runs:
            yield
            return
        with self._measured(-1):
            yield

    def take(self) -> Callable[[], float]:
        """Begin anew; what is returned gives the seconds since the last time, and may wait."""
        seconds, events = self._seconds, self._events
        self._seconds, self._events = 0.0, []

        def total() -> float:
            if events:
                events[-1][2].synchronize()
            return seconds + sum(
                sign * start.elapsed_time(end) / 1000 for sign, start, end in events
            )

        return total

    @contextmanager
    def _measured(self, sign: int) -> Iterator[None]:
        if self._on_gpu:
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            yield
            end.record()
            self._events.append((sign, start, end))
            return
        started = time.perf_counter()
        yield
        self._seconds += sign * (time.perf_counter() - started)
