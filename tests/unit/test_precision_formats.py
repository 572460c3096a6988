"""FP8 values against ml_dtypes: every code, every BF16 input, both ways of casting."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel.config import FP8Config
from parallel.precision import kernels, recipes
from parallel.precision.formats import E4M3, E5M2, Float8Format, saturating_cast
from parallel.precision.operand_statistics import OperandStatistics
from parallel.precision.per_tensor import DelayedQuantizer
from parallel.precision.quantizers import Kept, StateRow

FORMATS = [E4M3, E5M2]
NUMPY = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2}
ALL_BF16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
WAYS = ["compiled", "plain"]

by_format = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
by_way = pytest.mark.parametrize("way", WAYS)


def quantizer_of(format: Float8Format, way: str, scale: float = 1.0) -> DelayedQuantizer:
    library = kernels.load() if way == "compiled" else None
    assert way == "plain" or library is not None, "the tests need a C compiler"
    recipe = recipes.expand(FP8Config())
    counters = torch.zeros(4, dtype=torch.int64)
    row = StateRow(torch.zeros(()), torch.tensor(scale), counters)
    return DelayedQuantizer("input", format, recipe, row, library)


def expected_codes(x: torch.Tensor, format: Float8Format) -> np.ndarray:
    clipped = np.clip(x.float().numpy(), -format.max, format.max)
    return clipped.astype(NUMPY[format.name]).view(np.uint8)


def is_nan(codes: np.ndarray, format: Float8Format) -> np.ndarray:
    return np.isnan(codes.view(NUMPY[format.name]).astype(np.float32))


def assert_same_codes(mine: torch.Tensor, theirs: np.ndarray, format: Float8Format) -> None:
    codes = mine.view(torch.uint8).numpy()
    nan = is_nan(theirs, format)
    np.testing.assert_array_equal(is_nan(codes, format), nan)
    np.testing.assert_array_equal(codes[~nan], theirs[~nan])


@by_format
@by_way
def test_every_code_upcasts_to_the_value_that_ml_dtypes_gives_it(format, way):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    payload = codes.view(format.dtype)
    values, _ = quantizer_of(format, way).unpack(Kept(payload, torch.ones(())))
    expected = codes.numpy().view(NUMPY[format.name]).astype(np.float32)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(values.float().numpy(), expected)
    np.testing.assert_array_equal(
        np.signbit(values.float().numpy())[numbers], np.signbit(expected)[numbers]
    )


@by_format
@by_way
@pytest.mark.parametrize("scale", [1.0, 2.0**-9, 3.7e4, 0.013, 3.0e38])
def test_every_bf16_input_is_rounded_as_ml_dtypes_does(format, way, scale):
    quantized = quantizer_of(format, way, scale).quantize(ALL_BF16, "kept")
    scaled = ALL_BF16.float() * torch.tensor(scale)
    expected = expected_codes(scaled, format)
    assert_same_codes(quantized.kept.payload, expected, format)
    np.testing.assert_array_equal(
        quantized.rows.values.float().numpy(), expected.view(NUMPY[format.name]).astype(np.float32)
    )


@by_format
@settings(deadline=None)
@given(st.lists(st.floats(width=32), min_size=1, max_size=64))
def test_saturating_cast_rounds_any_float_as_ml_dtypes_does(format, values):
    x = torch.tensor(values, dtype=torch.float32)
    assert_same_codes(saturating_cast(x, format), expected_codes(x, format), format)


@by_format
@by_way
def test_a_tie_goes_to_the_even_code(format, way):
    codes = np.arange(255, dtype=np.uint8).view(NUMPY[format.name]).astype(np.float64)
    low, high = codes[:-1], codes[1:]
    finite = np.isfinite(low) & np.isfinite(high) & (low >= 0) & (np.arange(254) < 127)
    middle = torch.tensor(((low + high) / 2)[finite], dtype=torch.bfloat16)
    payload = quantizer_of(format, way).quantize(middle, "kept").kept.payload
    got = payload.view(torch.uint8).int()
    lower = torch.arange(254)[torch.from_numpy(finite)]
    assert torch.equal(got, (lower + (lower % 2)).int())
    assert middle.numel() > 100


@by_format
@by_way
def test_infinities_saturate_with_their_sign_and_nan_survives(format, way):
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e30, -1e30]).bfloat16()
    values = quantizer_of(format, way).quantize(x, "none").rows.values.float()
    assert values[[0, 1, 3, 4]].tolist() == [format.max, -format.max, format.max, -format.max]
    assert values[2].isnan()


@by_format
@by_way
def test_counters_tell_saturated_underflowed_nonfinite_and_all(format, way):
    quantizer = quantizer_of(format, way)
    tiny = format.min_subnormal
    x = [
        *(format.max, format.max * 1.01),  # rounding alone brings these to max
        *(format.max * 1.25, -format.max * 8),
        *(0.0, -0.0, tiny, tiny / 2, -tiny / 4, tiny * 0.75),  # a tie with 0 underflows
        *(torch.inf, torch.nan, -torch.inf),
    ]
    quantizer.quantize(torch.tensor(x).bfloat16(), "none")
    assert quantizer.row.counters.tolist() == [2, 2, 3, len(x)]
    quantizer.quantize(torch.tensor(x).bfloat16(), "none")
    assert quantizer.row.counters.tolist() == [4, 4, 6, 2 * len(x)]


def beyond(format: Float8Format, x: Tensor) -> list[bool]:
    """Whether rounding alone, which ml_dtypes does without saturation, leaves the format."""
    rounded = x.float().numpy().astype(NUMPY[format.name]).astype(np.float32)
    return (~(np.abs(rounded) <= format.max)).tolist()


EXACT_TIE = {"E4M3": 464.0, "E5M2": 61440.0}
"""Halfway from the largest number to what would be the next."""


@by_format
@by_way
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("alone", [True, False])
def test_an_exact_tie_beyond_the_largest_counts_as_the_even_code_it_goes_to(
    format, way, sign, alone
):
    tie = EXACT_TIE[format.name]
    places = [0.0, 2.0**-8, -(2.0**-8)]  # BF16's next numbers up and down, relative
    for place in places[:1] if alone else places:
        values = torch.tensor([sign * tie * (1 + place)] * 3).bfloat16()
        quantizer = quantizer_of(format, way)
        quantizer.quantize(values, "none")
        expected = sum(beyond(format, values))
        assert quantizer.row.counters[0] == expected
    assert beyond(format, torch.tensor([tie])) == [format is E5M2]


@by_format
@by_way
@pytest.mark.parametrize("places", [-1, 0, 1])
def test_fp32_numbers_next_to_the_tie_count_by_the_side_they_are_on(format, way, places):
    scaled = torch.tensor(EXACT_TIE[format.name])
    for _ in range(abs(places)):
        scaled = torch.nextafter(scaled, torch.tensor(torch.inf * places))
    quantizer = quantizer_of(format, way, scaled.item())
    quantizer.quantize(torch.ones(5).bfloat16(), "none")
    assert quantizer.row.counters[0] == 5 * sum(beyond(format, scaled[None]))
    assert quantizer.row.counters[0] == (5 if places > 0 or (places, format) == (0, E5M2) else 0)


@pytest.mark.parametrize("role", ["input", "grad_output"])
@pytest.mark.parametrize("places", [-1, 0, 1])
def test_what_another_library_quantizes_is_counted_alike(role, places):
    scaled = torch.tensor(EXACT_TIE["E5M2" if role == "grad_output" else "E4M3"])
    for _ in range(abs(places)):
        scaled = torch.nextafter(scaled, torch.tensor(torch.inf * places))
    statistics = OperandStatistics(FP8Config(), 1, torch.device("cpu"))
    row = statistics.rows(0)[role]
    row.feed(statistics.amax, scaled[None], 0)
    row.observe(torch.ones(5).bfloat16(), quantized=True, counted=True)
    tie_counts = role == "grad_output"
    assert statistics.counters[:, 0].sum() == (
        5 if places > 0 or (not places and tie_counts) else 0
    )


@by_way
def test_amax_is_the_maximum_over_calls_and_keeps_a_nan(way):
    quantizer = quantizer_of(E4M3, way)
    for values, amax in (([1.5, -3.0], 3.0), ([2.0], 3.0), ([-torch.inf], torch.inf)):
        quantizer.observe(torch.tensor(values).bfloat16())
        assert quantizer.row.amax.item() == amax
    quantizer.observe(torch.tensor([torch.nan, 1.0]).bfloat16())
    quantizer.observe(torch.tensor([torch.inf, 1.0]).bfloat16())
    assert quantizer.row.amax.isnan()


@by_way
def test_an_empty_tensor_leaves_everything_as_it_was(way):
    quantizer = quantizer_of(E4M3, way, 2.0)
    quantizer.observe(torch.zeros(0, 4).bfloat16())
    quantized = quantizer.quantize(torch.zeros(0, 4).bfloat16(), "kept")
    assert quantized.kept.payload.shape == (0, 4)
    assert (quantizer.row.amax.item(), quantizer.row.scale.item()) == (0.0, 2.0)
    assert quantizer.row.counters.tolist() == [0, 0, 0, 0]


def test_a_strided_input_is_quantized_in_its_logical_order():
    x = torch.randn(33, 70).bfloat16().t()
    ways = [quantizer_of(E4M3, way, 9.0).quantize(x, "none").rows.values for way in WAYS]
    assert torch.equal(*ways)


def test_without_a_compiler_there_are_no_kernels_and_no_error(monkeypatch, caplog):
    monkeypatch.setattr(kernels.shutil, "which", lambda name: None)
    with caplog.at_level("INFO"):
        assert kernels.load.__wrapped__() is None
    assert "no C compiler" in caplog.text


def test_a_compiler_that_fails_is_a_warning_and_leaves_nothing(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(kernels, "__file__", str(tmp_path / "kernels.py"))
    (tmp_path / "kernels.c").write_text("")
    monkeypatch.setattr(kernels.shutil, "which", lambda name: "/bin/false")
    assert kernels.load.__wrapped__() is None
    assert "plain PyTorch" in caplog.text
    assert not list((tmp_path / "__pycache__").iterdir())


def test_sources_of_another_version_are_a_warning_too(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(kernels, "__file__", str(tmp_path / "kernels.py"))
    (tmp_path / "kernels.c").write_text("void octavo_quantize(void) {}\n")
    assert kernels.load.__wrapped__() is None
    assert "plain PyTorch" in caplog.text


def test_where_the_package_takes_no_file_they_are_built_elsewhere(monkeypatch, tmp_path):
    monkeypatch.setattr(kernels.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__pycache__").write_text("a file where the folder would be")
    for source in Path(kernels.__file__).parent.glob("*.[ch]"):
        (tmp_path / "package" / source.name).write_text(source.read_text())
    monkeypatch.setattr(kernels, "__file__", str(tmp_path / "package" / "kernels.py"))
    assert kernels.load.__wrapped__() is not None
    (folder,) = tmp_path.glob("octavo-kernels-*")
    assert folder.stat().st_mode & 0o077 == 0
