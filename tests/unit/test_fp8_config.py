"""The spec's ``fp8`` section: each recipe's own fields, defaults as Transformer Engine's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from orchestrator.spec.job import JobSpec
from parallel.config import RECIPE_FIELDS, FP8Config, HighPrecisionLayers
from parallel.fp8_fields_elsewhere import (
    FIELDS_NOT_OFFERED,
    KEY_ALIASES,
    RECIPE_ALIASES,
    RECIPES_NOT_OFFERED,
)
from parallel.precision import recipes

SIGNATURES = Path(__file__).with_name("data") / "transformer_engine-2.20.2.json"
"""Names and defaults of the real package, as recorded."""

RECIPES = tuple(RECIPE_FIELDS)
OTHER_VALUES = {
    "margin": 1,
    "amax_history_len": 8,
    "amax_compute_algo": "most_recent",
    "amax_ema_factor": 0.5,
    "use_power_2_scales": True,
    "use_f32_scales": True,
}


@pytest.mark.parametrize(
    ("recipe", "format", "fields"),
    [
        ("delayed", "HYBRID", {"margin": 0, "amax_history_len": 1024, "amax_compute_algo": "max"}),
        ("current", "HYBRID", {"use_power_2_scales": False}),
        ("block", "E4M3", {"use_f32_scales": False}),
        ("mxfp8", "E4M3", {}),
    ],
)
def test_defaults_are_transformer_engines_and_other_recipes_fields_are_unset(
    recipe, format, fields
):
    config = FP8Config(recipe=recipe)
    assert config.format == format
    assert {name: getattr(config, name) for name in OTHER_VALUES} == {
        **dict.fromkeys(OTHER_VALUES),
        **fields,
    }


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", OTHER_VALUES)
def test_a_field_of_another_recipe_is_an_error_that_names_it(recipe, name):
    section = {"recipe": recipe, name: OTHER_VALUES[name]}
    if name == "amax_ema_factor" and recipe == "delayed":
        section["amax_compute_algo"] = "ema"
    if name in RECIPE_FIELDS[recipe]:
        assert getattr(FP8Config(**section), name) == OTHER_VALUES[name]
        return
    with pytest.raises(ValidationError, match=rf"belongs to recipe \w+.*under {recipe}") as caught:
        FP8Config(**section)
    assert [error["loc"] for error in caught.value.errors()] == [(name,)]


def test_the_factor_of_ema_is_refused_without_ema_and_has_a_default_with_it():
    with pytest.raises(ValidationError, match="belongs to amax_compute_algo: ema"):
        FP8Config(amax_ema_factor=0.5)
    assert FP8Config(amax_compute_algo="ema").amax_ema_factor == 0.9


def test_a_history_that_no_rank_has_memory_for_is_refused():
    # It would be every rank's first allocation, after the nodes were taken.
    with pytest.raises(ValidationError, match="less than or equal to 65536"):
        FP8Config(amax_history_len=1_000_000_000)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_printed_of_a_section_is_accepted_as_one(recipe):
    config = FP8Config(recipe=recipe)
    assert FP8Config(**config.model_dump()) == config


@pytest.mark.parametrize(
    ("alias", "recipe"),
    [
        ("tensorwise", "current"),
        ("blockwise", "block"),
        ("DelayedScaling", "delayed"),
        ("Float8CurrentScaling", "current"),
        ("Float8BlockScaling", "block"),
        ("MXFP8BlockScaling", "mxfp8"),
    ],
)
def test_other_systems_words_for_recipes_are_understood(alias, recipe):
    assert FP8Config(recipe=alias) == FP8Config(recipe=recipe)


def test_pure_e5m2_is_refused_with_the_remedy_and_an_unknown_recipe_alone():
    with pytest.raises(ValidationError, match="HYBRID has E5M2"):
        FP8Config(format="E5M2")
    with pytest.raises(ValidationError) as caught:
        FP8Config(recipe="delyed", margin=3)
    assert [error["loc"] for error in caught.value.errors()] == [("recipe",)]


def test_recipes_expand_to_formats_by_role():
    hybrid, e4m3 = (recipes.expand(FP8Config(format=f)) for f in ("HYBRID", "E4M3"))
    assert [hybrid.format_of(role) for role in recipes.ROLES] == ["E4M3", "E4M3", "E5M2"]
    assert [e4m3.format_of(role) for role in recipes.ROLES] == ["E4M3", "E4M3", "E4M3"]


def test_power_of_two_scales_are_blocks_default_and_an_option_of_current():
    def power_of_two(**section: object) -> bool:
        return recipes.expand(FP8Config(**section)).power_of_two

    assert power_of_two(recipe="block")
    assert not power_of_two(recipe="block", use_f32_scales=True)
    assert not power_of_two(recipe="current")
    assert power_of_two(recipe="current", use_power_2_scales=True)


@pytest.mark.parametrize("num_layers", [0, 3, 5])
def test_which_layers_stay_in_bf16_is_counted_from_both_ends_and_from_none_without(num_layers):
    def kept(**section: object) -> list[int]:
        config = HighPrecisionLayers.model_validate(section)
        return [
            i
            for i in range(num_layers)
            if recipes.is_high_precision(f"layers.{i}.mlp.down", config, num_layers)
        ]

    every = list(range(num_layers))
    assert kept() == []
    assert kept(first=1) == every[:1]
    assert kept(last=2) == every[-2:]
    assert kept(first=1, last=1) == sorted({*every[:1], *every[-1:]})
    assert not recipes.is_high_precision("layers.9.mlp.down", HighPrecisionLayers(), num_layers)


class TestDimensions:
    @pytest.mark.parametrize("recipe", RECIPES)
    def test_multiples_of_32_fit_every_recipe(self, recipe):
        assert recipes.dimension_problems(recipe, 96, 4096) == []

    @pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
    def test_a_multiple_of_16_is_enough_where_blocks_are_padded(self, recipe):
        assert recipes.dimension_problems(recipe, 48, 144) == []

    def test_mxfp8_takes_no_broken_block(self):
        ((message, remedy),) = recipes.dimension_problems("mxfp8", 48, 64)
        assert message == "48 inputs are no multiple of 32, which mxfp8 needs"
        assert remedy == "make them 32 or 64, or keep the linear in BF16"

    def test_both_sides_are_told_and_nothing_is_made_zero(self):
        problems = recipes.dimension_problems("current", 24, 8)
        assert [message.split(" are ")[0] for message, _ in problems] == ["24 inputs", "8 outputs"]
        assert problems[1][1].startswith("make them 16,")


def test_keys_and_words_of_other_trainers_are_taken() -> None:
    theirs = FP8Config.model_validate({"fp8_recipe": "blockwise", "fp8_format": "hybrid"})
    assert (theirs.recipe, theirs.format) == ("block", "HYBRID")


@pytest.mark.parametrize(
    ("section", "loc", "other"),
    [
        ({"fp8_format": "E4M3", "format": "HYBRID"}, "fp8_format", "format"),
        ({"recipe_name": "block", "fp8_recipe": "block"}, "fp8_recipe", "recipe_name"),
    ],
)
def test_one_setting_under_two_names_is_refused(section, loc, other) -> None:
    assert told(section) == {loc: f"is another name of {other}, given too; leave one out"}


def told(section: dict[str, object]) -> dict[str, str]:
    """What is wrong with a section, by the key that it is told of."""
    with pytest.raises(ValidationError) as caught:
        FP8Config.model_validate(section)
    return {".".join(map(str, e["loc"])): e["msg"] for e in caught.value.errors()}


ELSEWHERE_IN_A_JOB = {"communication_data_type"}
RECIPE_CLASSES = json.loads(SIGNATURES.read_text())["recipes"]


class TestSettingsOfOthers:
    @pytest.mark.parametrize("of", RECIPE_CLASSES)
    def test_every_field_of_transformer_engines_recipes_is_offered_or_told(self, of):
        offered = {*FP8Config.model_fields, *KEY_ALIASES}
        unheard = set(RECIPE_CLASSES[of]) - offered - set(FIELDS_NOT_OFFERED)
        assert unheard == set()
        assert of in RECIPE_ALIASES or of in RECIPES_NOT_OFFERED

    @pytest.mark.parametrize("key", FIELDS_NOT_OFFERED)
    def test_one_that_is_not_offered_is_told_at_its_key_with_what_to_do(self, key):
        message = told({key: None})[key]
        named = set(re.findall(r"\b[a-z0-9]+(?:_[a-z0-9]+)+\b", message))
        assert named <= {*FP8Config.model_fields, *ELSEWHERE_IN_A_JOB, "most_recent"}
        assert "leave it out" in message or named

    @pytest.mark.parametrize("word", RECIPES_NOT_OFFERED)
    def test_a_recipe_that_is_not_offered_is_told_with_the_nearest(self, word):
        assert told({"recipe": word}) == {"recipe": RECIPES_NOT_OFFERED[word]}

    def test_what_is_told_comes_with_everything_else_that_is_wrong(self):
        found = told({"fp8_recipe": "delyed", "fp8_dpa": False, "sqnr": "maybe", "histroy": 3})
        assert set(found) == {"fp8_recipe", "fp8_dpa", "sqnr", "histroy"}
        assert "'delayed', 'current'" in found["fp8_recipe"]

    def test_a_key_that_messages_send_to_exists(self):
        assert set(JobSpec.model_fields) >= ELSEWHERE_IN_A_JOB

    def test_no_key_of_the_section_is_among_those_not_offered(self):
        ours = set(FP8Config.model_fields)
        assert not ours & {*FIELDS_NOT_OFFERED, *KEY_ALIASES}
        assert set(KEY_ALIASES.values()) <= ours
