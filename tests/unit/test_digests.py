"""Digests of a state: one value for one state, another for any other, by the published XXH128."""

from __future__ import annotations

import io

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from launch.digests import (
    CHUNK,
    chunk_digest,
    chunks_of,
    digest_of,
    digest_of_chunks,
    digest_of_file,
)

NOTHING = "99aa06d3014798d86001c324468d497f"
"""XXH128 of no bytes with seed 0, from xxHash's own sanity tests."""

LENGTHS = st.sampled_from([0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 77])


def state(nbytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def test_it_is_the_published_hash() -> None:
    assert chunk_digest(b"").hex() == NOTHING
    assert digest_of(b"") == NOTHING, "a state without chunks has no digests to hash"


@given(LENGTHS, st.integers(0, 3))
def test_every_way_to_it_is_the_same(nbytes: int, seed: int) -> None:
    payload = state(nbytes, seed)
    chunks = list(chunks_of(payload))
    assert [len(chunk) for chunk in chunks[:-1]] == [CHUNK] * (len(chunks) - 1)
    assert b"".join(chunks) == payload.tobytes()
    expected = digest_of(payload)
    assert digest_of(payload.tobytes()) == expected
    assert digest_of(bytearray(payload)) == expected
    assert digest_of_file(io.BytesIO(payload.tobytes())) == expected
    assert digest_of_chunks([chunk_digest(chunk) for chunk in chunks]) == expected


@given(LENGTHS.filter(bool), st.data())
def test_one_bit_makes_another(nbytes: int, data: st.DataObject) -> None:
    payload = state(nbytes, 0)
    at, bit = data.draw(st.integers(0, nbytes - 1)), data.draw(st.integers(0, 7))
    before = digest_of(payload)
    payload[at] ^= 1 << bit
    assert digest_of(payload) != before


def test_nor_are_states_of_zeros_alike() -> None:
    lengths = (0, 1, 32, CHUNK, CHUNK + 1, 2 * CHUNK)
    assert len({digest_of(bytes(length)) for length in lengths}) == len(lengths)


def test_chunks_in_another_order_are_another_state() -> None:
    first, second = state(CHUNK, 1), state(CHUNK, 2)
    assert digest_of(np.concatenate([first, second])) != digest_of(np.concatenate([second, first]))
