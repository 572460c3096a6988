"""The exchange's Triton kernels, interpreted, against the plain path; and which casts are chosen.

Every comparison is for equal bits, of bytes, values and residuals. The interpreter runs the
kernels' integer arithmetic as a GPU does; that they compile for one is shown apart.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel.precision import exchange_casts, kernels
from parallel.precision.exchange_casts import BlockCodec, Casts, SharewiseCasts, choose
from parallel.precision.formats import E4M3, E5M2, FORMATS
from tests.unit.cast_cases import KINDS, compare, gradients, reference, rows_for, same_bits
from tests.unit.interpreted_triton import Interpreter, interpreter, needs_triton

by_format = pytest.mark.parametrize("format", ["E4M3", "E5M2"])
examples = settings(max_examples=30, deadline=None)
BLOCKS = st.sampled_from([16, 20, 33, 128])
VALUES = st.sampled_from(KINDS)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Interpreter]:
    with interpreter() as run:
        yield run


@needs_triton
class TestInterpreted:
    @by_format
    @examples
    @given(
        st.integers(0, 2**31), VALUES, BLOCKS, st.integers(1, 4), st.integers(1, 400), st.booleans()
    )
    def test_a_vector_is_packed_into_the_plain_bytes_and_residuals(
        self, interpreted, format, seed, kind, block, ranks, numel, feedback
    ):
        x = gradients(seed, numel, kind)
        # A share is whole blocks, so that the last rows may be short, or have nothing.
        rows = rows_for(ranks, -(-numel // ranks), block)
        residual = gradients(seed + 1, numel, "usual") if feedback else None
        error = torch.tensor([1.0, 2.0], dtype=torch.float64)
        arguments = ("pack", format, block, x, rows, error, residual)
        mine, plain = interpreted(*arguments), reference(*arguments)
        assert same_bits(mine[1], plain[1])
        torch.testing.assert_close(mine[2], plain[2], rtol=1e-5, atol=0)
        if feedback:
            assert same_bits(mine[3], plain[3]) and mine[3].isfinite().all()

    @by_format
    @examples
    @given(st.integers(0, 2**31), VALUES, BLOCKS, st.integers(2, 4), st.data())
    def test_parts_of_a_scattered_gradient_are_packed_without_the_ranks_own(
        self, interpreted, format, seed, kind, block, ranks, data
    ):
        part = data.draw(st.integers(1, 150), "part")
        skip = data.draw(st.integers(0, ranks - 1), "skip")
        x = gradients(seed, ranks * part, kind).view(ranks, part)
        residual = gradients(seed + 1, ranks * part, "usual").view(ranks, part)
        rows = rows_for(ranks, part, block)
        error = torch.zeros(2, dtype=torch.float64)
        arguments = ("pack", format, block, x, rows, error, residual, skip)
        mine, plain = interpreted(*arguments), reference(*arguments)
        assert same_bits(mine[1], plain[1]) and (mine[1][skip] == 77).all()
        assert same_bits(mine[3], plain[3]) and same_bits(mine[3][skip], residual[skip])
        torch.testing.assert_close(mine[2], plain[2], rtol=1e-5, atol=0)

    @by_format
    @examples
    @given(st.integers(0, 2**31), VALUES, BLOCKS, st.integers(2, 5), st.integers(1, 300))
    def test_the_mean_of_the_ranks_shares_ends_in_the_plain_bits(
        self, interpreted, format, seed, kind, block, ranks, numel
    ):
        shares = gradients(seed, ranks * numel, kind).view(ranks, numel)
        none = torch.zeros(2, dtype=torch.float64)
        received = rows_for(ranks, numel, block)
        received = reference("pack", format, block, shares, received, none)[1]
        sent = rows_for(1, numel, block)[0]
        arguments = ("mean", format, block, received, sent, torch.full((numel,), 5.0))
        mine, plain = interpreted(*arguments)[1], reference(*arguments)[1]
        assert same_bits(mine, plain)

    @by_format
    @examples
    @given(st.integers(0, 2**31), VALUES, BLOCKS, st.integers(1, 4), st.integers(1, 400))
    def test_what_was_gathered_comes_back_as_the_plain_values(
        self, interpreted, format, seed, kind, block, ranks, numel
    ):
        none = torch.zeros(2, dtype=torch.float64)
        rows = rows_for(ranks, -(-numel // ranks), block)
        rows = reference("pack", format, block, gradients(seed, numel, kind), rows, none)[1]
        arguments = ("unpack", format, block, rows, torch.full((numel,), 5.0))
        assert same_bits(interpreted(*arguments)[1], reference(*arguments)[1])

    @by_format
    @examples
    @given(st.integers(0, 2**31), VALUES, BLOCKS, st.integers(2, 4), st.integers(1, 300), st.data())
    def test_other_ranks_values_are_added_in_their_order(
        self, interpreted, format, seed, kind, block, ranks, numel, data
    ):
        skip = data.draw(st.integers(0, ranks - 1), "skip")
        rows = rows_for(ranks, numel, block)
        parts = gradients(seed, ranks * numel, kind).view(ranks, numel)
        none = torch.zeros(2, dtype=torch.float64)
        rows = reference("pack", format, block, parts, rows, none)[1]
        arguments = ("add", format, block, rows, gradients(seed + 9, numel, "usual"), skip)
        assert same_bits(interpreted(*arguments)[1], reference(*arguments)[1])

    @by_format
    def test_every_code_under_every_scale_comes_back_as_in_the_plain_path(
        self, interpreted, format
    ):
        codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
        row = torch.cat([codes.repeat(256), codes])
        arguments = ("unpack", format, 256, row[None], torch.zeros(2**16))
        assert same_bits(interpreted(*arguments)[1], reference(*arguments)[1])

    @by_format
    def test_halves_between_codes_go_to_the_even_one(self, interpreted, format):
        # Beside the format's maximum in a block nothing is scaled: every midpoint of two codes,
        # and the floats next to it, of both signs.
        greatest = FORMATS[format].max
        codes = torch.arange(128, dtype=torch.int32).to(torch.uint8)
        values = codes.view(FORMATS[format].dtype).float()
        values = values[values.isfinite()].sort().values
        middle = (values[1:] + values[:-1]) / 2
        near = torch.cat(
            [
                middle,
                middle.nextafter(torch.tensor(math.inf)),
                middle.nextafter(torch.tensor(0.0)),
                values,
            ]
        )
        near = torch.cat([near, -near])
        near = torch.nn.functional.pad(near, (0, -near.numel() % 15)).view(-1, 15)
        x = torch.nn.functional.pad(near, (1, 0), value=greatest)
        none = torch.zeros(2, dtype=torch.float64)
        arguments = ("pack", format, 16, x.flatten(), rows_for(1, x.numel(), 16), none)
        mine, plain = interpreted(*arguments), reference(*arguments)
        assert (mine[1][0, -len(x) :] == 127).all(), "the scale is 1"
        assert same_bits(mine[1], plain[1])

    @by_format
    def test_scales_round_up_at_every_power_of_two_and_next_to_it(self, interpreted, format):
        tops = FORMATS[format].max * 2.0 ** torch.arange(-160, 121).double()
        tops = tops[tops < torch.finfo(torch.float32).max].float()
        away, towards = torch.tensor(math.inf), torch.tensor(0.0)
        amax = torch.cat([tops, tops.nextafter(away), tops.nextafter(towards)])
        x = torch.nn.functional.pad(amax[:, None], (0, 15)).flatten()
        none = torch.zeros(2, dtype=torch.float64)
        arguments = ("pack", format, 16, x, rows_for(1, x.numel(), 16), none)
        assert same_bits(interpreted(*arguments)[1], reference(*arguments)[1])


@by_format
def test_the_casts_in_c_keep_the_plain_bits_of_every_hop(format):
    assert kernels.load() is not None, "the tests need a C compiler"

    def make(format: str, block: int) -> Casts:
        return choose(torch.device("cpu"), FORMATS[format], block)

    assert make(format, 128).name == "c"
    assert compare(make, format, "cpu") == 72


def test_a_comparison_tells_one_bit_that_differs():
    class OffByOne(SharewiseCasts):
        def unpack(self, rows: Tensor, out: Tensor) -> None:
            super().unpack(rows, out)
            out[-1] = out[-1].nextafter(torch.tensor(math.inf))

    with pytest.raises(AssertionError, match="unpack, E4M3, blocks of 128"):
        compare(lambda format, block: OffByOne(BlockCodec(E4M3, block, None)), "E4M3", "cpu")


@needs_triton
def test_the_kernels_compile_for_a_gpu_without_fusing_or_flushing_what_decides_a_bit(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from parallel.precision import exchange_triton

    casts = exchange_triton.TritonCasts(E4M3, 128)
    pointers = {
        **dict.fromkeys(("x", "residual", "out"), "*fp32"),
        **dict.fromkeys(("rows", "received", "sent"), "*u8"),
        "squares": "*fp64",
        "inverse": "fp32",
    }
    constants = {**casts._encoding, "FEEDBACK": True}
    for kernel in ("_pack", "_mean", "_unpack", "_add"):
        function = getattr(exchange_triton, kernel)
        names = function.arg_names
        source = ASTSource(
            fn=function,
            signature={
                name: "constexpr" if name in constants else pointers.get(name, "i32")
                for name in names
            },
            constexprs={name: constants[name] for name in names if name in constants},
        )
        target = GPUTarget("cuda", 90, 32)
        text = compile(source, target=target, options={"enable_fp_fusion": False}).asm["ptx"]
        assert "ld.global" in text and "st.global" in text
        assert "fma." not in text and "ftz" not in text and "div." not in text


class TestChoice:
    def test_on_a_cpu_they_are_in_c(self):
        assert kernels.load() is not None, "the tests need a C compiler"
        assert choose(torch.device("cpu"), E4M3, 128).name == "c"

    def test_without_a_compiler_they_are_plain(self, monkeypatch):
        monkeypatch.setattr(kernels, "load", lambda: None)
        assert choose(torch.device("cpu"), E4M3, 128).name == "plain"

    def test_plain_ones_can_be_had(self):
        for device in ("cpu", "cuda"):
            assert choose(torch.device(device), E5M2, 128, compiled=False).name == "plain"

    @needs_triton
    def test_on_cuda_they_are_in_triton(self):
        assert choose(torch.device("cuda"), E4M3, 128).name == "triton"

    def test_without_triton_they_are_plain_on_cuda_and_the_run_says_what_to_do(
        self, monkeypatch, caplog
    ):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        exchange_casts._say.cache_clear()
        with caplog.at_level(logging.INFO, "parallel.precision.exchange_casts"):
            for _ in range(2):
                assert choose(torch.device("cuda"), E4M3, 128).name == "plain"
        told = [record.getMessage() for record in caplog.records]
        assert told == [
            "FP8 gradient exchange on cuda, casts: plain "
            "(Triton is not installed: pip install 'octavo[triton]')"
        ]
