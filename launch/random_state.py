"""The random number generators of a rank's process, as tensors that a snapshot can hold.

Promises: ``restore`` after ``load_into`` gives back every generator of ``capture``, to the
bit: torch's on CPU and on the current GPU, numpy's and Python's global ones.
"""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def seeded_state(seed: int) -> dict[str, Tensor]:
    """The tensors of a ``RandomState`` whose generators all start from ``seed``, below 2^64."""
    found = {
        "rng.torch": torch.Generator().manual_seed(seed).get_state(),
        "rng.numpy": _numpy_numbers(np.random.RandomState(seed % 2**32).get_state(legacy=False)),
        "rng.python": _python_numbers(random.Random(seed).getstate()),
    }
    if torch.cuda.is_available():
        found["rng.cuda"] = torch.Generator(device="cuda").manual_seed(seed).get_state()
    return found


class RandomState:
    """Tensors of fixed shape that mirror the generators when told to."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {
            "rng.torch": torch.get_rng_state(),
            # 32-bit words and one float each: float64 holds both exactly.
            "rng.numpy": torch.zeros(627, dtype=torch.float64),
            "rng.python": torch.zeros(626, dtype=torch.float64),
        }
        if torch.cuda.is_available():
            self.tensors["rng.cuda"] = torch.cuda.get_rng_state()
        self.capture()

    def capture(self) -> None:
        """Generators → tensors."""
        self.tensors["rng.torch"].copy_(torch.get_rng_state())
        self.tensors["rng.numpy"].copy_(_numpy_numbers(np.random.get_state(legacy=False)))
        self.tensors["rng.python"].copy_(_python_numbers(random.getstate()))
        if "rng.cuda" in self.tensors:
            self.tensors["rng.cuda"].copy_(torch.cuda.get_rng_state())

    def restore(self) -> None:
        """Tensors → generators."""
        torch.set_rng_state(self.tensors["rng.torch"])
        numbers = self.tensors["rng.numpy"].numpy()
        words, (position, has_gauss, gauss) = numbers[:624].astype(np.uint32), numbers[624:]
        np.random.set_state(("MT19937", words, int(position), int(has_gauss), float(gauss)))
        *state, held = self.tensors["rng.python"].tolist()
        following = None if math.isnan(held) else held
        random.setstate((3, tuple(int(word) for word in state), following))
        if "rng.cuda" in self.tensors:
            torch.cuda.set_rng_state(self.tensors["rng.cuda"])


def _numpy_numbers(state: Any) -> Tensor:
    """float64 [627]: the words, and what the generator holds besides."""
    twister = state["state"]
    rest = [twister["pos"], state["has_gauss"], state["gauss"]]
    return torch.from_numpy(np.concatenate([twister["key"].astype(np.float64), rest]))


def _python_numbers(state: tuple[Any, ...]) -> Tensor:
    """float64 [626]: the words, and the number held, or NaN."""
    _, words, following = state
    held = math.nan if following is None else following
    return torch.tensor([*words, held], dtype=torch.float64)
