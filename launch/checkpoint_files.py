"""One rank's file of a checkpoint: written durably, read whole or in part, verified either way.

Beside ``rank-00003.safetensors`` lies ``rank-00003.json`` with a digest of every chunk, so that a
rank of another layout, which needs a few slices of many files, verifies what it reads and no
more; where that is lost the whole file is read first. Promises: a file is complete under its name
or not there; what was written was read back from the disk before anybody is told; nothing is
returned that doesn't match its digest.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from launch.digests import (
    CHUNK,
    Payload,
    chunk_digest,
    chunk_digests_of,
    chunks_of,
    digest_of_chunks,
    digest_of_file,
)

MOST_TEXT = 256 << 20
"""Bytes of a manifest, or of a file's digests, at most: those of terabytes have less."""
_CACHED = 16
"""Verified chunks that a reader keeps."""
_ABSENT = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENXIO,
        # As ``open_regular`` and ``read_small`` say it.
        errno.EINVAL,
        errno.EFBIG,
    }
)


class DamagedFileError(RuntimeError):
    """A file's bytes aren't those that were written; the message names it."""


@dataclass(frozen=True, slots=True)
class RankFile:
    """One rank's state in a checkpoint, as its manifest tells."""

    name: str
    nbytes: int
    digest: str
    """``launch.digests.digest_of`` of the bytes."""


def write_rank_file(folder: Path, name: str, payload: Payload, digest: str) -> RankFile:
    """Write ``name`` and what verifies it into ``folder``, durable on return.

    Raises OSError when it can't be, and then leaves nothing; DamagedFileError when ``payload`` no
    longer has ``digest``, or the disk doesn't give back what it was given.
    """
    found: list[bytes] = []
    nbytes = 0
    path = folder / name
    partial = _partial(path)
    with _removed_on_error(partial):
        with partial.open("wb", buffering=0) as stream:
            for chunk in chunks_of(payload):
                found.append(chunk_digest(chunk))
                nbytes += len(chunk)
                _write_all(stream.fileno(), chunk)
            if digest_of_chunks(found) != digest:
                raise DamagedFileError(f"the state for {name} changed before it was written")
            os.fsync(stream.fileno())
        _read_back(partial, found)
        partial.rename(path)
    file = RankFile(name, nbytes, digest)
    # After it: says that the file is complete, and what it must be.
    told = {**asdict(file), "digests": [chunk.hex() for chunk in found]}
    with _removed_on_error(path):
        write_durably(_note(path), json.dumps(told).encode())
        sync_folder(folder)
    return file


def is_absent(error: OSError) -> bool:
    """Whether it says that nothing is there, or nothing of ours. Any other, such as that of a mount
    that is away (EIO, ESTALE, ENOTCONN, ETIMEDOUT) or refuses (EACCES), says nothing of the kind:
    the same look may find everything in a minute."""
    return error.errno in _ABSENT


def entries(folder: Path, prefix: str) -> list[Path]:
    """What of ``folder`` has a name that begins so, sorted; nothing where there is no folder.

    Raises OSError where the storage doesn't say: ``Path.glob`` takes a folder that it may not read
    for an empty one.
    """
    try:
        with os.scandir(folder) as found:
            return sorted(folder / entry.name for entry in found if entry.name.startswith(prefix))
    except OSError as error:
        if is_absent(error):
            return []
        raise


def open_regular(path: Path) -> int:
    """A descriptor to read a file by. OSError for what is none: a pipe would never end, nor would
    a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file", str(path))


def read_small(path: Path) -> bytes:
    """A whole file of text about others. OSError where it is none, or above ``MOST_TEXT``."""
    with os.fdopen(open_regular(path), "rb") as stream:
        if os.fstat(stream.fileno()).st_size > MOST_TEXT:
            raise OSError(errno.EFBIG, "it is too large to be one of ours", str(path))
        return stream.read()


def complete_file(folder: Path, name: str) -> RankFile | None:
    """What ``write_rank_file`` says of a file that is there in full; else None.

    Raises OSError where the storage doesn't say.
    """
    path = folder / name
    try:
        told = json.loads(read_small(_note(path)))
        file = RankFile(told["name"], told["nbytes"], told["digest"])
        return file if path.stat().st_size == file.nbytes else None
    except OSError as error:
        if not is_absent(error):
            raise
        return None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def what_is_wrong(folder: Path, file: RankFile, *, contents: bool) -> str | None:
    """One sentence on what is wrong with a file, None if nothing is; ``contents``: reads all.

    Raises OSError where the storage doesn't say.
    """
    path = folder / file.name
    try:
        size = path.stat().st_size
        if size != file.nbytes:
            return f"{file.name} has {size} bytes, {file.nbytes} were written"
        if contents:
            with os.fdopen(open_regular(path), "rb") as stream:
                if digest_of_file(stream) != file.digest:
                    return f"{file.name} has another digest than was written"
    except OSError as error:
        if not is_absent(error):
            raise
        return f"{file.name} can't be read: {error.strerror}"
    return None


class RankFileReader:
    """Random access to a rank's file; reads and verifies the chunks that it is asked for."""

    def __init__(self, folder: Path, file: RankFile) -> None:
        """Raises OSError, or DamagedFileError when the file has no digests of the manifest's."""
        path = folder / file.name
        self._file = file
        self._digests = _noted(path)
        chunks = -(-file.nbytes // CHUNK)
        if len(self._digests) != chunks or digest_of_chunks(self._digests) != file.digest:
            # The note is lost; the file itself may be whole.
            with os.fdopen(open_regular(path), "rb") as stream:
                self._digests = chunk_digests_of(stream)
        if digest_of_chunks(self._digests) != file.digest or path.stat().st_size != file.nbytes:
            raise DamagedFileError(f"{file.name} isn't what was written")
        self._descriptor = open_regular(path)
        self._cache: OrderedDict[int, bytes] = OrderedDict()

    def close(self) -> None:
        """Of no use afterwards."""
        os.close(self._descriptor)

    def read(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Bytes [begin, end), a copy. Raises OSError or DamagedFileError."""
        if end > self._file.nbytes:
            raise DamagedFileError(f"{self._file.name} ends before byte {end}")
        found = np.empty(end - begin, dtype=np.uint8)
        at = begin
        while at < end:
            number, within = divmod(at, CHUNK)
            chunk = self._chunk(number)[within : within + end - at]
            found[at - begin : at - begin + len(chunk)] = np.frombuffer(chunk, dtype=np.uint8)
            at += len(chunk)
        return found

    def _chunk(self, number: int) -> bytes:
        if number in self._cache:
            self._cache.move_to_end(number)
            return self._cache[number]
        begin = number * CHUNK
        wanted = min(CHUNK, self._file.nbytes - begin)
        data = os.pread(self._descriptor, wanted, begin)
        if len(data) != wanted or chunk_digest(data) != self._digests[number]:
            raise DamagedFileError(
                f"{self._file.name}: bytes from {begin} aren't what was written there"
            )
        self._cache[number] = data
        if len(self._cache) > _CACHED:
            self._cache.popitem(last=False)
        return data


def write_durably(path: Path, data: bytes) -> None:
    """The file is there in full and on the disk, or, on an OSError, as it was before."""
    partial = _partial(path)
    with _removed_on_error(partial):
        with partial.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        partial.rename(path)


def sync_folder(folder: Path) -> None:
    """Names in ``folder`` are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _noted(path: Path) -> list[bytes]:
    """The digests that were written beside a file; none if they can't be read."""
    try:
        told = json.loads(read_small(_note(path)))
        return [bytes.fromhex(chunk) for chunk in told["digests"]]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return []


def _note(path: Path) -> Path:
    return path.with_suffix(".json")


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial")


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _read_back(path: Path, digests: list[bytes]) -> None:
    """Raise DamagedFileError unless the disk has what ``digests`` say."""
    with path.open("rb") as stream:
        if hasattr(os, "posix_fadvise"):
            # From the disk, not from the cache that the write has left.
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for number, expected in enumerate(digests):
            if chunk_digest(stream.read(CHUNK)) != expected:
                raise DamagedFileError(f"{path.name}: the disk lost bytes from {number * CHUNK}")


@contextmanager
def _removed_on_error(path: Path) -> Iterator[None]:
    """A full disk gets its space back."""
    try:
        yield
    except (OSError, DamagedFileError):
        path.unlink(missing_ok=True)
        raise
