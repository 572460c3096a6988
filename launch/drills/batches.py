"""What drills make of the data. Pure: the same tokens on any number of ranks, in any attempt.

Everything follows from a sequence's position in the endless order of sequences and from the
drill, never from how a batch is cut into replicas and micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from launch.drills.config import LabelNoise, PoisonedBatch

Tokens = NDArray[np.uint8]


def disturbed(
    position: int,
    tokens: Tokens,
    poison: PoisonedBatch | None,
    noises: Sequence[tuple[int, LabelNoise]],
) -> tuple[Tokens, Tokens]:
    """Inputs and targets of the sequence ``tokens`` [seq_len + 1] at ``position``.

    ``noises`` come with their numbers among the drills, so that two replace different targets.
    """
    if poison is not None:
        tokens = poisoned(position, len(tokens), poison)
    inputs, targets = tokens[:-1], tokens[1:]
    for number, noise in noises:
        targets = noisy(position, targets, noise.share, number)
    return inputs, targets


def poisoned(position: int, length: int, drill: PoisonedBatch) -> Tokens:
    """The sequence of a poisoned batch at ``position``, [length]."""
    if drill.tokens == "repeated":
        return np.full(length, drill.token, dtype=np.uint8)
    return _random(position, 0).randint(0, 256, length, dtype=np.uint8)


def noisy(position: int, targets: Tokens, share: float, number: int = 0) -> Tokens:
    """``targets`` with ``share`` of them, rounded to whole ones, replaced by random others."""
    random = _random(position, 1 + number)
    chosen = random.permutation(len(targets))[: round(share * len(targets))]
    # From 1 to 255 further on, modulo 256: never the token that was there.
    changed = targets.copy()
    changed[chosen] += random.randint(1, 256, len(chosen)).astype(np.uint8)
    return changed


def _random(position: int, stream: int) -> np.random.RandomState:
    """A generator whose numbers are the same in every release of numpy, unlike the newer ones."""
    return np.random.RandomState([stream, position & 0xFFFFFFFF, position >> 32])
