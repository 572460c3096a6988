"""The random number generators of a rank's process, as tensors that a snapshot can hold.

Promises: ``restore`` after ``load_into`` gives back every generator of ``capture``, to the
bit: torch's on CPU and on the current GPU, numpy's and Python's global ones.
"""

from __future__ import annotations

import math
import random

import numpy as np
import torch
from torch import Tensor


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
        numpy_state = np.random.get_state(legacy=False)
        twister = numpy_state["state"]
        rest = [twister["pos"], numpy_state["has_gauss"], numpy_state["gauss"]]
        numbers = np.concatenate([twister["key"].astype(np.float64), rest])
        self.tensors["rng.numpy"].copy_(torch.from_numpy(numbers))
        _, state, following = random.getstate()
        held = math.nan if following is None else following
        self.tensors["rng.python"].copy_(torch.tensor([*state, held], dtype=torch.float64))
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
