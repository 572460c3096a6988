"""Job files: everything wrong is told at once, and what is right is completed."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from launch.config import TrainingConfig
from orchestrator.spec.completion import BatchRefusedError, batch_numbers, complete
from orchestrator.spec.errors import Problem, Source, SpecError, read_yaml
from orchestrator.spec.job import JobSpec, load_spec, parse_spec, spec_data, spec_of, spec_yaml

GOOD: dict[str, Any] = {
    "name": "toy",
    "slots_per_node": 4,
    "parallelism": {"pipeline": 2},
    "model": {"hidden_size": 64, "num_layers": 4, "num_heads": 4},
    "training": {"steps": 100, "seq_len": 32, "train_batch_size": 16},
}


def spec_with(**changes: Any) -> dict[str, Any]:
    """``GOOD`` with sections merged in (``a__b=1`` sets a.b)."""
    data = {k: dict(v) if isinstance(v, dict) else v for k, v in GOOD.items()}
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            data.setdefault(section, {})[name] = value
        else:
            data[section] = value
    return data


def problems_of(data: dict[str, Any]) -> dict[str, Problem]:
    with pytest.raises(SpecError) as refused:
        spec_of(Source("job.yaml", data, {}), check_data=False)
    return {p.key: p for p in refused.value.problems}


def test_what_a_pattern_wants_is_told_in_the_words_of_what_it_is_of() -> None:
    found = problems_of({"name": "My_Job", "notifications": {"webhook_env": "a-b"}})
    assert "lower-case letters" in found["name"].remedy
    assert "lower-case" not in found["notifications.webhook_env"].remedy
    assert "underscores" in found["notifications.webhook_env"].remedy


TEN_ERRORS = """\
name: My_Job
num_nodes: 1
slots_per_node: 4
parallelism: {pipeline: 8, data: 3}
model: {hidden_size: 100, num_layers: 4, num_heads: 8, num_kv_heads: 3}
training:
  steps: many
  train_batch_size: 32
  lr: -1
precision: fp9
fp8: {recipe: delayd, high_precision_layers: {names: [layers.3.mlp.dwn]}}
comunication_data_type: fp8
drills:
  - {kind: weight_surge, step: 90, layer: 7, factor: 64}
  - {kind: kill_rank, step: 9, rank: 4}
"""


def test_all_errors_of_a_file_are_reported_at_once_with_key_line_value_and_remedy() -> None:
    with pytest.raises(SpecError) as refused:
        parse_spec(TEN_ERRORS, "jobs/bad.yaml", check_data=False)
    found = {p.key: p for p in refused.value.problems}
    assert set(found) == {
        "name",
        "parallelism.data",
        "parallelism.pipeline",
        "model.num_heads",
        "model.num_kv_heads",
        "training.steps",
        "training.lr",
        "training.train_batch_size",
        "precision",
        "fp8.recipe",
        "fp8.high_precision_layers.names[0]",
        "comunication_data_type",
        "drills[0].layer",
        "drills[1].rank",
    }
    assert {p.file for p in found.values()} == {"jobs/bad.yaml"}
    lines = {k: p.line for k, p in found.items()}
    assert lines["name"] == 1
    assert lines["training.lr"] == 9
    assert lines["drills[1].rank"] == 15
    assert found["drills[0].layer"].value == "7"
    assert "'communication_data_type'" in found["comunication_data_type"].remedy
    assert "'delayed'" in found["fp8.recipe"].remedy
    assert "layers.3.mlp.down" in found["fp8.high_precision_layers.names[0]"].remedy
    assert "jobs/bad.yaml:7: training.steps: 'many'" in str(refused.value)


def test_a_spec_error_and_its_problems_survive_pickling_and_json() -> None:
    with pytest.raises(SpecError) as refused:
        parse_spec(TEN_ERRORS, "bad.yaml", check_data=False)
    assert pickle.loads(pickle.dumps(refused.value)).problems == refused.value.problems
    for problem in refused.value.problems:
        assert Problem.from_json(problem.to_json()) == problem


@pytest.mark.parametrize(
    ("changes", "key", "says"),
    [
        ({"name": "../../evil"}, "name", "doesn't match"),
        ({"name": None}, "name", "string"),
        ({"num_nodes": 0}, "num_nodes", "greater than or equal to 1"),
        ({"num_nodes": True}, "num_nodes", "yes-or-no"),
        ({"gpus_per_node": 4}, "slots_per_node", "gpus_per_node is given too"),
        ({"parallelism__zero_stage": 2}, "parallelism.zero_stage", "pipeline"),
        (
            {"gradient_exchange__high_precision_parameters": ["head.weight", "layers.*.mlp.up"]},
            "gradient_exchange.high_precision_parameters[1]",
            "matches none of the",
        ),
        (
            {"parallelism__zero_stage": 2, "parallelism__pipeline": 1, "parallelism__tensor": 2},
            "parallelism.zero_stage",
            "tensor ranks",
        ),
        (
            {
                "parallelism__zero_stage": 2,
                "parallelism__pipeline": 1,
                "model__tie_embeddings": True,
            },
            "parallelism.zero_stage",
            "tied embeddings",
        ),
        ({"parallelism__zero_stage": 3}, "parallelism.zero_stage", "shards the parameters too"),
        ({"parallelism__data": 3}, "parallelism.data", "= 6, more than 1 node × 4 slots = 4"),
        ({"parallelism__data": 1}, "parallelism.data", "= 2, less than"),
        ({"parallelism__pipeline": 3}, "parallelism.pipeline", "doesn't divide"),
        ({"parallelism__pipeline": 5, "model__num_layers": 8}, "parallelism.pipeline", "more than"),
        ({"model__num_layers": 1}, "parallelism.pipeline", "leave a stage empty"),
        ({"model__num_heads": 6}, "model.num_heads", "doesn't divide hidden_size 64"),
        ({"model__num_heads": 64}, "model.num_heads", "rotary"),
        ({"model__num_kv_heads": 3}, "model.num_kv_heads", "doesn't divide num_heads 4"),
        ({"model__hidden_size": 72}, "model.hidden_size", "multiples of 16"),
        ({"model__ffn_size": 100}, "model.ffn_size", "multiples of 16"),
        ({"model__hidden_size": "wide"}, "model.hidden_size", "integer"),
        ({"model": "large"}, "model", "must be a mapping"),
        ({"training__train_batch_size": 15}, "training.train_batch_size", "2 replicas"),
        ({"training__seq_len": 4}, "training.seq_len", "greater than or equal to 8"),
        ({"training__warmup_steps": 100}, "training.warmup_steps", "never reaches its peak"),
        ({"training__betas": [0.9, 1.5]}, "training.betas", "[0, 1)"),
        ({"training__lr": float("nan")}, "training.lr", "finite"),
        (
            {"deepspeed": {"zero_optimization": {"reduce_bucket_size": float("inf")}}},
            "deepspeed.zero_optimization.reduce_bucket_size",
            "finite",
        ),
        ({"training__steps": 10**400}, "training.steps", "beyond 9,007,199,254,740,991"),
        ({"checkpoint__every": 10**320}, "checkpoint.every", "beyond"),
        ({"training__gradient_accumulation_steps": 0}, "training.gradient_accumulation_steps", "1"),
        ({"snapshots__certify_after": 99}, "snapshots.certify_after", "dropped before"),
        ({"snapshots__replicas": 1}, "snapshots.replicas", "never on its own node"),
        ({"detection__min_history": 65}, "detection.min_history", "window = 64"),
        ({"detection__windw": 65}, "detection.windw", "no such key"),
        ({"detection__settle_steps": 5000}, "detection.settle_steps", "is reported meanwhile"),
        ({"detection__window": 100_000}, "detection.window", "make it at most 4096"),
        ({"detection__loss_sigmas": float("inf")}, "detection.loss_sigmas", "finite"),
        (
            {"fp8__high_precision_layers": {"first": 3, "last": 2}},
            "fp8.high_precision_layers.last",
            "4",
        ),
        (
            {"fp8__high_precision_layers": {"names": "*.mlp.down"}},
            "fp8.high_precision_layers.names",
            "must be a list",
        ),
        ({"training__betas": 0.9}, "training.betas", "must be a list"),
        ({"fp8__backend": "transformer_engine"}, "fp8.backend", "needs GPUs"),
        ({"envs": {"HF_TOKEN": "x"}}, "envs.HF_TOKEN", "secret"),
        ({"envs": {"REMOTE": "https://me:pw@host/x"}}, "envs.REMOTE", "secret"),
        ({"envs": {"RANK": "1"}}, "envs.RANK", "set by Octavo"),
        ({"envs": {"THREADS": 1}}, "envs.THREADS", "string"),
        ({"drills": [{"kind": "kill_rank", "step": 100}]}, "drills[0].step", "ends after 100"),
        ({"drills": [{"kind": "kill_rnk", "step": 1}]}, "drills[0].kind", "not a kind"),
        ({"drills": [{"step": 1}]}, "drills[0].kind", "missing"),
        ({"drills": {"kind": "kill_rank"}}, "drills", "must be a list"),
        ({"deepspeed": {"gradient_clipping": 2.0}}, "deepspeed.gradient_clipping", "max_norm: 1.0"),
        ({"deepspeed": {"optimizer": {}}}, "deepspeed.optimizer", "can't be honoured"),
        ({"deepspeed": {"bf16": {"enabled": False}}}, "deepspeed.bf16.enabled", "contradicts"),
        ({"deepspeed": {"gradient_cliping": 1}}, "deepspeed.gradient_cliping", "no key"),
        (
            {"deepspeed": {"zero_optimization": {"stage": 2}}},
            "deepspeed.zero_optimization.stage",
            "parallelism.zero_stage: 1",
        ),
    ],
)
def test_one_wrong_thing_is_told_by_its_key_alone(
    changes: dict[str, Any], key: str, says: str
) -> None:
    found = problems_of(spec_with(**changes))
    assert list(found) == [key]
    assert says in found[key].message


def test_a_secret_looking_value_is_not_repeated() -> None:
    found = problems_of(spec_with(envs={"MY_API_KEY": "sk-123456", "B": "ghp_abcdef"}))
    assert set(found) == {"envs.MY_API_KEY", "envs.B"}
    assert "123456" not in str(found) and "abcdef" not in str(found)


def test_a_misspelt_key_is_read_as_the_one_meant_when_the_rest_is_checked() -> None:
    data = spec_with(model__num_heads=6)
    data["model"]["hiden_size"] = data["model"].pop("hidden_size")
    # With the default of 128 it would be another message, with 96 none at all.
    data["model"]["hiden_size"] = 80
    found = problems_of(data)
    assert set(found) == {"model.hiden_size", "model.num_heads"}
    assert "hidden_size 80" in found["model.num_heads"].message


def test_nothing_is_said_about_a_default_that_stands_in_for_a_wrong_value() -> None:
    # The default of 4 layers would leave stages of 8 empty.
    found = problems_of(
        spec_with(slots_per_node=8, parallelism={"pipeline": 8}, model__num_layers="eight")
    )
    assert list(found) == ["model.num_layers"]


def test_a_value_that_its_section_refuses_is_told_by_what_can_be_run() -> None:
    found = problems_of(spec_with(parallelism__zero_stage=5))
    assert list(found) == ["parallelism.zero_stage"]
    assert found["parallelism.zero_stage"].remedy == "make it 0, 1 or 2"
    assert "3" not in found["parallelism.zero_stage"].message


@pytest.mark.parametrize(
    ("wrong", "also"),
    [
        ({"parallelism__zero_stage": 5, "model__num_heads": 6}, "model.num_heads"),
        ({"model__num_layers": "many", "model__hidden_size": 72}, "model.hidden_size"),
        ({"training__betas": "x", "training__warmup_steps": 100}, "training.warmup_steps"),
        ({"detection__zzz": 1, "detection__min_history": 65}, "detection.min_history"),
        ({"training__lr": "x", "deepspeed": {"fp16": {}}}, "deepspeed.fp16"),
    ],
)
def test_a_value_of_the_wrong_kind_hides_no_contradiction_among_the_others(
    wrong: dict[str, Any], also: str
) -> None:
    found = problems_of(spec_with(**wrong))
    assert len(found) == 2 and also in found


def test_nothing_contradicts_a_field_that_is_wrong_itself() -> None:
    raw = {"gradient_clipping": 2.0, "zero_optimization": {"stage": 2}, "train_batch_size": 64}
    wrong = {"training__max_norm": "x", "parallelism__zero_stage": 5, "slots_per_node": "four"}
    found = problems_of(spec_with(deepspeed=raw, **wrong))
    assert set(found) == {"training.max_norm", "parallelism.zero_stage", "slots_per_node"}


@pytest.mark.parametrize(
    "kept",
    [{"first": 2, "last": 2}, {"names": ["layers.*"]}, {"first": 3, "names": ["layers.3.*"]}],
)
def test_a_job_in_fp8_that_keeps_every_linear_out_of_it_is_told(kept: dict[str, Any]) -> None:
    data = spec_with(model__num_layers=4, fp8={"high_precision_layers": kept})
    found = problems_of(data)
    assert "keeps all 16 linears in BF16" in found["fp8.high_precision_layers"].message
    in_bf16 = spec_of(Source("f", {**data, "precision": "bf16"}, {}), check_data=False)
    assert in_bf16.precision == "bf16"


def test_recipe_words_of_other_packages_are_taken_or_refused_with_a_choice() -> None:
    data = spec_with(fp8={"recipe": "tensorwise"})
    assert spec_of(Source("f", data, {}), check_data=False).fp8.recipe == "current"
    found = problems_of(spec_with(fp8={"recipe": "rows"}))
    assert "block, current, delayed, mxfp8" in found["fp8.recipe"].remedy
    found = problems_of(spec_with(fp8={"fp8_recipe": "nvfp4", "fp8_dpa": False}))
    assert "recipe: mxfp8" in found["fp8.fp8_recipe"].message
    assert "stay in high precision" in found["fp8.fp8_dpa"].message


def test_deepspeed_keys_that_repeat_the_spec_are_let_pass() -> None:
    raw = {"gradient_clipping": 1.0, "train_batch_size": 16, "zero_optimization": {"stage": 1}}
    spec = spec_of(Source("f", spec_with(deepspeed=raw), {}), check_data=False)
    assert spec.deepspeed == raw


@pytest.mark.parametrize(
    ("text", "says", "line"),
    [
        ("", "empty", None),
        ("- a\n- b\n", "mapping of keys", 1),
        ("name: a\nmodel: {hidden_size: 64\ntraining: 3\n", "not YAML", 3),
        ("name: a\nname: b\n", "given twice, first on line 1", 2),
        ("name: a\nmodel:\n  num_layers: 2\n  num_layers: 3\n", "given twice", 4),
        ("name: a\nmodel: &m\n  deeper: *m\n", "alias", None),
        ("name: !!python/object:os.system x\n", "plain value", 1),
        ("name: a\n? [1, 2]\n: 3\n", "a key must be a word", 2),
        ("\x00", "not YAML", None),
    ],
)
def test_broken_yaml_is_told_with_its_line(text: str, says: str, line: int | None) -> None:
    with pytest.raises(SpecError) as refused:
        parse_spec(text, "job.yaml", check_data=False)
    problem = refused.value.problems[0]
    assert says in problem.message
    if line:
        assert problem.line == line


def test_a_merged_mapping_may_be_overridden() -> None:
    text = "base: &b {lr: 1, steps: 5}\ntraining:\n  <<: *b\n  lr: 2\n"
    source = read_yaml(text, "f")
    assert source.data["training"] == {"lr": 2, "steps": 5}


def test_an_unreadable_file_is_a_spec_error(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.yaml", tmp_path):
        with pytest.raises(SpecError, match="can't be read"):
            load_spec(path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="UTF-8"):
        load_spec(binary)


def test_a_missing_data_file_and_one_shorter_than_a_sequence_are_found_before_submitting(
    tmp_path: Path,
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("x" * 10)
    for source in (tmp_path / "absent.txt", short):
        data = spec_with(data={"source": str(source)})
        with pytest.raises(SpecError) as refused:
            spec_of(Source("job.yaml", data, {}))
        (problem,) = refused.value.problems
        assert problem.key == "data.source"
        assert str(source) in problem.message


def test_relative_paths_are_taken_from_the_folder_the_command_runs_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = spec_with(data={"source": "text.txt"}, checkpoint={"storage_path": "out"})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(data))
    spec = load_spec(Path("job.yaml"), check_data=False)
    assert spec.data.source == str(tmp_path / "text.txt")
    assert spec.checkpoint.storage_path == tmp_path / "out"


def test_completion_fills_replicas_batch_widths_and_is_idempotent() -> None:
    spec = spec_of(Source("f", spec_with(), {}), check_data=False)
    assert spec.parallelism.data == 2
    assert spec.model.num_kv_heads == 4
    assert spec.model.ffn_size == 192
    training = spec.training
    assert training.train_micro_batch_size_per_gpu == 4
    assert training.gradient_accumulation_steps == 2
    assert complete(spec) == spec


def test_a_spec_without_slots_gets_as_many_as_its_degrees_need() -> None:
    data = spec_with(parallelism={"pipeline": 2, "data": 3}, training={"steps": 5})
    del data["slots_per_node"]
    spec = spec_of(Source("f", data, {}), check_data=False)
    assert spec.slots_per_node == 6
    assert spec.training.train_batch_size == 4 * 2 * 3


def test_only_what_is_unset_by_default_can_be_null() -> None:
    """A stored spec leaves nulls out: one that means something would come back as the default."""
    lost = [
        ".".join((*path, name))
        for path, model in _sections(JobSpec, ())
        for name, field in model.model_fields.items()
        if type(None) in get_args(field.annotation)
        if field.get_default(call_default_factory=True) is not None
    ]
    assert lost == []


def _sections(
    model: type[BaseModel], path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], type[BaseModel]]]:
    yield path, model
    for name, field in model.model_fields.items():
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _sections(kind, (*path, name))


def test_the_printed_spec_reads_back_to_itself() -> None:
    spec = spec_of(Source("f", spec_with(drills=[{"kind": "kill_rank", "step": 3}]), {}))
    assert parse_spec(spec_yaml(spec), "printed") == spec
    assert JobSpec.model_validate(spec_data(spec)) == spec


@given(
    total=st.none() | st.integers(1, 256),
    micro=st.none() | st.integers(1, 16),
    accumulation=st.none() | st.integers(1, 16),
    data=st.integers(1, 8),
    pipeline=st.integers(1, 4),
)
def test_batch_numbers_multiply_to_the_total_and_keep_what_was_given(
    total: int | None, micro: int | None, accumulation: int | None, data: int, pipeline: int
) -> None:
    training = TrainingConfig(
        train_batch_size=total,
        train_micro_batch_size_per_gpu=micro,
        gradient_accumulation_steps=accumulation,
    )
    try:
        batch = batch_numbers(training, data, pipeline)
    except BatchRefusedError:
        assert total is not None
        assert total % (data * (micro or 1) * (accumulation or 1)) or (
            micro and accumulation and micro * accumulation * data != total
        )
        return
    assert batch.micro * batch.accumulation * data == batch.total
    assert total in (None, batch.total)
    assert micro in (None, batch.micro)
    assert accumulation in (None, batch.accumulation)


def test_the_demo_job_is_valid_and_complete() -> None:
    path = Path(__file__).parents[2] / "deploy" / "jobs" / "demo.yaml"
    spec = load_spec(path)
    assert spec.parallelism.data == 2
    assert spec.training.gradient_accumulation_steps == 4


def test_zero_2_is_offered_without_pipeline_stages() -> None:
    data = spec_with(parallelism__zero_stage=2, parallelism__pipeline=1)
    spec = spec_of(Source("job.yaml", data, {}), check_data=False)
    assert spec.parallelism.zero_stage == 2


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"prescale_gradients": True}, "deepspeed.prescale_gradients"),
        ({"torch_autocast": {"enabled": True}}, "deepspeed.torch_autocast"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "deepspeed.zero_optimization.offload_optimizer",
        ),
        ({"hybrid_engine": {"enabled": True}}, "deepspeed.hybrid_engine"),
        ({"data_types": {"grad_accum_dtype": "fp16"}}, "deepspeed.data_types.grad_accum_dtype"),
        ({"tensorboard": {"enabled": True}}, "deepspeed.tensorboard"),
    ],
)
def test_a_deepspeed_key_that_the_engine_would_refuse_is_refused_with_the_spec(
    section: dict[str, object], key: str
) -> None:
    source = Source("job.yaml", {"name": "x", "slots_per_node": 1, "deepspeed": section}, {})
    with pytest.raises(SpecError) as refused:
        spec_of(source)
    assert [problem.key for problem in refused.value.problems] == [key]


@pytest.mark.parametrize(
    ("key", "seconds", "why"),
    [
        ("init_timeout_s", 0.001, "must be 5 or more, in seconds: the imports"),
        ("step_timeout_s", 0.0001, "must be 1 or more, in seconds: a step's report"),
        ("step_timeout_s", 1e9, "a week of silence is a hang"),
        ("init_timeout_s", 1e9, "a week of silence is a hang"),
    ],
)
def test_a_patience_that_no_healthy_job_bears_is_refused_with_why(
    key: str, seconds: float, why: str
) -> None:
    with pytest.raises(SpecError, match=f"recovery.{key}.*{why}"):
        parse_spec(f"name: j\nrecovery: {{{key}: {seconds}}}\n", "job.yaml", check_data=False)
    told = parse_spec("name: j\nrecovery: {step_timeout_s: 1}\n", "job.yaml", check_data=False)
    assert told.recovery.step_timeout_s == 1.0
