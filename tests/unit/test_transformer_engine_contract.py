"""The Transformer Engine adapter against the recorded signatures, on a stand-in without a GPU."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel.config import FP8Config, HighPrecisionLayers, ModelConfig
from parallel.precision import transformer_engine
from parallel.precision.backend import make_scope
from parallel.precision.choice import BackendChoice
from parallel.precision.scaling import averaged_amax
from parallel.precision.scope import STATISTICS_COLUMNS, PrecisionScope
from parallel.precision.transformer_engine_scope import TransformerEngineScope
from parallel.tensor import TensorGroup
from tests.unit.transformer_engine_layer import (
    FFN,
    HIDDEN,
    LINEARS,
    RECIPES,
    STAGE,
    Layer,
    assert_equal_states,
    inputs,
    scope_of,
    state_of,
    train_step,
)
from tests.unit.transformer_engine_stand_in import RECORDED


class TestEveryCallIsOneThatTheReleaseTakes:
    @pytest.mark.parametrize("recipe", RECIPES)
    def test_two_steps_of_two_micro_batches(self, te, recipe):
        scope = scope_of(RECIPES[recipe])
        layer = Layer(scope)
        for step in range(2):
            grads = train_step(scope, layer, step, micro_batches=2)
            assert all(torch.isfinite(g).all() and g.abs().max() > 0 for g in grads)
        ran = {(name, how) for _, name, how, _, _ in te.said("forward")}
        assert ran == {(name, "fp8") for name in LINEARS}

    @pytest.mark.parametrize(
        ("call", "wrong"),
        [
            ("Linear", {"in_features": 16, "out_features": 16, "use_bias": False}),
            ("Linear", {"in_features": 16, "bias": False}),
            ("LayerNormLinear", {"in_features": 16, "out_features": 16, "norm": "RMSNorm"}),
            ("autocast", {"enabled": True, "fp8_recipe": None}),
            ("autocast", {"enabled": True, "fp8_group": None}),
        ],
    )
    def test_the_stand_in_refuses_what_the_release_would(self, te, call, wrong):
        with pytest.raises(TypeError, match=call):
            getattr(te.pytorch, call)(**wrong)

    @pytest.mark.parametrize("recipe", RECORDED["recipes"])
    def test_the_stand_in_refuses_a_field_that_a_recipe_lacks(self, te, recipe):
        with pytest.raises(TypeError, match="power_of_two"):
            getattr(te.recipe, recipe)(power_of_two=True)

    def test_the_stand_in_has_no_other_names(self, te):
        with pytest.raises(AttributeError):
            te.pytorch.fp8_autocast  # noqa: B018

    def test_what_it_can_run_is_asked_by_the_names_of_the_release(self, te):
        facts = transformer_engine.facts()
        assert (facts.version, facts.problem, dict(facts.unsupported)) == ("2.20.2", "", {})


class TestRecipes:
    def test_defaults_are_the_recorded_ones(self):
        delayed, spec = RECORDED["recipes"]["DelayedScaling"], FP8Config(recipe="delayed")
        assert delayed["amax_history_len"] == str(spec.amax_history_len)
        assert delayed["margin"] == str(spec.margin)
        assert delayed["amax_compute_algo"] == repr(spec.amax_compute_algo)
        names = {
            "delayed": "DelayedScaling",
            "current": "Float8CurrentScaling",
            "block": "Float8BlockScaling",
            "mxfp8": "MXFP8BlockScaling",
        }
        for word, name in names.items():
            assert f".{FP8Config(recipe=word).format}:" in RECORDED["recipes"][name]["fp8_format"]
        block = RECORDED["recipes"]["Float8BlockScaling"]
        dims = tuple(block[f"{of}_block_scaling_dim"] for of in ("x", "w", "grad"))
        assert dims == ("1", "2", "1")
        assert block["use_f32_scales"] == str(FP8Config(recipe="block").use_f32_scales)

    def test_fields_reach_the_recipe(self, te):
        recipe = scope_of(
            FP8Config(recipe="delayed", margin=3, amax_history_len=7, format="E4M3")
        )._engine.recipe
        assert (recipe.margin, recipe.amax_history_len) == (3, 7)
        assert recipe.fp8_format is te.recipe.Format.E4M3
        assert (recipe.amax_compute_algo, recipe.reduce_amax) == ("max", True)

    @pytest.mark.parametrize(
        ("config", "power_of_two"),
        [
            (FP8Config(recipe="current"), False),
            (FP8Config(recipe="current", use_power_2_scales=True), True),
            (FP8Config(recipe="block"), True),
            (FP8Config(recipe="block", use_f32_scales=True), False),
        ],
    )
    def test_rounding_of_scales_reaches_every_quantizer(self, te, config, power_of_two):
        recipe = scope_of(config)._engine.recipe
        for operand in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
            assert getattr(recipe, operand).power_2_scale is power_of_two

    def test_ema_is_the_native_one_in_the_signature_of_the_release(self, te):
        history = torch.rand(4, 3)
        algorithm = scope_of(RECIPES["ema"])._engine.recipe.amax_compute_algo
        assert torch.equal(algorithm(history), averaged_amax(history, 0.9))


class TestAutocast:
    def test_one_enabled_region_a_micro_batch_with_the_stages_group(self, te):
        scope = scope_of(RECIPES["delayed"])
        layer = Layer(scope)
        scope.state_tensors()
        te.log.clear()
        train_step(scope, layer, 0, micro_batches=3)
        assert te.said("enter") == [("enter", True, STAGE, 0)] * 3
        assert te.said("update") == [("update", "forward"), ("update", "backward")] * 3

    def test_a_linear_in_bf16_is_a_disabled_region_inside_the_enabled_one(self, te):
        scope = scope_of(RECIPES["delayed"])
        layer = Layer(scope)
        scope.set_precision({LINEARS[1]: "bf16"})
        scope.state_tensors()
        te.log.clear()
        train_step(scope, layer, 0)
        events = [e[:2] for e in te.log if e[0] in ("enter", "exit", "forward", "update")]
        assert events == [
            ("enter", True),
            ("forward", LINEARS[0]),
            ("enter", False),
            ("forward", LINEARS[1]),
            ("exit", False),
            ("forward", LINEARS[2]),
            ("forward", LINEARS[3]),
            ("exit", True),
            ("update", "forward"),
            ("update", "backward"),
        ]
        ran = {name: how for _, name, how, _, _ in te.said("forward")}
        assert ran == {name: "bf16" if name == LINEARS[1] else "fp8" for name in LINEARS}
        assert all(entry[2] is STAGE for entry in te.said("enter"))

    def test_high_precision_layers_run_in_bf16_and_have_no_state(self, te):
        kept = HighPrecisionLayers(names=("layers.0.mlp.*",))
        scope = scope_of(RECIPES["delayed"].model_copy(update={"high_precision_layers": kept}))
        layer = Layer(scope)
        assert (scope.layers, scope.fixed_layers) == (LINEARS[:2], LINEARS[2:])
        train_step(scope, layer, 0)
        ran = {name: how for _, name, how, _, _ in te.said("forward")}
        assert [ran[name] for name in LINEARS] == ["fp8", "fp8", "bf16", "bf16"]
        assert {name.split("/")[0] for name in scope.state_tensors()} == set(LINEARS[:2])

    def test_a_forward_outside_a_micro_batch_is_an_error_not_bf16(self, te):
        layer = Layer(scope_of(RECIPES["current"]))
        with pytest.raises(RuntimeError, match="outside micro_batch"):
            layer(inputs(0, 0)[0])

    def test_micro_batches_do_not_nest(self, te):
        scope = scope_of(RECIPES["current"])
        Layer(scope)
        inner = scope.micro_batch()
        with scope.micro_batch(), pytest.raises(RuntimeError, match="inside"), inner:
            pass

    def test_state_is_laid_out_in_order_of_registration_before_anything_runs(self, te):
        scope = scope_of(RECIPES["delayed"])
        Layer(scope)
        scope.state_tensors()
        assert te.said("update") == []
        registered = [meta["scaling_fwd"].scale for meta in te.state.registered]
        mine = [t for name, t in scope.state_tensors().items() if name.endswith("forward.scale")]
        assert [t.data_ptr() for t in registered] == [t.data_ptr() for t in mine]

    def test_a_stage_of_one_rank_reduces_nothing_instead_of_over_all_ranks(self, te):
        alone = TransformerEngineScope("fp8", RECIPES["delayed"], num_layers=1, device="cpu")
        assert alone._engine.recipe.reduce_amax is False
        train_step(alone, Layer(alone), 0)
        assert te.said("enter")[-1][2] is None


class TestDelayedScaling:
    @pytest.mark.parametrize("recipe", ["delayed", "most_recent"])
    def test_one_micro_batch_a_step_gives_the_native_scopes_scales(self, te, recipe):
        config = RECIPES[recipe]
        scope = scope_of(config)
        layer = Layer(scope)
        native = PrecisionScope("fp8", config, num_layers=1, compiled=False)
        reference = Layer(native)
        # In BF16 the native layer computes what the stand-in does, and observes.
        native.set_precision(dict.fromkeys(LINEARS, "bf16"))
        for step in range(7):
            size = [1.0, 8.0, 0.125][step % 3]
            train_step(scope, layer, step, size=size)
            train_step(native, reference, step, size=size)
            state, wanted = scope.state_tensors(), native.state_tensors()
            for i, name in enumerate(LINEARS):
                slots = (
                    state[f"{name}/forward.scale"][:2],
                    state[f"{name}/backward.scale"][:1],
                )
                assert torch.equal(torch.cat(slots), wanted["scale"][3 * i : 3 * i + 3]), name

    def test_every_micro_batch_is_one_row_of_the_history(self, te):
        scope = scope_of(RECIPES["delayed"])
        layer = Layer(scope)
        train_step(scope, layer, 0, micro_batches=2)
        history = scope.state_tensors()[f"{LINEARS[1]}/forward.amax_history"]
        assert (history[:, 0] != 0).tolist() == [False, False, True, True]

    def test_a_linear_in_bf16_goes_on_feeding_its_histories_from_when_it_left(self, te):
        kept, switched = scope_of(RECIPES["delayed"]), scope_of(RECIPES["delayed"])
        layers = Layer(kept), Layer(switched)
        for step in range(6):
            if step == 1:
                switched.set_precision({LINEARS[0]: "bf16", LINEARS[3]: "bf16"})
                left = state_of(switched)
                assert not left[f"{LINEARS[3]}/forward.amax_history"].any()
                assert not left[f"{LINEARS[3]}/backward.amax_history"].any()
            train_step(kept, layers[0], step)
            train_step(switched, layers[1], step)
        before = state_of(switched)
        # Nothing is rounded in the stand-in, so both saw the same tensors, more often than the
        # history is long. The gradients of the linears that run before the first FP8 one reach
        # the history with the next update.
        for name, tensor in state_of(kept).items():
            if not name.startswith(f"{LINEARS[0]}/backward"):
                assert torch.equal(tensor, before[name]), name
        switched.set_precision(dict.fromkeys(LINEARS, "fp8"))
        te.log.clear()
        train_step(switched, layers[1], 6)
        first = next(e for e in te.said("forward") if e[1] == LINEARS[0])
        assert first[4][:2] == tuple(before[f"{LINEARS[0]}/forward.scale"][:2].tolist())
        assert first[4][0] != 1.0

    def test_a_linear_that_returns_has_room_for_its_weight_as_it_is_then(self, te):
        scope = scope_of(RECIPES["delayed"])
        layer = Layer(scope)
        train_step(scope, layer, 0)
        scope.set_precision({LINEARS[1]: "bf16"})
        train_step(scope, layer, 1)
        train_step(scope, layer, 2)
        with torch.no_grad():
            layer.out.weight.mul_(8)
        scope.set_precision({LINEARS[1]: "fp8"})
        scale = scope.state_tensors()[f"{LINEARS[1]}/forward.scale"][1]
        assert scale == torch.tensor(448.0) / layer.out.weight.abs().max().float()

    def test_a_return_waits_until_applied_steps_have_made_scales(self, te):
        scope = scope_of(RECIPES["delayed"])
        layer = Layer(scope)
        train_step(scope, layer, 0)
        train_step(scope, layer, 1)
        before = state_of(scope)
        scope.set_precision(dict.fromkeys(LINEARS[:2], "bf16"))
        scope.set_precision(dict.fromkeys(LINEARS[:2], "fp8"))
        seen = []
        for step, applied in enumerate((False, True, False, True)):
            seen.append([scope.precision()[name] for name in LINEARS[:3]])
            train_step(scope, layer, step, applied=applied, size=100.0, grad_size=100.0)
        assert seen == [["bf16", "bf16", "fp8"]] * 4
        assert set(scope.precision().values()) == {"fp8"}
        after = state_of(scope)
        for name in LINEARS[:2]:
            grown = before[f"{name}/backward.scale"][0] / after[f"{name}/backward.scale"][0]
            assert 20 < grown < 500

    def test_a_return_that_waits_is_in_the_state(self, te):
        scope = scope_of(RECIPES["delayed"])
        layer = Layer(scope)
        scope.set_precision({LINEARS[1]: "bf16"})
        scope.set_precision({LINEARS[1]: "fp8"})
        meta = json.loads(json.dumps(scope.state_meta()))
        other = scope_of(RECIPES["delayed"])
        layer = Layer(other)
        other.load_meta(meta)
        assert other.precision()[LINEARS[1]] == "bf16"
        train_step(other, layer, 0), train_step(other, layer, 1)
        assert other.precision()[LINEARS[1]] == "fp8"

    def test_a_step_that_is_not_applied_leaves_scales_and_histories_as_before(self, te):
        scope = scope_of(RECIPES["delayed"])
        layer = Layer(scope)
        for step in range(3):
            train_step(scope, layer, step)
        before = state_of(scope)
        scope.statistics()
        train_step(scope, layer, 3, micro_batches=2, grad_size=float("inf"), applied=False)
        assert_equal_states(state_of(scope), before)
        names, table = scope.statistics()
        column = STATISTICS_COLUMNS.index("amax")
        assert torch.isposinf(table[names.index(f"{LINEARS[3]}/grad_output"), column])
        train_step(scope, layer, 4)
        name = f"{LINEARS[3]}/backward.amax_history"
        assert not torch.equal(scope.state_tensors()[name], before[name])

    def test_state_copied_out_and_back_in_place_replays_the_same(self, te):
        scope = scope_of(RECIPES["delayed"])
        layer = Layer(scope)
        for step in range(2):
            train_step(scope, layer, step)
        scope.set_precision({LINEARS[2]: "bf16"})
        live, meta = scope.state_tensors(), scope.state_meta()
        saved = state_of(scope)
        runs = []
        for _ in range(2):
            te.log.clear()
            for step in (2, 3):
                train_step(scope, layer, step, micro_batches=2)
            runs.append((te.said("forward"), state_of(scope)))
            for name, tensor in saved.items():
                live[name].copy_(tensor)
            scope._linears[LINEARS[2]].current = "fp8"
            scope.load_meta(meta)
            assert_equal_states(state_of(scope), saved)
        assert runs[0][0] == runs[1][0]
        assert_equal_states(runs[0][1], runs[1][1])

    def test_no_state_is_a_pickle(self, te):
        scope = scope_of(RECIPES["delayed"])
        layer = Layer(scope)
        train_step(scope, layer, 0)
        assert all(type(t) is Tensor for t in scope.state_tensors().values())
        assert not any("extra_state" in name for name in layer.state_dict())


class TestModules:
    def test_parameters_have_the_native_names_shapes_and_order(self, te):
        layers = [
            Layer(scope_of(RECIPES["current"])),
            Layer(PrecisionScope("fp8", RECIPES["current"], num_layers=1)),
        ]
        here, native = ([(n, p.shape) for n, p in layer.named_parameters()] for layer in layers)
        assert here == native
        for (name, a), (_, b) in zip(
            layers[0].named_parameters(), layers[1].named_parameters(), strict=True
        ):
            assert torch.equal(a, b), name

    def test_the_whole_model_starts_from_the_native_weights(self, te):
        from parallel.transformer import layer_plans

        model = ModelConfig(hidden_size=64, num_layers=2, num_heads=2, ffn_size=128)
        config = FP8Config(recipe="delayed")
        scopes = [
            TransformerEngineScope("fp8", config, num_layers=2, device="cpu", stage=STAGE),
            PrecisionScope("fp8", config, num_layers=2),
        ]
        models = [
            nn.Sequential(*(p.build() for p in layer_plans(model, seq_len=8, seed=3, scope=scope)))
            for scope in scopes
        ]
        here, native = (dict(m.named_parameters()) for m in models)
        assert here.keys() == native.keys()
        assert all(torch.equal(p, native[name]) for name, p in here.items())

    def test_shards_are_transformer_engines_and_known_to_deepspeed(self, te):
        group: Any = object()
        scope = scope_of(RECIPES["current"], tensor=TensorGroup(group, index=1, size=2))
        column = scope.norm_linear(LINEARS[0], HIDDEN, 64, eps=1e-5, shard="column")
        row = scope.linear(LINEARS[1], 64, HIDDEN, shard="row")
        whole = scope.linear(LINEARS[2], 64, HIDDEN)
        assert column.weight.shape == (32, HIDDEN)
        assert row.weight.shape == (HIDDEN, 32)
        assert whole.weight.shape == (HIDDEN, 64)
        made = [given for kind in ("LayerNormLinear", "Linear") for _, given in te.said(kind)]
        assert [(g["parallel_mode"], g["tp_group"], g["tp_size"]) for g in made] == [
            ("column", group, 2),
            ("row", group, 2),
            (None, None, 1),
        ]
        assert not any(g["fuse_wgrad_accumulation"] or g["bias"] for g in made)
        marked = {name for name, p in column.named_parameters() if hasattr(p, "model_parallel")}
        assert marked == {"linear.weight"}
        assert row.weight.model_parallel and not hasattr(whole.weight, "model_parallel")

    @pytest.mark.parametrize(
        ("recipe", "width", "says"),
        [("delayed", 24, "16"), ("block", 24, "16"), ("mxfp8", 48, "32")],
    )
    def test_widths_that_cannot_be_quantized_are_refused_where_they_are_made(
        self, te, recipe, width, says
    ):
        scope = scope_of(RECIPES[recipe])
        with pytest.raises(ValueError, match=f"attn.out.*{says} divides, not {width}"):
            scope.linear(LINEARS[1], width, HIDDEN)

    def test_tokens_that_cannot_be_quantized_are_refused_in_the_forward(self, te):
        scope = scope_of(RECIPES["mxfp8"])
        linear = scope.linear(LINEARS[1], HIDDEN, HIDDEN)
        with scope.micro_batch(), pytest.raises(ValueError, match=r"tokens.*not 48"):
            linear(torch.zeros(48, HIDDEN, dtype=torch.bfloat16))

    def test_smooth_swiglu_is_refused(self, te):
        with pytest.raises(ValueError, match=r"smooth.*backend: native"):
            scope_of(RECIPES["current"]).norm_mlp(
                "layers.0.mlp", HIDDEN, FFN, eps=1e-5, smooth=True, sharded=False
            )

    def test_a_linear_says_what_it_computes_in(self, te):
        scope = scope_of(RECIPES["block"])
        layer = Layer(scope)
        scope.set_precision({LINEARS[3]: "bf16"})
        shown = repr(layer)
        assert f"{LINEARS[2]}, block E4M3" in shown
        assert f"{LINEARS[3]}, bf16" in shown


class TestOrders:
    @pytest.mark.parametrize(
        ("order", "message"),
        [
            ({"layers.0.mlp.dwon": "bf16"}, "did you mean 'layers.0.mlp.down'"),
            ({LINEARS[0]: "fp16"}, "expected 'fp8' or 'bf16'"),
        ],
    )
    def test_an_unknown_name_or_word_changes_nothing(self, te, order, message):
        scope = scope_of(RECIPES["current"])
        Layer(scope)
        with pytest.raises(ValueError, match=message):
            scope.set_precision({LINEARS[1]: "bf16", **order})
        assert set(scope.precision().values()) == {"fp8"}

    def test_state_of_other_linears_is_refused(self, te):
        scope = scope_of(RECIPES["current"])
        Layer(scope)
        with pytest.raises(ValueError, match="other linears"):
            scope.load_meta({"precision": {LINEARS[0]: "fp8"}})

    def test_a_name_given_twice_and_a_late_one_are_refused(self, te):
        scope = scope_of(RECIPES["current"])
        layer = Layer(scope)
        with pytest.raises(ValueError, match="registered already"):
            scope.linear(LINEARS[0], HIDDEN, HIDDEN)
        train_step(scope, layer, 0)
        with pytest.raises(ValueError, match="laid out"):
            scope.linear("layers.1.attn.out", HIDDEN, HIDDEN)

    def test_the_factory_makes_it_where_it_was_chosen(self, te):
        choice = BackendChoice("transformer_engine", "a test")
        made = make_scope(
            choice, "fp8", RECIPES["current"], num_layers=1, device="cpu", stage=STAGE
        )
        assert isinstance(made, TransformerEngineScope)
        native = make_scope(
            BackendChoice("native", "a test"), "fp8", RECIPES["current"], num_layers=1, device="cpu"
        )
        assert isinstance(native, PrecisionScope)
        with pytest.raises(ValueError, match="no backend is chosen"):
            forecast = BackendChoice("undecided", "a test")
            make_scope(forecast, "fp8", RECIPES["current"], num_layers=1, device="cpu")

    def test_absent_it_is_an_error_with_its_name(self, monkeypatch):
        monkeypatch.setitem(__import__("sys").modules, "transformer_engine", None)
        with pytest.raises(ValueError, match="can't be imported"):
            scope_of(RECIPES["current"])
