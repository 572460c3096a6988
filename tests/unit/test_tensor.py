"""Shards of matrices: together they are the whole, and one process can tell without any group."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from parallel.config import FP8Config, HighPrecisionLayers, ModelConfig
from parallel.precision.scope import PrecisionScope
from parallel.tensor import ShardKind, TensorGroup, is_sharded, slice_weight
from parallel.transformer import layer_plans

MODEL = ModelConfig(
    vocab_size=48, hidden_size=64, num_layers=1, num_heads=4, num_kv_heads=2, ffn_size=96
)
NO_GROUP = cast(dist.ProcessGroup, None)
"""Building and slicing need none."""


def layer(index: int = 0, size: int = 1) -> Any:
    tensor = TensorGroup(NO_GROUP, index, size) if size > 1 else None
    scope = PrecisionScope("bf16", FP8Config(), num_layers=1, tensor=tensor)
    return layer_plans(MODEL, seq_len=8, seed=3, scope=scope, tensor=tensor)[1].build()


class TestSliceWeight:
    @given(st.sampled_from([1, 2, 3, 4]), st.lists(st.integers(1, 3), max_size=3))
    def test_every_section_comes_back_from_its_parts(self, size: int, units: list[int]) -> None:
        sections = tuple(size * unit for unit in units) or (2 * size,)
        whole = torch.arange(sum(sections) * 5.0).view(-1, 5)
        parts = [slice_weight(whole, "column", i, size, sections) for i in range(size)]
        cut = [part.split(tuple(s // size for s in sections)) for part in parts]
        again = torch.cat([part[n] for n in range(len(sections)) for part in cut])
        assert torch.equal(again, whole)

    @given(st.sampled_from([1, 2, 4]))
    def test_rows_come_back_side_by_side(self, size: int) -> None:
        whole = torch.arange(24.0).view(3, 8)
        parts = [slice_weight(whole, "row", i, size) for i in range(size)]
        assert torch.equal(torch.cat(parts, 1), whole)
        assert all(part.is_contiguous() for part in parts)


class TestShardsOfALayer:
    def test_are_the_heads_and_channels_of_the_whole(self) -> None:
        whole, (a, b) = layer(), (layer(i, 2) for i in range(2))
        q, k, v = whole.attn.qkv.weight.split((64, 32, 32))
        for shard, half in ((a, 0), (b, 1)):
            expected = [x.chunk(2)[half] for x in (q, k, v)]
            assert torch.equal(shard.attn.qkv.weight, torch.cat(expected))
            assert torch.equal(shard.attn.out.weight, whole.attn.out.weight.chunk(2, 1)[half])
            gate, up = whole.mlp.gate_up.weight.chunk(2)
            expected = [gate.chunk(2)[half], up.chunk(2)[half]]
            assert torch.equal(shard.mlp.gate_up.weight, torch.cat(expected))
            assert torch.equal(shard.mlp.down.weight, whole.mlp.down.weight.chunk(2, 1)[half])

    def test_only_matrices_are_marked_as_sharded(self) -> None:
        marked = {name for name, p in layer(0, 2).named_parameters() if is_sharded(p)}
        assert marked == {
            "attn.qkv.linear.weight",
            "attn.out.weight",
            "mlp.gate_up.weight",
            "mlp.down.weight",
        }
        assert not any(is_sharded(p) for p in layer().parameters())

    def test_sum_to_the_whole_layers_function(self) -> None:
        """Forward and backward, the sums over ranks taken here."""
        x = torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        whole, shards = layer(), [layer(i, 2) for i in range(2)]
        for shard in shards:  # each part alone: nothing to exchange with
            for module in shard.modules():
                if getattr(module, "shard", None) is not None:
                    module.shard = None
        for part, parts in (
            (whole.attn, [shard.attn for shard in shards]),
            (whole.mlp, [shard.mlp for shard in shards]),
        ):
            outputs, gradients = [], []
            for modules in ([part], parts):
                own = x.clone().requires_grad_()
                total = sum((module(own) for module in modules), torch.zeros_like(x))
                total.backward(torch.ones_like(total) * torch.linspace(-1, 1, 64).bfloat16())
                outputs.append(total.detach().double())
                gradients.append(cast(Tensor, own.grad).double())
            for alone, together in (outputs, gradients):
                assert float((alone - together).norm() / alone.norm()) < 0.01

    def test_features_that_do_not_divide_are_refused_by_name(self) -> None:
        tensor = TensorGroup(NO_GROUP, 0, 3)
        scope = PrecisionScope("bf16", FP8Config(), num_layers=1, tensor=tensor)
        with pytest.raises(ValueError, match=r"'layers.0.mlp.down': 64 inputs over 3"):
            scope.linear("layers.0.mlp.down", 64, 48, shard="row")
        made = scope.linear("layers.0.attn.out", 64, 64)
        assert isinstance(made, nn.Linear)
        assert made.weight.shape == (64, 64)


class TestWholeMatrices:
    """Initial weights of linears that a scope makes, over as many tensor ranks as there are."""

    QKV = (64, 32, 32)

    def made(self, shards: int, index: int, draw: bool) -> dict[str, nn.Parameter]:
        tensor = None if shards == 1 else TensorGroup(NO_GROUP, index, shards)
        kept = HighPrecisionLayers(names=("layers.0.kept",))
        fp8 = FP8Config(high_precision_layers=kept)
        scope = PrecisionScope("fp8", fp8, num_layers=1, tensor=tensor, built_in=False)
        torch.manual_seed(3)
        with scope.whole_matrices() as whole:
            assert whole
            layers = {
                "column": scope.linear("layers.0.column", 64, 192, shard="column"),
                "qkv": scope.norm_linear(
                    "layers.0.qkv", 64, 128, eps=1e-5, shard="column", sections=self.QKV
                ),
                "row": scope.linear("layers.0.row", 192, 64, shard="row"),
                "kept": scope.linear("layers.0.kept", 192, 64, shard="row"),
                "mlp": scope.norm_mlp("layers.0.mlp", 64, 192, eps=1e-5, sharded=True),
                "all": scope.linear("layers.0.all", 64, 64),
            }
            if draw:
                nn.init.orthogonal_(weight := layers["row"].weight.float())
                with torch.no_grad():
                    layers["row"].weight.copy_(weight)
                    layers["qkv"].linear.weight.normal_(0, 0.05)
        return {
            f"{name}.{key}": parameter
            for name, module in layers.items()
            for key, parameter in module.named_parameters()
        }

    @pytest.mark.parametrize("draw", [False, True], ids=["as made", "drawn anew"])
    @pytest.mark.parametrize("shards", [2, 4])
    def test_are_cut_from_the_bits_of_one_rank(self, shards: int, draw: bool) -> None:
        alone = self.made(1, 0, draw)
        parts = [self.made(shards, index, draw) for index in range(shards)]
        cuts: dict[str, tuple[ShardKind, tuple[int, ...]]] = {
            "column.weight": ("column", ()),
            "qkv.linear.weight": ("column", self.QKV),
            "row.weight": ("row", ()),
            "kept.weight": ("row", ()),
            "mlp.gate_up.weight": ("column", (192, 192)),
            "mlp.down.weight": ("row", ()),
        }
        for name, whole in alone.items():
            for index, part in enumerate(parts):
                assert is_sharded(part[name]) == (name in cuts)
                wanted = whole
                if name in cuts:
                    kind, sections = cuts[name]
                    wanted = slice_weight(whole, kind, index, shards, sections)
                assert torch.equal(part[name], wanted), name

    def test_a_weight_that_is_no_whole_matrix_any_more_and_sections_that_do_not_fit_are_told(
        self,
    ) -> None:
        tensor = TensorGroup(NO_GROUP, 0, 2)
        scope = PrecisionScope("fp8", FP8Config(), num_layers=1, tensor=tensor, built_in=False)
        with (
            pytest.raises(ValueError, match=r"'a'.*shape \[32, 64\].*set the whole matrix"),
            scope.whole_matrices(),
        ):
            scope.linear("a", 64, 64, shard="column").weight = nn.Parameter(torch.zeros(32, 64))
        with (
            pytest.raises(ValueError, match=r"'b': sections \[63, 1\] over 2 tensor ranks"),
            scope.whole_matrices(),
        ):
            scope.linear("b", 64, 64, shard="column", sections=(63, 1))
        with pytest.raises(ValueError, match=r"'c': sections \[32\] of 64 outputs"):
            scope.linear("c", 64, 64, sections=(32,))
        assert scope.linear("d", 64, 64, shard="column").weight.shape == (32, 64)
