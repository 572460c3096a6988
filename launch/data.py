"""Tokens: which ones a step trains on, as a pure function of the spec and the skip ledger.

Promises: batch ``b`` holds the same sequences on any number of ranks, however it is cut
into replicas and micro-batches, after any number of restarts. The step-th batch is the
step-th natural number that the skip ledger leaves; the order of sequences is a seeded
permutation of the corpus, another one each epoch, computed without a table, or the corpus'
own.
Nothing here imports torch before the first micro-batch is made.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from launch.config import DataConfig
from launch.corpus_files import matching_files

if TYPE_CHECKING:
    from torch import Tensor

STDLIB = "python-stdlib"
# What differs between installations of one Python release, or isn't the standard library.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_MASK64 = (1 << 64) - 1
SequenceChange = Callable[[int, NDArray[np.uint8]], tuple[NDArray[np.uint8], NDArray[np.uint8]]]
"""Position and tokens [seq_len + 1] of a sequence → inputs and targets, [seq_len] each."""
MOST_SKIPPED = 20_000
"""Batches that a skip ledger may hold: each snapshot carries it."""


class DataError(ValueError):
    """The data of the spec can't be trained on; the message lists every problem."""


class DataAwayError(DataError):
    """It isn't there, or can't be read, now: so it is too while a storage is away."""


def batch_of(step: int, ledger: Collection[int]) -> int:
    """Index of the batch that step ``step`` trains on: the step-th one not in ``ledger``."""
    batch = step
    for skipped in sorted(set(ledger)):
        if skipped > batch:
            break
        batch += 1
    return batch


def source_files(config: DataConfig) -> list[Path]:
    """The files of the corpus in their order, which depends on their relative names alone."""
    return list(_named_files(config).values())


def _named_files(config: DataConfig) -> dict[str, Path]:
    """The files of the corpus by their relative names, in order."""
    if config.source == STDLIB:
        root, skipped = Path(sysconfig.get_paths()["stdlib"]), _NOT_STDLIB
    else:
        root, skipped = Path(config.source), set()
        if not root.is_dir():
            return {root.name: root} if root.exists() else {}
    return {name: root / name for name in matching_files(str(root), config.pattern, skipped)}


def check_source(config: DataConfig, seq_len: int) -> list[str]:
    """What stands against training on this data, one sentence each; reads no contents."""
    files, problems = _look(config)
    size = 0
    for path in files.values():
        try:
            with path.open("rb") as file:
                size += os.fstat(file.fileno()).st_size
        except OSError as error:
            problems.append(_unreadable(path, error))
    return problems or _too_short(config, size, seq_len)


def _look(config: DataConfig) -> tuple[dict[str, Path], list[str]]:
    """The files by their relative names, or why there are none."""
    wrong = _wrong_pattern(config.pattern)
    if wrong:
        return {}, [f"the pattern {config.pattern!r} {wrong}"]
    try:
        if config.source != STDLIB and not Path(config.source).exists():
            return {}, [f"{config.source} does not exist"]
    except (OSError, ValueError) as error:
        # A name that is too long, or has a null character, is none.
        why = getattr(error, "strerror", None) or error
        return {}, [f"{config.source} can't be looked for: {why}"]
    try:
        files = _named_files(config)
    except OSError as error:
        return {}, [f"{config.source} can't be looked through: {error}"]
    return files, [] if files else [f"no file in {config.source} matches {config.pattern!r}"]


def _unreadable(path: Path, error: OSError) -> str:
    return f"{path} can't be read: {error.strerror}"


def _too_short(config: DataConfig, size: int, seq_len: int) -> list[str]:
    if size >= seq_len + 1:
        return []
    return [f"{config.source} has {size} tokens, fewer than one sequence of {seq_len} + 1"]


def _wrong_pattern(pattern: str) -> str:
    """What is wrong with a pattern of file names; empty for nothing."""
    parts = PurePath(pattern).parts
    if not parts or PurePath(pattern).is_absolute():
        return "is no pattern of names within a folder, as **/*.txt"
    if parts.count("**") > 2:
        # Each one goes through all folders again, in each of those of the one before.
        return "has ** more than twice"
    if any("**" in part for part in parts if part != "**"):
        return "has ** beside something else: it stands for whole folders"
    return ""


class TokenStream:
    """The corpus of a job as sequences of ``seq_len`` tokens, each with its next one.

    A single file is mapped, not read; the files of a folder are held in memory, one after
    the other. ``fingerprint`` tells corpora apart by relative names, which are what the order
    comes from, and sizes: all ranks must have the same. Raises DataError.
    """

    def __init__(self, config: DataConfig, seq_len: int) -> None:
        files, problems = _look(config)
        contents: list[NDArray[np.uint8]] = []
        for path in files.values():
            try:
                contents.append(_content(path, mapped=len(files) == 1))
            except OSError as error:
                problems.append(_unreadable(path, error))
        if problems:
            wrong = _wrong_pattern(config.pattern)
            raise (DataError if wrong else DataAwayError)("; ".join(problems))
        sizes = [len(content) for content in contents]
        if short := _too_short(config, sum(sizes), seq_len):
            raise DataError("; ".join(short))
        self._tokens = contents[0] if len(files) == 1 else np.concatenate(contents)
        self._seq_len = seq_len
        self._seed = config.shuffle_seed if config.shuffle else None
        self.sequences = (len(self._tokens) - 1) // seq_len
        """Sequences an epoch."""
        self.fingerprint = _fingerprint(files, sizes)
        """Non-negative, below 2^56: fits an int64."""
        self._without_folders = _fingerprint([path.name for path in files.values()], sizes)

    def is_of(self, fingerprint: int) -> bool:
        """Whether this is the corpus that a state was saved with. States of before have a
        fingerprint of the files' own names, without their folders'."""
        return fingerprint in (self.fingerprint, self._without_folders)

    def sequence(self, position: int) -> NDArray[np.uint8]:
        """``seq_len + 1`` tokens at ``position`` of the endless order of sequences."""
        epoch, index = divmod(position, self.sequences)
        if self._seed is not None:
            index = shuffled(index, self.sequences, self._seed, epoch)
        start = index * self._seq_len
        return self._tokens[start : start + self._seq_len + 1]

    def micro_batches(
        self,
        batch: int,
        data_rank: int,
        data_size: int,
        micro: int,
        accumulation: int,
        change: SequenceChange | None = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The ``accumulation`` micro-batches of one replica for batch ``batch``.

        Yields (inputs, targets), int64 [micro, seq_len] each, on the CPU. Replicas together
        have the ``data_size * micro * accumulation`` sequences of the batch, each once.
        ``change``: what makes both of a position's tokens; unset, all but the last and all but
        the first.
        """
        import torch

        first = batch * data_size * micro * accumulation
        for turn in range(accumulation):
            start = first + (turn * data_size + data_rank) * micro
            rows = {at: self.sequence(at) for at in range(start, start + micro)}
            pairs = [
                (row[:-1], row[1:]) if change is None else change(at, row)
                for at, row in rows.items()
            ]
            inputs, targets = (
                torch.from_numpy(np.stack(side).astype(np.int64))
                for side in zip(*pairs, strict=True)
            )
            yield inputs, targets


def _fingerprint(names: Iterable[str], sizes: Iterable[int]) -> int:
    told = "\n".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))
    digest = hashlib.blake2b(told.encode("utf-8", "surrogateescape"), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def _content(path: Path, *, mapped: bool) -> NDArray[np.uint8]:
    """A file's bytes; ``mapped``: not read before they are wanted."""
    if mapped and path.stat().st_size:  # nothing can't be mapped
        return np.memmap(path, dtype=np.uint8, mode="r")
    return np.fromfile(path, dtype=np.uint8)


def shuffled(index: int, count: int, seed: int, epoch: int) -> int:
    """Where ``index`` goes in permutation (seed, epoch) of ``range(count)``.

    A four-round Feistel network over the smallest even number of bits that holds
    ``count``, walked until it lands below ``count``: no table, and the same numbers in
    every release of every library.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    low = (1 << half) - 1
    key = _mix(seed * 0x9E3779B97F4A7C15 + epoch)
    value = index
    while True:
        left, right = value >> half, value & low
        for turn in range(4):
            left, right = right, left ^ (_mix(key + (turn << 58) + right) & low)
        value = left << half | right
        if value < count:
            return value


def _mix(value: int) -> int:
    """The finalizer of splitmix64: spreads every input bit over all 64."""
    value &= _MASK64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK64
    return value ^ (value >> 31)
