"""What a rank's state is recognised by, in memory and on disk: a digest of every MiB, and one of
these.

Every copy is hashed where it is made, where it arrives and where it is read, beside training on
the same cores: so by XXH3 with 128 bits (https://github.com/Cyan4973/xxHash, "XXH128"), which reads
memory about as fast as it comes, several times as fast as BLAKE3. It finds damage, of which a
share of 2⁻¹²⁸ would pass; it is no seal against who means to deceive. With the digests of its MiBs,
the *chunks*, a part of a file is verified without the rest. Promises: equal bytes have equal
digests whichever of these functions made them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import xxhash
from numpy.typing import NDArray

Payload = bytes | bytearray | memoryview | NDArray[np.uint8]
"""Bytes of a packed state."""

CHUNK = 1 << 20
"""Bytes that have a digest of their own; the last ones may be fewer."""


def digest_of(payload: Payload) -> str:
    """XXH128 of the digests of the payload's chunks, one behind the other; hex."""
    return digest_of_chunks(chunk_digest(chunk) for chunk in chunks_of(payload))


def chunks_of(payload: Payload) -> Iterator[memoryview]:
    """The payload in pieces of ``CHUNK`` bytes, not copied."""
    data = np.frombuffer(payload, dtype=np.uint8).data
    return (data[begin : begin + CHUNK] for begin in range(0, len(data), CHUNK))


def digest_of_file(stream: BinaryIO) -> str:
    """``digest_of`` of what is left in ``stream``."""
    return digest_of_chunks(chunk_digests_of(stream))


def chunk_digests_of(stream: BinaryIO) -> list[bytes]:
    """Those of the chunks of what is left in ``stream``."""
    return [chunk_digest(chunk) for chunk in iter(lambda: stream.read(CHUNK), b"")]


def chunk_digest(chunk: bytes | memoryview) -> bytes:
    """XXH128 of one chunk, big-endian."""
    return xxhash.xxh3_128_digest(chunk)


def digest_of_chunks(digests: Iterator[bytes] | list[bytes]) -> str:
    """``digest_of`` of the payload whose chunks have these ``digests``."""
    return xxhash.xxh3_128_hexdigest(b"".join(digests))
