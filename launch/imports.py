"""What a rank needs to import, done before it has a rank: most of a start is this.

Promises: after ``import_ahead`` a first step imports nothing that takes a while; nothing is loaded
that training never uses.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from launch.allocator import keep_freed_memory


def import_ahead() -> None:
    """Import torch, DeepSpeed and ours, and load the kernels."""
    # deepspeed picks its accelerator while it is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # Ranks share the node's cores: a pool in each would only switch contexts.
        torch.set_num_threads(1)
        keep_freed_memory()

    import launch.training  # noqa: F401
    import parallel.deepspeed_engines  # noqa: F401
    from parallel.precision import kernels

    # An optimizer's first step imports it, which takes a second.
    importlib.import_module("torch._dynamo")
    # deepspeed.initialize imports it.
    with suppress(ImportError), _compiled_when_called():
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    kernels.load()


@contextmanager
def _compiled_when_called() -> Iterator[None]:
    """What DeepSpeed decorates to be compiled, as it is imported, is so once it is called first.

    Muon's update is, which a job may never use: torch.compile loads torch._inductor for it, 1.2 of
    the 3.9 s of processor time that a worker's imports took.
    """
    from deepspeed.runtime import compiler

    at_once = compiler.compile

    def when_called(*options: Any, **named: Any) -> Callable[[Callable[..., Any]], Any]:
        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.cache
            def compiled() -> Callable[..., Any]:
                made: Callable[..., Any] = at_once(*options, **named)(function)
                return made

            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                return compiled()(*args, **kwargs)

            return call

        return decorate

    compiler.compile = when_called
    try:
        yield
    finally:
        compiler.compile = at_once
