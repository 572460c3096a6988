"""Blocks: exponents, codes and values against the plain model, one block at a time."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel.precision import kernels, recipes
from parallel.precision.blockwise import Blockwise
from parallel.precision.formats import FORMATS, Float8Format
from parallel.precision.quantizers import StateRow
from parallel.precision.registry import QUANTIZERS
from tests.unit.precision_model import MAX, Rules, cast, mx_exponent, mx_scales, own_scale
from tests.unit.precision_recipes import fp8_config

WAYS = ["compiled", "plain"]
by_way = pytest.mark.parametrize("way", WAYS)
by_recipe = pytest.mark.parametrize("recipe", ["block", "mxfp8"])
by_format = pytest.mark.parametrize("format", ["E4M3", "E5M2"])
MAGNITUDES = torch.arange(2**15, dtype=torch.int16).view(torch.bfloat16)
"""Every non-negative BF16: all of them an amax can be."""

BF16 = st.integers(0, 2**16 - 1).map(
    lambda bits: torch.tensor(bits - 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
)
SPECIAL = torch.tensor(
    [0.0, -0.0, 1e-38, -1e-38, 448.0, -448.0, 57344.0, 3e38, -3e38, math.inf, -math.inf, math.nan]
).bfloat16()


def quantizer_of(
    recipe: str, format: Float8Format, way: str, role: recipes.Role = "input"
) -> Blockwise:
    library = kernels.load() if way == "compiled" else None
    assert way == "plain" or library is not None, "the tests need a C compiler"
    row = StateRow(torch.zeros(()), torch.ones(()), torch.zeros(4, dtype=torch.int64))
    expanded = recipes.expand(fp8_config(recipe))
    made = QUANTIZERS[expanded.scaling](role, format, expanded, row, library)
    assert isinstance(made, Blockwise)
    return made


def model_scales(recipe: str, amax: float, fp8_max: float) -> tuple[int, float, float]:
    """(exponent kept, multiplier, inverse) by the rules."""
    if recipe == "mxfp8":
        exponent = mx_exponent(amax, fp8_max)
        return exponent, *mx_scales(exponent)
    scale = own_scale(amax, fp8_max, power_of_two=True)
    return 127 - round(math.log2(scale)), scale, 1 / scale


def assert_values(mine: Tensor, expected: np.ndarray) -> None:
    """``expected`` is exact; BF16 has every such value but those that round up to 2^128."""
    with np.errstate(over="ignore"):
        expected = np.where(np.abs(expected) >= 2.0**128, np.copysign(np.inf, expected), expected)
    values = mine.double().numpy()
    np.testing.assert_array_equal(values, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(values[numbers]), np.signbit(expected[numbers]))


@by_way
@by_recipe
@by_format
def test_every_amax_gives_the_exponent_and_the_value_of_the_rules(way, recipe, format):
    # One row: as blocks along columns, each a column of one; its only value is its amax.
    quantizer = quantizer_of(recipe, FORMATS[format], way)
    kept = quantizer.quantize(MAGNITUDES.unsqueeze(0), "kept").kept
    amaxes = MAGNITUDES.double().numpy()
    model = np.array([model_scales(recipe, amax, MAX[format]) for amax in amaxes.tolist()])
    np.testing.assert_array_equal(kept.scale_inv[0].numpy(), model[:, 0])
    with np.errstate(invalid="ignore"):
        codes = cast(amaxes, model[:, 1], format)
        assert_values(quantizer.unpack(kept).values[0], codes.astype(np.float64) * model[:, 2])
    again = quantizer.quantize(MAGNITUDES.unsqueeze(0), "values").columns
    assert torch.equal(again.values.nan_to_num(7), quantizer.unpack(kept).values.nan_to_num(7))


@by_way
@by_recipe
def test_every_amax_scales_a_block_along_rows_as_one_along_columns(way, recipe):
    quantizer = quantizer_of(recipe, FORMATS["E4M3"], way)
    companions = MAGNITUDES.unsqueeze(1) * torch.tensor([1.0, -0.3, 0.01]).bfloat16()
    along = quantizer.quantize(companions, "none").rows.values
    across = quantizer.quantize(companions.t().contiguous(), "values").columns.values
    assert torch.equal(along.nan_to_num(7), across.t().nan_to_num(7))


@st.composite
def matrices(draw: st.DrawFn) -> Tensor:
    """[rows, columns] of everything that BF16 holds, or of a decade or so, with specials in."""
    rows, columns = draw(st.integers(1, 40)), draw(st.sampled_from([1, 31, 32, 48, 129]))
    seed, exponent = draw(st.integers(0, 2**32)), draw(st.floats(-37, 37))
    generator = torch.Generator().manual_seed(seed)
    if draw(st.booleans()):
        bits = torch.randint(-(2**15), 2**15, (rows, columns), generator=generator)
        return bits.to(torch.int16).view(torch.bfloat16)
    x = torch.randn(rows, columns, generator=generator) * 10**exponent
    x = x.clamp(-3e38, 3e38).bfloat16()
    for value in draw(st.lists(st.one_of(BF16, st.sampled_from(list(SPECIAL))), max_size=4)):
        x[draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))] = value
    return x


@by_way
@by_recipe
@by_format
@settings(deadline=None, max_examples=40)
@given(x=matrices())
def test_any_matrix_is_quantized_as_the_rules_say_in_both_directions(way, recipe, format, x):
    # HYBRID has E5M2 for output gradients and nothing else.
    role: recipes.Role = "grad_output" if format == "E5M2" else "input"
    rules = Rules(fp8_config(f"{recipe}-HYBRID"))
    quantizer = quantizer_of(recipe, FORMATS[format], way, role)
    found = quantizer.quantize(x, "values")
    exact = x.double().numpy()
    with np.errstate(invalid="ignore"):
        assert_values(found.rows.values, rules.dequantized(exact, role, "columns"))
        assert_values(found.columns.values, rules.dequantized(exact, role, "rows"))
    kept = quantizer.quantize(x, "kept").kept
    assert torch.equal(
        quantizer.unpack(kept).values.nan_to_num(7), found.columns.values.nan_to_num(7)
    )


@by_recipe
@by_format
@settings(deadline=None, max_examples=40)
@given(x=matrices())
def test_both_ways_keep_the_same_amax_counters_and_codes(recipe, format, x):
    seen = []
    for way in WAYS:
        quantizer = quantizer_of(recipe, FORMATS[format], way)
        kept = quantizer.quantize(x, "kept").kept
        codes = kept.payload.view(torch.uint8).int()
        nan = kept.payload.float().isnan()
        row = quantizer.row
        seen.append((row.amax.nan_to_num(7), row.counters, kept.scale_inv, codes.where(~nan, 0)))
    for compiled, plain in zip(*seen, strict=True):
        assert torch.equal(compiled, plain)
    squares = [quantizer_of("block", FORMATS["E4M3"], way, "weight") for way in WAYS]
    for quantizer in squares:
        quantizer.quantize(x, "none")
    assert squares[0].row.counters.tolist() == squares[1].row.counters.tolist()


@pytest.mark.parametrize(
    ("recipe", "role", "format"),
    [
        *itertools.product(("mxfp8", "block"), ("input",), ("E4M3", "E5M2")),
        ("block", "weight", "E4M3"),
    ],
)
@pytest.mark.parametrize("largest", [2.0**-130, 2.0**-100, 1.0, 448.0, 3e38, math.inf])
def test_both_ways_count_the_same_whichever_magnitude_is_a_rows_smallest(
    recipe, role, format, largest
):
    # C counts the vanished only of rows whose smallest may vanish: it must not miss any.
    x = torch.full((2**15, 3), largest).bfloat16()
    x[:, 1], x[:, 2] = MAGNITUDES.minimum(x[:, 0]), 0.0
    counters = []
    for way in WAYS:
        quantizer = quantizer_of(recipe, FORMATS[format], way, role)
        quantizer.quantize(x, "none")
        counters.append(quantizer.row.counters.tolist())
    assert counters[0] == counters[1]
    assert counters[0][1] > 0


@by_way
@settings(deadline=None, max_examples=30)
@given(x=matrices())
def test_a_square_of_a_weight_has_one_scale_whichever_product_it_is_for(way, x):
    rules = Rules(fp8_config("block"))
    found = quantizer_of("block", FORMATS["E4M3"], way, "weight").quantize(x, "values")
    assert found.rows.values is found.columns.values
    with np.errstate(invalid="ignore"):
        expected = rules.dequantized(x.double().numpy(), "weight", "columns")
    assert_values(found.rows.values, expected)


@by_way
def test_only_a_value_that_is_not_finite_makes_its_block_saturate(way):
    x = torch.full((1, 128), 1000.0).bfloat16()
    x[0, 5] = torch.inf
    for recipe, counters in (("block", [127, 0, 1, 128]), ("mxfp8", [0, 31, 1, 128])):
        quantizer = quantizer_of(recipe, FORMATS["E4M3"], way)
        values = quantizer.quantize(x, "none").rows.values[0]
        assert quantizer.row.counters.tolist() == counters
        assert values[5] == 448 if recipe == "block" else values[5].isnan()
    quantizer = quantizer_of("block", FORMATS["E4M3"], way)
    quantizer.quantize(torch.full((3, 200), 3e38).bfloat16(), "none")
    assert quantizer.row.counters.tolist() == [0, 0, 0, 600]


@by_way
def test_the_smallest_of_a_block_that_vanish_are_counted_minus_zero_too(way):
    x = torch.zeros(2, 32)
    x[0, :4] = torch.tensor([448.0, 2.0**-11, -(2.0**-11), -0.0])
    quantizer = quantizer_of("mxfp8", FORMATS["E4M3"], way)
    values = quantizer.quantize(x.bfloat16(), "none").rows.values
    assert quantizer.row.counters.tolist() == [0, 2, 0, 64]
    assert torch.signbit(values[0, :4]).tolist() == [False, False, True, True]
