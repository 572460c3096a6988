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

import numpy as np
import pytest
import torch
from torch import Tensor

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed: pip install -c constraints.txt triton",
)


class Interpreter:
    """``TritonCasts`` in the other process; its arguments come back as it left them."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def __call__(self, hop: str, format: str, block: int, *args: Any) -> list[Any]:
        """The arguments after ``TritonCasts(format, block).<hop>(*args)``.

        Parts, float32 of two dimensions, have a distance between their rows there.
        """
        # As arrays, which travel by value: a tensor's memory would be shared, which takes longer.
        told = [arg.numpy() if isinstance(arg, Tensor) else arg for arg in args]
        left = self._pool.submit(_call, hop, format, block, told).result()
        return [torch.from_numpy(arg) if isinstance(arg, np.ndarray) else arg for arg in left]


@contextmanager
def interpreter() -> Iterator[Interpreter]:
    """A process with the interpreter, until the end of the block."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_interpret) as pool:
        yield Interpreter(pool)


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)


def _call(hop: str, format: str, block: int, told: list[Any]) -> list[Any]:
    from parallel.precision.exchange_triton import TritonCasts
    from parallel.precision.formats import FORMATS

    args = [_apart(torch.from_numpy(arg)) if isinstance(arg, np.ndarray) else arg for arg in told]
    getattr(TritonCasts(FORMATS[format], block), hop)(*args)
    return [arg.numpy() if isinstance(arg, Tensor) else arg for arg in args]


def _apart(x: Tensor) -> Tensor:
    if x.dim() < 2 or x.dtype is not torch.float32:
        return x.clone()
    wide = torch.full((len(x), x.shape[1] + 5), float("nan"))
    wide[:, 2:-3] = x
    return wide[:, 2:-3]
