"""Which backend a device gets, and that every answer has its reason."""

from __future__ import annotations

import builtins
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel.config import FP8Config
from parallel.precision import detection, transformer_engine
from parallel.precision.choice import (
    RECIPES,
    BackendChoice,
    BackendRefusal,
    BackendRefusedError,
    DeviceFacts,
    TransformerEngineFacts,
    Workload,
    agreed,
    choose,
    forecast,
    recipes_on,
)
from parallel.precision.recipes import multiple_of

CPU = DeviceFacts("cpu")
THERE = TransformerEngineFacts("2.20.2")
ABSENT = TransformerEngineFacts()


def gpu(capability: tuple[int, int], cuda: tuple[int, int] = (13, 0)) -> DeviceFacts:
    return DeviceFacts("cuda", capability, cuda, "a GPU")


def decide(
    recipe: str,
    device: DeviceFacts,
    te: TransformerEngineFacts = THERE,
    *,
    backend: str = "auto",
    workload: Workload | None = None,
    **fields: Any,
) -> BackendChoice | BackendRefusal:
    return choose("fp8", FP8Config(recipe=recipe, backend=backend, **fields), device, te, workload)


class TestByDevice:
    @pytest.mark.parametrize(
        ("capability", "runs"),
        [
            ((7, 0), ()),
            ((8, 0), ()),
            ((8, 6), ()),
            ((8, 9), ("delayed", "current")),
            ((9, 0), ("delayed", "current", "block")),
            ((10, 0), RECIPES),
            ((10, 3), RECIPES),
            ((11, 0), RECIPES),
            ((12, 0), ("delayed", "current", "block")),
        ],
    )
    def test_recipes_of_a_capability(self, capability, runs):
        assert recipes_on(capability) == runs
        for recipe in RECIPES:
            decided = decide(recipe, gpu(capability))
            wanted = "transformer_engine" if recipe in runs else "native"
            assert isinstance(decided, BackendChoice) and decided.backend == wanted

    def test_ada_is_warned_of_and_hopper_is_not(self):
        assert "8.9" in decide("delayed", gpu((8, 9))).warning
        assert decide("delayed", gpu((9, 0))).warning == ""

    def test_cpu_is_native_with_the_reason(self):
        decided = decide("delayed", CPU)
        assert decided.backend == "native" and "CUDA device" in decided.reason

    def test_bf16_needs_no_backend_anywhere(self):
        for device in (CPU, gpu((10, 0))):
            decided = choose("bf16", FP8Config(), device, THERE)
            assert decided == BackendChoice("bf16", "the job's precision is bf16")

    def test_native_is_native_on_every_device(self):
        for device in (CPU, gpu((7, 0)), gpu((10, 0))):
            decided = decide("delayed", device, backend="native")
            assert decided.backend == "native" and "asked for" in decided.reason

    @pytest.mark.parametrize(
        ("recipe", "capability", "cuda", "wanted"),
        [
            ("block", (9, 0), (12, 8), "native"),
            ("block", (9, 0), (12, 9), "transformer_engine"),
            ("delayed", (8, 9), (12, 0), "native"),
            ("delayed", (9, 0), (12, 0), "transformer_engine"),
        ],
    )
    def test_cuda_must_be_new_enough(self, recipe, capability, cuda, wanted):
        decided = decide(recipe, gpu(capability, cuda))
        assert decided.backend == wanted
        assert wanted == "transformer_engine" or "CUDA 12." in decided.reason

    def test_block_with_fp32_scales_is_hoppers_alone(self):
        fields = {"use_f32_scales": True}
        assert decide("block", gpu((9, 0)), **fields).backend == "transformer_engine"
        decided = decide("block", gpu((10, 0)), **fields)
        assert decided.backend == "native" and "emulated by mxfp8" in decided.reason


class TestByTransformerEngine:
    @pytest.mark.parametrize(
        ("te", "says"),
        [
            (ABSENT, "not installed"),
            (TransformerEngineFacts(problem="libcublas.so.12: no such file"), "libcublas"),
            (TransformerEngineFacts("2.9.0"), "older than 2.20"),
            (TransformerEngineFacts("unknown"), "older than 2.20"),
            (TransformerEngineFacts("2.20.2", unsupported={"delayed": "driver too old"}), "driver"),
        ],
    )
    def test_what_stands_in_its_way_is_the_reason(self, te, says):
        decided = decide("delayed", gpu((9, 0)), te)
        assert decided.backend == "native" and says in decided.reason
        refused = decide("delayed", gpu((9, 0)), te, backend="transformer_engine")
        assert isinstance(refused, BackendRefusal)
        assert says in refused.reason and refused.remedy

    def test_what_it_says_of_one_recipe_is_not_said_of_another(self):
        te = TransformerEngineFacts("2.20.2", unsupported={"block": "CUDA"})
        assert decide("current", gpu((9, 0)), te).backend == "transformer_engine"

    def test_a_newer_release_is_warned_of(self):
        decided = decide("delayed", gpu((9, 0)), TransformerEngineFacts("2.21.0"))
        assert decided.backend == "transformer_engine" and "2.21.0" in decided.warning

    @pytest.mark.parametrize(
        ("recipe", "capability"), [("mxfp8", (9, 0)), ("block", (8, 9)), ("delayed", (8, 0))]
    )
    def test_asked_for_where_it_cannot_run_it_is_refused_with_what_can(self, recipe, capability):
        refused = decide(recipe, gpu(capability), backend="transformer_engine")
        assert isinstance(refused, BackendRefusal)
        for word in recipes_on(capability):
            assert word in refused.remedy

    @pytest.mark.parametrize(
        ("recipe", "workload", "says"),
        [
            ("delayed", Workload(widths=(64, 24)), "16 divides, not 24"),
            ("block", Workload(widths=(256, 48)), "32 divides, not 48"),
            ("mxfp8", Workload(tokens=48), "32 divides, not 48"),
            ("current", Workload(smooth=True), "smooth"),
        ],
    )
    def test_layers_that_it_cannot_run(self, recipe, workload, says):
        decided = decide(recipe, gpu((10, 0)), workload=workload)
        assert decided.backend == "native" and says in decided.reason

    def test_block_takes_narrower_widths_where_it_is_not_emulated(self):
        workload = Workload(widths=(48,), tokens=16)
        assert decide("block", gpu((9, 0)), workload=workload).backend == "transformer_engine"

    def test_ema_can_be_run_but_not_recomputed(self):
        fields = {"amax_compute_algo": "ema"}
        assert decide("delayed", gpu((9, 0)), **fields).backend == "transformer_engine"
        again = decide("delayed", gpu((9, 0)), workload=Workload(recompute=True), **fields)
        assert again.backend == "native" and "ema" in again.reason


capabilities = st.tuples(st.integers(5, 14), st.integers(0, 9))
devices = st.one_of(
    st.just(CPU),
    st.builds(gpu, capabilities, st.tuples(st.integers(11, 14), st.integers(0, 9))),
)
engines = st.builds(
    TransformerEngineFacts,
    st.sampled_from([None, "2.19.0", "2.20.2", "2.20.0.dev0", "3.1", "?"]),
    st.sampled_from(["", "no library"]),
    st.dictionaries(st.sampled_from(RECIPES), st.just("no")),
)
workloads = st.builds(
    Workload,
    st.lists(st.integers(1, 512), max_size=3).map(tuple),
    st.one_of(st.none(), st.integers(1, 512)),
    st.booleans(),
    st.booleans(),
)


class TestWhateverTheMachine:
    @given(st.sampled_from(RECIPES), devices, engines, workloads)
    def test_auto_always_chooses_and_always_says_why(self, recipe, device, te, workload):
        decided = decide(recipe, device, te, workload=workload)
        assert isinstance(decided, BackendChoice)
        assert decided.backend in ("transformer_engine", "native") and decided.reason

    @given(st.sampled_from(RECIPES), devices, engines, workloads)
    def test_asking_for_it_gives_what_auto_found_or_its_obstacle(
        self, recipe, device, te, workload
    ):
        auto = decide(recipe, device, te, workload=workload)
        asked = decide(recipe, device, te, workload=workload, backend="transformer_engine")
        if auto.backend == "transformer_engine":
            assert asked == auto
        else:
            assert isinstance(asked, BackendRefusal)
            assert asked.reason == auto.reason and asked.remedy

    @given(st.sampled_from(RECIPES), devices, engines, workloads)
    def test_it_is_only_chosen_where_it_runs(self, recipe, device, te, workload):
        decided = decide(recipe, device, te, workload=workload)
        if decided.backend == "transformer_engine":
            assert recipe in recipes_on(device.capability)
            assert te.version and not te.problem and recipe not in te.unsupported
            assert all(width % multiple_of(recipe) == 0 for width in workload.widths)


class TestRanksAgree:
    TE = BackendChoice("transformer_engine", "runs here")
    NATIVE = BackendChoice("native", "an old GPU")
    NO = BackendRefusal("an old GPU", "do")

    def test_on_what_all_found(self):
        assert agreed([self.TE, self.TE]) == self.TE

    def test_on_native_where_one_can_do_nothing_else_with_its_reason(self):
        for order in ([self.TE, self.NATIVE], [self.NATIVE, self.TE]):
            decided = agreed(order)
            assert decided.backend == "native" and "an old GPU" in decided.reason

    def test_on_a_refusal_where_one_refuses(self):
        assert agreed([self.TE, self.NO]) == self.NO


class TestForecast:
    def test_a_cpu_job_is_decided(self):
        told = forecast("fp8", FP8Config(), on_gpu=False)
        assert told == choose("fp8", FP8Config(), CPU, ABSENT)

    def test_a_cpu_job_that_asks_for_it_is_refused(self):
        config = FP8Config(backend="transformer_engine")
        with pytest.raises(BackendRefusedError, match="set gpus_per_node"):
            forecast("fp8", config, on_gpu=False)

    def test_a_gpu_job_is_told_on_what_it_depends(self):
        told = forecast("fp8", FP8Config(recipe="mxfp8"), on_gpu=True)
        assert told.backend == "undecided"
        assert "capability 10.x, 11.x;" in told.reason and "native elsewhere" in told.reason
        asked = FP8Config(recipe="delayed", backend="transformer_engine")
        assert "refused elsewhere" in forecast("fp8", asked, on_gpu=True).reason

    def test_native_and_bf16_are_decided_for_a_gpu_job_too(self):
        assert forecast("fp8", FP8Config(backend="native"), on_gpu=True).backend == "native"
        assert forecast("bf16", FP8Config(), on_gpu=True).backend == "bf16"


class TestDetection:
    def test_on_cpu_transformer_engine_is_not_even_looked_for(self, monkeypatch):
        monkeypatch.setattr(transformer_engine, "facts", lambda: pytest.fail("looked for"))
        assert detection.choose_here("fp8", FP8Config(), "cpu").backend == "native"

    def test_without_a_driver_a_cuda_device_is_no_device(self, monkeypatch):
        def raises(*args: object) -> None:
            raise RuntimeError("no NVIDIA driver")

        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", raises)
        assert detection.device_facts("cuda") == CPU

    def test_a_gpu_is_described(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
        monkeypatch.setattr(torch.version, "cuda", "12.9")
        assert detection.device_facts("cuda:1") == DeviceFacts("cuda", (9, 0), (12, 9), "H100")
        monkeypatch.setattr(transformer_engine, "facts", lambda: THERE)
        assert detection.choose_here("fp8", FP8Config(), "cuda").backend == "transformer_engine"
        monkeypatch.setattr(transformer_engine, "facts", lambda: ABSENT)
        refused = detection.choose_here("fp8", FP8Config(backend="transformer_engine"), "cuda")
        assert isinstance(refused, BackendRefusal) and "octavo[te]" in refused.remedy

    def test_absent_it_has_no_version(self):
        if transformer_engine.importlib.util.find_spec("transformer_engine") is not None:
            pytest.skip("Transformer Engine is installed here")
        assert transformer_engine.facts() == ABSENT

    @pytest.mark.parametrize(
        "error",
        [RuntimeError("Found empty metapackage"), OSError("libcudart.so.13"), ImportError("torch")],
    )
    def test_an_import_that_fails_is_a_reason_not_an_error(self, monkeypatch, error):
        real = builtins.__import__

        def fails(name: str, *args: Any, **kwargs: Any) -> Any:
            if name.startswith("transformer_engine"):
                raise error
            return real(name, *args, **kwargs)

        monkeypatch.setattr(transformer_engine.importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(builtins, "__import__", fails)
        facts = transformer_engine.facts()
        assert facts.version is None and str(error) in facts.problem

    def test_a_refusal_survives_pickling(self):
        error = BackendRefusedError(BackendRefusal("no", "do"))
        again = pickle.loads(pickle.dumps(error))
        assert (str(again), again.refusal) == (str(error), error.refusal)

    def test_the_decision_needs_no_torch(self):
        code = (
            "import sys, parallel.precision.choice, parallel.precision.backend;"
            "sys.exit('torch' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
