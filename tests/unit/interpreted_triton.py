"""Kernels in Triton's interpreter: CPU tensors and NumPy in place of a GPU.

Whether a kernel is interpreted is settled when Triton is imported, and this process, which may
have imported it for other reasons, shall not change: ``calls`` runs in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import pytest
import torch

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed: pip install -c constraints.txt triton",
)


class Interpreter:
    """``TritonCasts`` in the other process; its arguments come back as it left them."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def __call__(self, hop: str, format: str, block: int, *args: Any) -> list[Any]:
        """The arguments after ``TritonCasts(format, block).<hop>(*args)``."""
        told = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
        return self._pool.submit(_call, hop, format, block, told).result()


@contextmanager
def interpreter() -> Iterator[Interpreter]:
    """A process with the interpreter, until the end of the block."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_interpret) as pool:
        yield Interpreter(pool)


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def _call(hop: str, format: str, block: int, args: list[Any]) -> list[Any]:
    from parallel.precision.exchange_triton import TritonCasts
    from parallel.precision.formats import FORMATS

    getattr(TritonCasts(FORMATS[format], block), hop)(*args)
    return args
