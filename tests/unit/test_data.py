"""The token stream: one order of batches and sequences, however the ranks are laid out."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launch.config import DataConfig
from launch.data import (
    DataAwayError,
    DataError,
    TokenStream,
    batch_of,
    check_source,
    shuffled,
    source_files,
)

ledgers = st.sets(st.integers(0, 60), max_size=20)


@pytest.fixture
def corpus(tmp_path: Path) -> DataConfig:
    generator = np.random.default_rng(3)
    for name, size in (("b.py", 3000), ("a/c.py", 1700), ("a/z.py", 900), ("skip.txt", 50)):
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(generator.integers(0, 256, size, dtype=np.uint8).tobytes())
    return DataConfig(source=str(tmp_path / "corpus"), shuffle_seed=5)


@given(ledgers, st.integers(1, 60))
def test_batches_in_order_are_the_numbers_the_ledger_leaves(ledger: set[int], steps: int) -> None:
    taken = [batch_of(step, ledger) for step in range(steps)]
    assert taken == [n for n in range(steps + 61) if n not in ledger][:steps]


@given(ledgers, st.integers(0, 60), st.integers(0, 20))
def test_extending_the_ledger_ahead_leaves_earlier_steps_alone(
    ledger: set[int], restart: int, count: int
) -> None:
    """A rollback to ``restart`` skips batches from there on; what was trained before stays."""
    added = {batch_of(restart + n, ledger) for n in range(count)}
    before = [batch_of(step, ledger) for step in range(restart)]
    assert [batch_of(step, ledger | added) for step in range(restart)] == before
    assert batch_of(restart, ledger | added) == batch_of(restart + count, ledger)


@given(ledgers, st.integers(0, 60))
def test_the_ledger_counts_as_a_set_in_any_order(ledger: set[int], step: int) -> None:
    listed = sorted(ledger, reverse=True)
    assert batch_of(step, tuple(listed) + tuple(listed)) == batch_of(step, frozenset(ledger))


@given(st.integers(1, 300), st.integers(0, 2**31), st.integers(0, 5))
def test_an_epoch_visits_every_sequence_once(count: int, seed: int, epoch: int) -> None:
    assert sorted(shuffled(n, count, seed, epoch) for n in range(count)) == list(range(count))


def test_order_depends_on_seed_and_epoch() -> None:
    orders = {
        tuple(shuffled(n, 500, seed, epoch) for n in range(500))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(orders) == 4
    first = next(iter(orders))
    neighbours = sum(abs(a - b) == 1 for a, b in pairwise(first))
    assert neighbours < 20


def test_unshuffled_sequences_come_as_they_stand_in_the_files(corpus: DataConfig) -> None:
    stream = TokenStream(corpus.model_copy(update={"shuffle": False}), 32)
    whole = b"".join(path.read_bytes() for path in source_files(corpus))
    taken = b"".join(stream.sequence(n)[:-1].tobytes() for n in range(stream.sequences))
    assert taken == whole[: 32 * stream.sequences]
    assert np.array_equal(stream.sequence(stream.sequences), stream.sequence(0)), "an epoch later"


@pytest.mark.parametrize(
    ("data_size", "micro", "accumulation"),
    [(1, 12, 1), (1, 3, 4), (2, 6, 1), (2, 3, 2), (3, 2, 2), (4, 1, 3), (12, 1, 1)],
)
def test_a_batch_holds_the_same_sequences_for_every_split(
    corpus: DataConfig, data_size: int, micro: int, accumulation: int
) -> None:
    stream = TokenStream(corpus, 32)
    for batch in (0, 7, 40):  # 40 lies in a later epoch
        whole = {stream.sequence(batch * 12 + n).tobytes() for n in range(12)}
        seen = []
        for data_rank in range(data_size):
            parts = list(stream.micro_batches(batch, data_rank, data_size, micro, accumulation))
            assert len(parts) == accumulation
            for inputs, targets in parts:
                assert inputs.shape == targets.shape == (micro, 32)
                assert inputs.dtype == targets.dtype == torch.int64
                assert torch.equal(inputs[:, 1:], targets[:, :-1])
                both = torch.cat([inputs, targets[:, -1:]], dim=1)
                seen += [row.to(torch.uint8).numpy().tobytes() for row in both]
        assert set(seen) == whole
        assert len(seen) == 12


def test_files_are_taken_in_order_of_their_relative_names(corpus: DataConfig) -> None:
    names = [path.relative_to(corpus.source).as_posix() for path in source_files(corpus)]
    assert names == ["a/c.py", "a/z.py", "b.py"]


def test_one_file_gives_its_own_bytes(tmp_path: Path) -> None:
    path = tmp_path / "text.bin"
    path.write_bytes(bytes(range(200)))
    stream = TokenStream(DataConfig(source=str(path)), 20)
    assert stream.sequences == 9
    starts = sorted(int(stream.sequence(n)[0]) for n in range(9))
    assert starts == list(range(0, 180, 20))
    assert all(len(stream.sequence(n)) == 21 for n in range(9))


def test_the_standard_library_is_text_enough_for_the_demo() -> None:
    stream = TokenStream(DataConfig(), 128)
    assert stream.sequences > 20_000
    assert not any("site-packages" in path.parts for path in source_files(DataConfig()))


def test_corpora_of_other_files_have_other_fingerprints(corpus: DataConfig) -> None:
    before = TokenStream(corpus, 32).fingerprint
    assert TokenStream(corpus, 32).fingerprint == before
    (Path(corpus.source) / "d.py").write_bytes(b"more text")
    after = TokenStream(corpus, 32).fingerprint
    assert after != before
    assert 0 <= after < 2**63


def test_a_folder_that_is_renamed_makes_another_order_and_another_fingerprint(
    tmp_path: Path,
) -> None:
    for folder in ("2024", "2025"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "part-000.txt").write_bytes(folder.encode() * 500)
    config = DataConfig(source=str(tmp_path), pattern="**/*.txt", shuffle=False)
    before = TokenStream(config, 32)
    (tmp_path / "2024").rename(tmp_path / "2026")
    after = TokenStream(config, 32)
    assert before.sequence(0).tobytes() != after.sequence(0).tobytes()
    assert before.fingerprint != after.fingerprint and not after.is_of(before.fingerprint)
    # The whole of it may lie elsewhere.
    moved = tmp_path.rename(tmp_path.with_name("elsewhere"))
    assert TokenStream(config.model_copy(update={"source": str(moved)}), 32).is_of(
        after.fingerprint
    )


def test_a_state_of_before_folders_were_told_apart_is_taken_up(corpus: DataConfig) -> None:
    stream = TokenStream(corpus, 32)
    told = b"c.py 1700\nz.py 900\nb.py 3000"
    as_it_was = int.from_bytes(hashlib.blake2b(told, digest_size=7).digest(), "big")
    assert stream.is_of(as_it_was) and as_it_was != stream.fingerprint
    assert stream.is_of(stream.fingerprint) and not stream.is_of(as_it_was + 1)


class TestCheckSource:
    def test_good_data_has_no_problem(self, corpus: DataConfig) -> None:
        assert check_source(corpus, 32) == []

    def test_a_missing_path_is_named(self) -> None:
        (problem,) = check_source(DataConfig(source="/nowhere/text"), 32)
        assert "/nowhere/text does not exist" in problem
        with pytest.raises(DataAwayError, match="does not exist"):
            TokenStream(DataConfig(source="/nowhere/text"), 32)

    def test_a_folder_that_fails_while_it_is_looked_through_is_named(
        self, corpus: DataConfig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: object) -> list[str]:
            raise OSError(116, "Stale file handle")

        monkeypatch.setattr("launch.data.matching_files", broken)
        (problem,) = check_source(corpus, 32)
        assert corpus.source in problem and "Stale file handle" in problem
        with pytest.raises(DataAwayError, match="Stale file handle"):
            TokenStream(corpus, 32)

    def test_a_pattern_without_files_is_named(self, corpus: DataConfig) -> None:
        other = corpus.model_copy(update={"pattern": "*.rs"})
        (problem,) = check_source(other, 32)
        assert "'*.rs'" in problem
        # So is the folder of a mount that is away.
        with pytest.raises(DataAwayError, match=r"\*\.rs"):
            TokenStream(other, 32)

    def test_a_file_shorter_than_a_sequence_tells_both_lengths(self, tmp_path: Path) -> None:
        path = tmp_path / "short.txt"
        path.write_bytes(b"x" * 32)
        config = DataConfig(source=str(path))
        (problem,) = check_source(config, 32)
        assert "32 tokens" in problem
        with pytest.raises(DataError, match="32 tokens") as short:
            TokenStream(config, 32)
        assert not isinstance(short.value, DataAwayError)
        path.write_bytes(b"x" * 33)
        assert check_source(config, 32) == []
        assert TokenStream(config, 32).sequences == 1
