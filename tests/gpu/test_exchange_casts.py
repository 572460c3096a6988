"""The gradient exchange's Triton kernels on a GPU: the plain way's bits, no host sync, the time.

**Not run on a GPU so far**: no machine with one was at hand. What runs without one is the
comparison itself, on the casts in C (``tests/unit/test_gradient_casts.py``), and the kernels in
Triton's interpreter. Times are written, not judged: ``make test-gpu OUT=folder`` leaves them in
``exchange_casts.md``.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from parallel.precision.exchange_casts import choose
from parallel.precision.formats import FORMATS
from tests.benchmarks.bench_exchange_casts import measure
from tests.benchmarks.results import Report, markdown
from tests.gpu.conftest import OUT_VARIABLE
from tests.unit.cast_cases import compare, hop_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton"),
]
CUDA = torch.device("cuda")

by_format = pytest.mark.parametrize("format", ["E4M3", "E5M2"])


@by_format
@pytest.mark.parametrize("compiled", [True, False], ids=["triton", "plain"])
def test_bytes_values_and_residuals_are_those_of_the_plain_way_on_a_cpu(format, compiled):
    def make(format: str, block: int):
        return choose(CUDA, FORMATS[format], block, compiled=compiled)

    assert make(format, 128).name == ("triton" if compiled else "plain")
    assert compare(make, format, "cuda") > 50


@by_format
def test_no_hop_waits_for_the_device(format):
    cases = [
        (hop, block, [arg.cuda() if isinstance(arg, torch.Tensor) else arg for arg in args])
        for hop, block, args in hop_cases(format)
    ]
    # Compiling the kernels may wait; running them may not.
    for mode in ("default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for hop, block, args in cases:
                getattr(choose(CUDA, FORMATS[format], block), hop)(*args)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_the_time_of_every_way_is_written(tmp_path: Path):
    folder = Path(os.environ.get(OUT_VARIABLE) or tmp_path)
    timed = [measure(CUDA, millions * 2**20, ranks=8, repeats=7) for millions in (1, 16, 64)]
    folder.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name()
    rows = tuple(row for each in timed for row in each.rows())
    text = f"{name}\n\n{markdown([Report('bench_exchange_casts', rows)])}\n"
    (folder / "exchange_casts.md").write_text(text)
    for each in timed:
        assert each.same_bits["triton"] and each.seconds["triton"].keys() == {
            "pack",
            "mean",
            "unpack",
        }
