"""`parallelism: auto`, presets, and what is offered where a job doesn't fit."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.planning.estimate import Hardware, estimate
from orchestrator.planning.fitting import remedies
from orchestrator.planning.search import accepted, degrees_of, divisors, search
from orchestrator.spec.job import JobSpec, parse_spec, spec_yaml
from tests.unit.control_plane import ControlPlane
from tests.unit.plan_jobs import job, problems

AUTO = {"parallelism": "auto"}
LARGE = {"model": {"preset": "llama-8b"}, "training": {"seq_len": 4096}}


class TestAuto:
    def test_it_is_resolved_into_degrees_that_read_back(self):
        spec = job(**AUTO)
        assert spec.parallelism.data and spec.training.train_micro_batch_size_per_gpu
        assert parse_spec(spec_yaml(spec), "again", check_data=False) == spec

    def test_the_same_file_gives_the_same_degrees(self):
        assert job(**AUTO, **LARGE) == job(**AUTO, **LARGE)

    @given(
        nodes=st.sampled_from([1, 2, 3, 4]),
        slots=st.sampled_from([1, 2, 6, 8]),
        batch=st.sampled_from([24, 48, 96]),
        layers=st.sampled_from([2, 5, 8]),
        kv_heads=st.sampled_from([1, 2, 8]),
        recipe=st.sampled_from(["delayed", "block", "mxfp8"]),
        tied=st.booleans(),
    )
    @settings(max_examples=15, deadline=None)
    def test_it_never_comes_to_degrees_that_the_checks_refuse(
        self, nodes, slots, batch, layers, kv_heads, recipe, tied
    ):
        given = {
            "num_nodes": nodes,
            "gpus_per_node": slots,
            "model": {"num_layers": layers, "num_kv_heads": kv_heads, "tie_embeddings": tied},
            "fp8": {"recipe": recipe},
            "training": {"train_batch_size": batch},
        }
        if told := problems(**AUTO, **given):
            assert "auto found no degrees" in told[0]
            for tensor, pipeline in product(divisors(slots), range(1, layers + 1)):
                assert problems(**given, parallelism={"tensor": tensor, "pipeline": pipeline})
            return
        spec = job(**AUTO, **given)
        assert accepted(spec)
        best, tried = search(spec, Hardware.of(spec))
        assert all(accepted(choice.spec) for choice in best)
        assert best[0].spec == spec, "searched from the answer, it is the answer"
        assert degrees_of(spec) in [choice.degrees for choice in tried]
        assert spec.training.train_batch_size == batch

    def test_of_those_that_fit_it_is_the_fastest(self):
        spec = job(**AUTO, **LARGE)
        best, tried = search(spec, Hardware.of(spec), limit=3)
        fitting = [c for c in tried if c.estimate.fits and accepted(c.spec)]
        fastest = min(choice.estimate.step.total for choice in fitting)
        assert best[0].estimate.step.total == fastest
        assert estimate(spec, Hardware.of(spec)).fits

    def test_what_the_file_gives_of_micro_batches_and_recompute_stays(self):
        given = {"train_micro_batch_size_per_gpu": 2, "recompute": "full"}
        spec = job(**AUTO, training=given)
        assert spec.training.train_micro_batch_size_per_gpu == 2
        assert spec.training.recompute == "full"
        spec = job(**AUTO, training={"gradient_accumulation_steps": 4})
        assert spec.training.gradient_accumulation_steps == 4

    def test_a_controller_stores_what_it_came_to_before_a_node_is_taken(self, tmp_path):
        plane = ControlPlane(tmp_path, 4, 4)
        given = {"num_nodes": 2, "slots_per_node": 4, "training": {"train_batch_size": 32}}
        name = plane.submit(parallelism="auto", **given)
        spec = plane.store.job(name).spec
        assert degrees_of(spec) == degrees_of(search(spec, Hardware.of(spec))[0][0].spec)
        assert spec.parallelism.data and not plane.groups.held

    def test_on_cpu_too(self):
        spec = job(**AUTO, gpus_per_node=None, slots_per_node=4)
        assert spec.parallelism.data and accepted(spec)

    @pytest.mark.parametrize(
        ("given", "key", "says"),
        [
            ({"training": {"train_batch_size": None}}, "training.train_batch_size", "is needed"),
            ({"gpus_per_node": None}, "parallelism", "how many ranks a node has"),
            (
                {"training": {"train_batch_size": 7}, "model": {"num_layers": 1}},
                "parallelism",
                "auto found no degrees",
            ),
            ({"resources": {"min_nodes": 1}, "num_nodes": 7}, "parallelism", "min_nodes"),
            (
                {"model": {"preset": "llama-405b"}, "training": {"train_batch_size": 2}},
                "parallelism",
                "nothing that fits",
            ),
        ],
    )
    def test_what_it_cannot_do_is_told_at_its_key(self, given, key, says):
        [told] = problems(**AUTO, **given)
        assert f"{key}" in told and says in told

    def test_what_else_is_wrong_with_the_file_is_told_as_ever(self):
        told = problems(**AUTO, precison="fp8", model={"num_heads": 7}, training={"betas": [2, 3]})
        assert {line.split(": ")[1] for line in told} == {
            "precison",
            "model.num_heads",
            "model.num_kv_heads",
            "training.betas",
        }

    def test_a_typo_of_auto_is_no_auto(self):
        assert "must be a mapping" in problems(parallelism="autos")[0]


class TestPresets:
    def test_a_preset_is_written_out_and_keys_beside_it_win(self):
        model = job(**AUTO, model={"preset": "llama-8b", "num_layers": 4}).model
        assert (model.hidden_size, model.num_layers, model.num_kv_heads) == (4096, 4, 8)

    def test_an_unknown_one_is_refused_with_the_nearest_beside_other_problems(self):
        told = problems(model={"preset": "lama-8b"}, precison="fp8")
        assert len(told) == 2
        assert any("did you mean 'llama-8b'" in line and "llama-405b" in line for line in told)

    def test_a_mixture_of_experts_is_refused_with_where_its_estimate_is(self):
        [told] = problems(model={"preset": "moe-671b"})
        assert "mixture of experts" in told and "octavo plan --presets" in told

    def test_with_a_factory_it_means_nothing(self):
        [told] = problems(model={"preset": "llama-8b", "factory": "some.module:make"})
        assert "model.preset" in told


class TestHardware:
    def test_a_name_in_the_file_is_checked_and_must_be_of_the_jobs_kind(self):
        [told] = problems(resources={"device": "h1000"})
        assert "resources.device" in told and "did you mean 'h100'" in told
        [told] = problems(resources={"device": "cpu"})
        assert "name one of h100" in told
        assert job(resources={"device": "b200"}).resources.device == "b200"

    def test_another_device_may_come_to_other_degrees(self):
        given = {**AUTO, **LARGE, "num_nodes": 1, "snapshots": {"keep": 2}}
        small, large = (job(**given, resources={"device": d}) for d in ("h100", "b200"))
        assert estimate(large, Hardware.of(large)).fits
        assert degrees_of(small) != degrees_of(large)


class TestRemedies:
    def wide(self) -> JobSpec:
        return job(
            num_nodes=1,
            model={"preset": "llama-8b"},
            training={"seq_len": 8192, "train_micro_batch_size_per_gpu": 4},
            snapshots={"keep": 2},
        )

    def test_what_is_offered_fits_and_is_accepted(self):
        spec = self.wide()
        hardware = Hardware.of(spec)
        assert not estimate(spec, hardware).fits
        offered = remedies(spec, hardware)
        assert offered
        for remedy in offered:
            assert remedy.estimate.fits and remedy.changes

    def test_the_fewest_changes_come_first(self):
        spec = job(num_nodes=1, **LARGE, snapshots={"keep": 6, "replicas": 0})
        hardware = Hardware.of(spec)
        found = estimate(spec, hardware)
        assert not found.fits
        counts = {len(remedy.changes) for remedy in remedies(spec, hardware)}
        assert len(counts) == 1

    def test_where_a_few_changes_do_not_do_all_degrees_are_chosen_anew(self):
        spec = job(
            num_nodes=8,
            model={"preset": "llama-70b"},
            parallelism={"tensor": 4, "zero_stage": 0},
            training={"seq_len": 8192, "train_batch_size": 512},
            snapshots={"keep": 2},
        )
        hardware = Hardware.of(spec)
        [remedy] = remedies(spec, hardware)
        assert remedy.estimate.fits and len(remedy.changes) > 3
        assert str(remedy).count("parallelism.") >= 2 and " and " in str(remedy)

    def test_nothing_is_offered_that_changes_what_is_learned(self):
        told = " ".join(str(remedy) for remedy in remedies(self.wide(), Hardware.of(self.wide())))
        assert "train_batch_size" not in told and "precision" not in told and "model" not in told
