"""Builds and loads the casts in C (``*.c`` beside this); without a compiler there are none.

Promises: ``load()`` returns the same answer for the life of the process, never raises, and
leaves one file in this package's ``__pycache__`` (a private temporary folder where that
can't be written), named by source, compiler and processor, put there in one rename.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

# -ffp-contract=off: a fused multiply-add would round once where the plain path rounds twice.
Library = ctypes.CDLL
"""The loaded casts."""

_FLAGS = (
    # -O3 takes twice as long to build and makes nothing faster.
    *(
        "-O2",
        "-ftree-vectorize",
        "-march=native",
        "-ffp-contract=off",
        "-fopenmp-simd",
        "-fno-math-errno",
    ),
    *("-shared", "-fPIC"),
)
_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
SCALE_RULES = {"block": 0, "mxfp8": 1, "current": 2}
"""``enum rule`` of ``block_kernels.c``, by recipe."""
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "octavo_quantize": (_POINTER, _POINTER, _LONG, _POINTER, _POINTER, _POINTER),
    "octavo_observe": (_POINTER, _POINTER, _LONG),
    "octavo_upcast": (_POINTER, _LONG, _INT, _POINTER),
    "octavo_rescale": (_POINTER, _LONG, _POINTER, _POINTER),
    "octavo_quantize_blocks": (
        *(_POINTER, _POINTER, _LONG, _LONG, _INT),
        *(_POINTER, _POINTER, _POINTER, _POINTER),
    ),
    "octavo_quantize_squares": (_POINTER, _POINTER, _LONG, _LONG, _POINTER),
    "octavo_unpack_columns": (_POINTER, _POINTER, _LONG, _LONG, _INT, _INT, _POINTER),
    "octavo_used_scales": (_POINTER, _LONG, _POINTER, _LONG, _INT, _INT, ctypes.c_float),
    "octavo_block_quantize": (_POINTER, _LONG, _LONG, _INT, _INT, _POINTER, _POINTER, _POINTER),
    "octavo_block_dequantize": (_POINTER, _POINTER, _LONG, _INT, _INT, _INT, _POINTER),
}


class Slot(ctypes.Structure):
    """``slot`` of ``casts.h``."""

    _fields_ = (
        ("scale", _POINTER),
        ("amax", _POINTER),
        ("counters", _POINTER),
        ("energies", _POINTER),
        ("e5m2", ctypes.c_int32),
        ("current", ctypes.c_int32),
        ("power_of_two", ctypes.c_int32),
        ("counting", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
    )


@functools.cache
def load() -> ctypes.CDLL | None:
    """The casts as a C library, built at the first call of a machine (two seconds)."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        logger.info("no C compiler: FP8 casts on CPU run in plain PyTorch, several times slower")
        return None
    try:
        library = ctypes.CDLL(str(_built(compiler)))
        for name, signature in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = signature, None
    # AttributeError: sources of another version than this module, as while it is upgraded.
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        logger.warning("FP8 casts on CPU run in plain PyTorch: building them failed: %s", error)
        return None
    return library


def _built(compiler: str) -> Path:
    sources = sorted(Path(__file__).parent.glob("*.c"))
    digest = hashlib.sha256()
    texts = [path.read_text() for path in [*sources, *sorted(Path(__file__).parent.glob("*.h"))]]
    for part in (*texts, compiler, " ".join(_FLAGS), platform.machine(), _cpu_flags()):
        digest.update(part.encode())
    name = f"kernels-{digest.hexdigest()[:16]}.so"
    folder = Path(__file__).with_name("__pycache__")
    if (folder / name).exists():
        return folder / name
    try:
        folder.mkdir(exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        folder = Path(tempfile.mkdtemp(prefix="octavo-kernels-"))
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    command = [compiler, *_FLAGS, *map(str, sources), "-o", temporary]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    except (OSError, subprocess.SubprocessError):
        Path(temporary).unlink()
        raise
    # Ranks that start together each build their own copy; the last rename wins.
    return Path(temporary).replace(folder / name)


def _cpu_flags() -> str:
    # A checkout may lie on a file system that unlike machines share.
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
