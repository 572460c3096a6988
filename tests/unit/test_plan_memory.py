"""What a plan says of shapes, memory and traffic: its parts, and what autograd really keeps."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from orchestrator.planning.activations import Widths, layer_bytes
from orchestrator.planning.devices import DEVICES, UnknownNameError, device_named, network_named
from orchestrator.planning.estimate import Hardware, estimate
from orchestrator.planning.memory import job_memory, rank_memory, snapshot_bytes
from orchestrator.planning.presets import EXPERTS, PRESETS
from orchestrator.planning.search import degrees_of, varied
from orchestrator.planning.shapes import held, shape_of, stages
from orchestrator.planning.traffic import traffic
from orchestrator.spec.job import JobSpec
from parallel import tensor
from parallel.config import FP8Config, ModelConfig
from parallel.model_plan import recomputed
from parallel.precision.scope import PrecisionScope
from parallel.transformer import layer_plans
from tests.unit.plan_jobs import job, jobs

MODEL = ModelConfig(
    vocab_size=96, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2, ffn_size=160
)


class TestShapes:
    @pytest.mark.parametrize("tied", [False, True])
    def test_parameters_are_those_of_the_model_that_is_built(self, tied):
        model = MODEL.model_copy(update={"tie_embeddings": tied})
        scope = PrecisionScope("bf16", FP8Config(), num_layers=3)
        plans = layer_plans(model, seq_len=8, seed=0, scope=scope)
        first = {plan.tied: i for i, plan in reversed(list(enumerate(plans))) if plan.tied}
        own = [plan for i, plan in enumerate(plans) if first.get(plan.tied, i) == i]
        count = sum(p.numel() for plan in own for p in plan.build().parameters())
        assert shape_of(model).parameters == count

    @pytest.mark.parametrize("pipeline", [1, 2, 3])
    @pytest.mark.parametrize("tied", [False, True])
    def test_stages_hold_every_layer_once_and_are_cut_as_the_engine_cuts(self, pipeline, tied):
        from parallel.topology import stage_boundaries

        model = MODEL.model_copy(update={"tie_embeddings": tied})
        scope = PrecisionScope("bf16", FP8Config(), num_layers=3)
        plans = layer_plans(model, seq_len=8, seed=0, scope=scope)
        cuts = stage_boundaries([p.cost for p in plans], [p.transformer for p in plans], pipeline)
        found = stages(model, 8, pipeline, 1)
        assert [stage.layers for stage in found] == [
            sum(p.transformer for p in plans[a:b]) for a, b in pairwise(cuts)
        ]
        assert [s.embedding for s in found] == [True] + [False] * (pipeline - 1)
        assert [s.head for s in found] == [False] * (pipeline - 1) + [True]
        whole = sum(held(shape_of(model), stage, 1).total for stage in found)
        twice = shape_of(model).table if tied and pipeline > 1 else 0
        assert whole == shape_of(model).parameters + twice

    def test_presets_have_the_parameters_of_their_names(self):
        named = {"llama-1b": 1.236e9, "llama-3b": 3.21e9, "llama-8b": 8.03e9, "llama-70b": 70.6e9}
        named |= {"llama-405b": 405.9e9, "llama2-7b": 6.74e9, "llama2-13b": 13.0e9}
        named |= {"llama2-70b": 69.0e9}
        assert {name: preset.parameters for name, preset in PRESETS.items()} == pytest.approx(
            named, rel=0.003
        )
        assert EXPERTS["moe-671b"].parameters == 671e9


class TestActivations:
    @pytest.mark.parametrize("precision", ["fp8", "bf16"])
    def test_a_layer_keeps_what_is_told_of_it(self, precision):
        sequences, seq_len = 2, 32
        scope = PrecisionScope(precision, FP8Config(recipe="current"), num_layers=3)
        layer = layer_plans(MODEL, seq_len=seq_len, seed=0, scope=scope)[1].build()
        own = {p.untyped_storage().data_ptr() for p in layer.parameters()}
        x = torch.randn(sequences, seq_len, MODEL.hidden_size).bfloat16().requires_grad_()
        layer(x.detach().requires_grad_())  # weights are quantized, tables made
        weights = sum(p.numel() for p in layer.parameters() if p.dim() == 2)
        kept: dict[int, int] = {}
        alive = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            alive.append(storage)  # so that no other takes its place
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(x)
        tables = 2 * seq_len * (MODEL.hidden_size // MODEL.num_heads // 2) * 4
        of_weights = 2 * weights if precision == "fp8" else 0
        measured = sum(kept.values()) - tables - of_weights
        told = layer_bytes(Widths.of(shape_of(MODEL), 1), fp8=precision == "fp8", on_gpu=False)
        assert measured == pytest.approx(told * sequences * seq_len, rel=0.01)


class TestMemory:
    @given(jobs())
    @settings(max_examples=30, deadline=None)
    def test_totals_are_the_sums_of_parts_that_are_not_negative(self, spec: JobSpec):
        found = estimate(spec, Hardware.of(spec), price=2.0)
        for parts, total in (
            *((rank.parts(), rank.total) for rank in found.memory.stages),
            (found.traffic.parts(), found.traffic.total),
            (found.step.parts(), found.step.total),
        ):
            assert total == pytest.approx(sum(parts.values())) and total >= 0
            assert all(part >= 0 for part in parts.values())
        assert found.device_bytes == max(rank.total for rank in found.memory.stages)
        assert found.cost == pytest.approx(2.0 * found.ranks * found.days * 24)
        assert 0 < found.mfu < 1

    @given(jobs())
    @settings(max_examples=30, deadline=None)
    def test_more_shards_never_take_more_of_what_they_share(self, spec: JobSpec):
        at = degrees_of(spec)
        worst = job_memory(spec).worst
        now = rank_memory(spec, worst)
        # With ZeRO 1 in place of 0, masters and moments are divided by the replicas.
        if at.zero_stage == 0:
            sharded = varied(spec, replace(at, zero_stage=1))
            assert sharded is not None and spec.parallelism.data
            after = rank_memory(sharded, worst)
            assert after.masters == now.masters // spec.parallelism.data
            assert after.total <= now.total
            assert snapshot_bytes(sharded, worst) <= snapshot_bytes(spec, worst)
        # Twice the tensor ranks, of as many replicas fewer.
        wider = varied(spec, replace(at, tensor=2 * at.tensor, zero_stage=min(at.zero_stage, 1)))
        cut = [
            stages(spec.model, 256, at.pipeline, tensor) for tensor in (at.tensor, 2 * at.tensor)
        ]
        # The head is shared by none, so that stages may be cut elsewhere.
        if wider is not None and at.zero_stage != 2 and cut[0] == cut[1]:
            after = rank_memory(wider, worst)
            assert after.weights <= now.weights and after.gradients <= now.gradients
            assert after.activations <= now.activations and after.fp8 <= now.fp8

    @given(jobs())
    @settings(max_examples=30, deadline=None)
    def test_recompute_and_smaller_micro_batches_never_take_more(self, spec: JobSpec):
        at = degrees_of(spec)
        plain, dropped = (varied(spec, replace(at, recompute=r)) for r in ("none", "full"))
        assert plain is not None and dropped is not None
        assert job_memory(dropped).stages[0].activations <= job_memory(plain).stages[0].activations
        smaller = varied(plain, replace(degrees_of(plain), micro=1))
        if smaller is not None:
            for stage in range(at.pipeline):
                # With one micro-batch a step no gradient in BF16 is there at its loss.
                less, more = rank_memory(smaller, stage), rank_memory(plain, stage)
                assert less.total <= more.total + more.weights

    def test_under_zero_1_every_rank_has_the_whole_gradient_as_deepspeed_does(self):
        spec = job(parallelism={"zero_stage": 1})
        of_stage = shape_of(spec.model).parameters
        assert rank_memory(spec, 0).gradients == 6 * of_stage
        assert rank_memory(spec, 0).moments == 8 * of_stage // 16

    def test_zero_2_divides_gradients_and_takes_buckets_for_it(self):
        spec = job(parallelism={"zero_stage": 2})
        assert rank_memory(spec, 0).gradients == 4 * shape_of(spec.model).parameters // 16
        assert rank_memory(spec, 0).working > 1e9, "DeepSpeed's bucket of 5e8 elements"
        smaller = {"zero_optimization": {"reduce_bucket_size": 1_000_000}}
        spec = job(parallelism={"zero_stage": 2}, deepspeed=smaller)
        assert rank_memory(spec, 0).working < 3e8

    def test_buckets_of_zero_2_are_gone_when_the_loss_needs_most(self):
        large: dict[str, Any] = {"model": {"vocab_size": 32_000}, "gpus_per_node": None}
        large["training"] = {"train_batch_size": 128, "train_micro_batch_size_per_gpu": 4}
        large["slots_per_node"] = 8
        whole, sharded = (
            rank_memory(job(**large, parallelism={"zero_stage": stage}), 0) for stage in (1, 2)
        )
        assert sharded.working == whole.working

    def test_logits_are_counted_without_their_values_in_bf16(self):
        spec = job(model={"vocab_size": 512_000}, training={"train_micro_batch_size_per_gpu": 2})
        assert rank_memory(spec, 0).working == 12 * 512_000 * 2 * 256

    def test_gradients_of_the_first_micro_batch_are_not_there_at_its_loss(self):
        given = {"model": {"vocab_size": 64_000}}
        one, two = (
            rank_memory(
                job(
                    **given,
                    training={
                        "train_batch_size": n * 16 * 4,
                        "train_micro_batch_size_per_gpu": 4,
                    },
                ),
                0,
            )
            for n in (1, 2)
        )
        assert one.working == two.working - one.weights

    def test_a_shared_matrix_costs_its_second_gradient_and_no_second_state(self):
        untied, tied = (
            rank_memory(
                job(model={"vocab_size": 64_000, "tie_embeddings": tied, "num_layers": 1}), 0
            )
            for tied in (False, True)
        )
        table = 64_000 * 512
        assert untied.state - tied.state == table * (2 + 12 // 16 + 6) + 12 * table // 16
        assert tied.working >= 6 * table - tied.activations

    def test_error_feedback_takes_four_bytes_a_matrix_weight_and_its_copy(self):
        off, on = (job(gradient_exchange={"error_feedback": wanted}) for wanted in (False, True))
        more = rank_memory(on, 0).error_feedback - rank_memory(off, 0).error_feedback
        shape = shape_of(on.model)
        assert more == 8 * (shape.parameters - shape.layers * shape.layer_vectors - shape.hidden)
        assert snapshot_bytes(on, 0) - snapshot_bytes(off, 0) == more // 2

    def test_a_node_holds_its_ring_its_keeper_and_its_partners_copies(self):
        spec = job(snapshots={"keep": 4, "replicas": 1})
        one = snapshot_bytes(spec, 0)
        assert job_memory(spec).host == 8 * one * ((4 + 1) + 4 + 1) + 8 * one * (4 + 1)
        alone = job(snapshots={"keep": 4, "replicas": 0})
        assert job_memory(alone).host == 8 * one * ((4 + 1) + 4 + 1)

    def test_nodes_between_stages_are_counted_as_every_node_is(self):
        from launch.replicas import RankState, memory_needed
        from parallel.topology import coordinates

        spec = job(num_nodes=4, parallelism={"pipeline": 4, "tensor": 4}, snapshots={"replicas": 2})
        degrees, memory = spec.parallelism, job_memory(spec)
        states = [
            RankState(rank // 8 * 8, memory.snapshots[coordinates(rank, degrees).pipe], 0)
            for rank in range(32)
        ]
        assert memory.host == max(memory_needed(states, n, 4, 2) for n in (0, 8, 16, 24))


class TestTraffic:
    def test_fp8_halves_what_bf16_sends_but_for_scales_and_norms(self):
        sent = {
            wire: traffic(job(communication_data_type=wire)).gradient_exchange
            for wire in ("fp8", "bf16", "fp32")
        }
        assert sent["fp8"] / sent["bf16"] == pytest.approx(129 / 256, rel=0.01)
        assert sent["fp32"] / sent["bf16"] == pytest.approx(2.0, rel=0.01)

    def test_under_zero_1_it_goes_half_the_way_and_parameters_come_back(self):
        whole = traffic(job(parallelism={"zero_stage": 0}))
        sharded = traffic(job(parallelism={"zero_stage": 1}))
        assert whole.gradient_exchange == pytest.approx(2 * sharded.gradient_exchange, rel=1e-6)
        assert whole.parameter_gather == 0 < sharded.parameter_gather

    def test_one_replica_exchanges_nothing_and_one_stage_passes_nothing_on(self):
        sent = traffic(job(num_nodes=1, gpus_per_node=1))
        assert sent.total == 0

    def test_zero_2_exchanges_in_every_micro_batch(self):
        micro = {"train_micro_batch_size_per_gpu": 1}
        once = traffic(job(parallelism={"zero_stage": 1}, training=micro))
        each = traffic(job(parallelism={"zero_stage": 2}, training=micro))
        assert each.gradient_exchange == 4 * once.gradient_exchange

    @pytest.mark.parametrize("precision", ["fp8", "bf16"])
    @pytest.mark.parametrize(("recompute", "sums"), [(False, 4), (True, 5)])
    def test_a_layer_sums_as_often_as_is_told(self, precision, recompute, sums, monkeypatch):
        counted: list[int] = []

        def summed(x: torch.Tensor, group: object) -> torch.Tensor:
            counted.append(x.numel())
            return x.clone()

        monkeypatch.setattr(tensor, "_summed", summed)
        nobody: Any = None
        shards = tensor.TensorGroup(nobody, 0, 1)
        scope = PrecisionScope(precision, FP8Config(recipe="current"), num_layers=3, tensor=shards)
        plan = layer_plans(MODEL, seq_len=8, seed=0, scope=scope, tensor=shards)[1]
        layer = (recomputed(plan, scope.checkpoint) if recompute else plan).build()
        x = torch.randn(2, 8, MODEL.hidden_size).bfloat16().requires_grad_()
        layer(x).sum().backward()
        assert counted == [x.numel()] * sums

    def test_tensor_ranks_sum_four_times_a_layer_and_five_with_recompute(self):
        both = [
            traffic(job(parallelism={"tensor": 2}, training={"recompute": word})).tensor
            for word in ("none", "full")
        ]
        spec = job(parallelism={"tensor": 2})
        tokens = 64 // 8 * 256
        assert both[0] == 2 * tokens * 512 * 2 * 4 * spec.model.num_layers // 2
        assert both[1] == both[0] * 5 // 4


class TestSpeed:
    @pytest.mark.parametrize(
        ("device", "fp8", "fast"),
        [
            ("h100", {"recipe": "delayed"}, True),
            ("h100", {"recipe": "mxfp8"}, False),
            ("b200", {"recipe": "mxfp8"}, True),
            ("a100", {"recipe": "delayed"}, False),
            ("h100", {"recipe": "delayed", "backend": "native"}, False),
        ],
    )
    def test_fp8_is_fast_where_transformer_engine_runs_the_recipe(self, device, fp8, fast):
        spec = job(fp8=fp8, resources={"device": device})
        same = job(precision="bf16", resources={"device": device})
        found, plain = (estimate(s, Hardware.of(s)) for s in (spec, same))
        assert found.fp8_speed is fast
        assert (found.step.products < plain.step.products) is fast


class TestNames:
    def test_an_unknown_name_is_refused_with_those_that_there_are(self):
        with pytest.raises(UnknownNameError, match=r"did you mean 'h100'\? there are h100, h200"):
            device_named("H-100")
        with pytest.raises(UnknownNameError, match="there are ib800, ib400"):
            network_named("token-ring")

    def test_every_device_says_where_its_numbers_are_from(self):
        assert {"h100", "h200", "b200", "a100", "l40s", "cpu"} <= set(DEVICES)
        assert all(device.source for device in DEVICES.values())
