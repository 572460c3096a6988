"""`octavo plan` as people and programs see it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from orchestrator.cli.tables import table_lines
from orchestrator.planning.defaults import annotated_yaml, default_reasons
from orchestrator.planning.estimate import Hardware, estimate
from orchestrator.planning.told import PRESETS_NOTE, estimate_lines, preset_rows
from orchestrator.spec.job import load_spec, parse_spec, spec_data, spec_yaml
from tests.unit.plan_jobs import job, values
from tests.unit.test_cli import call

AUTO = {"parallelism": "auto"}


@pytest.fixture
def file(tmp_path: Path) -> str:
    return written(tmp_path, **AUTO)


def written(folder: Path, **given: object) -> str:
    text = folder / "text.txt"
    text.write_text("abc " * 4096)
    given = {"data": {"source": str(text)}, **given}
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(values(**given), sort_keys=False))
    return str(path)


class TestText:
    def test_it_is_a_job_file_with_the_choice_written_out(self, file, capsys):
        assert call(["plan", file]) == 0
        out = capsys.readouterr().out
        assert parse_spec(out, "again", check_data=False) == load_spec(Path(file))
        assert "parallelism: auto, of " in out and "  1. tensor " in out
        for words in ("memory a rank", "snapshots in a node", "sent a step", "tokens/s", "MFU"):
            assert words in out
        assert "# fits\n" in out

    def test_with_a_price_it_tells_the_cost(self, file, capsys):
        assert call(["plan", file, "--price", "2.5"]) == 0
        assert " at 2.5 a device-hour" in capsys.readouterr().out

    def test_times_are_told_as_ranges_of_two_digits_and_where_they_are_from(self, file, capsys):
        assert call(["plan", file, "-o", "json"]) == 0
        low, high = json.loads(capsys.readouterr().out)["estimate"]["step_s_range"]
        assert call(["plan", file]) == 0
        out = capsys.readouterr().out
        assert f"# step: {1000 * low:.2g} to {1000 * high:.2g} ms; " in out
        assert "tokens/s" in out and "Octavo was timed on no GPU" in out

    def test_a_narrow_fit_is_told_as_one(self):
        spec = job(model={"preset": "llama-1b"})
        found = estimate(spec, Hardware.of(spec))
        assert found.fits and not found.fits_narrowly
        device = replace(found.hardware.device, memory=int(1.1 * found.device_bytes))
        found = estimate(spec, replace(found.hardware, device=device))
        assert found.fits and found.fits_narrowly
        [verdict] = [line for line in estimate_lines(found, [], None) if "fits" in line]
        assert verdict.startswith("fits narrowly: it takes 97% of what the device has to use")

    def test_on_cpu_what_is_in_use_is_told_apart_from_what_is_resident(self, tmp_path, capsys):
        path = written(tmp_path, gpus_per_node=None, slots_per_node=8)
        assert call(["plan", path]) == 0
        out = capsys.readouterr().out
        assert " in use; resident up to " in out and "an order of magnitude" in out

    def test_what_does_not_fit_is_told_with_what_would(self, tmp_path, capsys):
        model = {"preset": "llama-8b"}
        training = {"seq_len": 8192, "train_micro_batch_size_per_gpu": 4}
        path = written(tmp_path, model=model, training=training, snapshots={"keep": 2})
        assert call(["plan", path]) == 0
        out = capsys.readouterr().out
        assert "# DOES NOT FIT the device" in out and "#   would fit with " in out

    def test_each_default_has_its_reason_and_what_was_given_has_none(self, file, capsys):
        assert call(["plan", file]) == 0
        lines = capsys.readouterr().out.splitlines()
        of = {line.split(":")[0].strip(): line for line in lines if not line.startswith("#")}
        assert "# chosen by auto" in of["tensor"]
        assert "# default: Peak learning rate" in of["lr"]
        assert "#" not in of["seq_len"] and "#" not in of["hidden_size"]

    def test_the_hardware_of_the_command_line_is_the_specs_from_there_on(self, file, capsys):
        assert call(["plan", file, "--device", "b200", "--network", "roce400"]) == 0
        out = capsys.readouterr().out
        assert "NVIDIA B200" in out
        resources = parse_spec(out, "again", check_data=False).resources
        assert (resources.device, resources.network) == ("b200", "roce400")

    @pytest.mark.parametrize(
        ("option", "says"),
        [
            (["--device", "h1000"], "--device: no device 'h1000' is known: did you mean 'h100'?"),
            (["--device", "h100", "--network", "ib4"], "--network: no network 'ib4' is known"),
        ],
    )
    def test_unknown_hardware_is_refused_with_what_there_is(self, option, says, file, capsys):
        assert call(["plan", file, *option]) == 2
        told = capsys.readouterr().err
        assert says in told and "there are " in told and "Traceback" not in told

    def test_a_device_of_the_wrong_kind_is_a_problem_of_the_file(self, file, capsys):
        assert call(["plan", file, "--device", "cpu"]) == 2
        assert "the job's ranks are on GPUs" in capsys.readouterr().err

    def test_without_a_file_it_says_what_to_give(self, capsys):
        assert call(["plan"]) == 2
        assert "octavo plan job.yaml" in capsys.readouterr().err

    def test_presets_are_listed_with_what_their_state_takes(self, capsys):
        assert call(["plan", "--presets"]) == 0
        out = capsys.readouterr().out
        assert "llama-405b" in out and "8.12 TB" in out
        [experts] = [line for line in out.splitlines() if line.startswith("moe-671b")]
        assert "671 G" in experts and "can't be trained here" in experts
        narrow = table_lines(preset_rows(), ("SOURCE",), 80)
        assert max(map(len, [*narrow, *PRESETS_NOTE.splitlines()])) <= 82
        assert max(map(len, [*narrow, *PRESETS_NOTE.splitlines()])) <= 80


class TestJson:
    def test_it_is_complete(self, file, capsys):
        assert call(["plan", file, "-o", "json", "--price", "2"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["spec"] == spec_data(load_spec(Path(file)))
        assert told["linears"].startswith("undecided: ")
        assert told["defaults"]["parallelism.tensor"] == "chosen by auto"
        found = told["estimate"]
        assert found["fits"] and found["cost"] > 0 and found["days"] > 0
        ranks = found["memory"]["stages"]
        for parts in (*ranks, found["traffic"], found["step_s"]):
            assert parts["total"] == pytest.approx(
                sum(value for name, value in parts.items() if name != "total")
            )
        assert told["auto"]["best"][0]["degrees"]["tensor"] == told["spec"]["parallelism"]["tensor"]
        assert told["auto"]["reasons"] and told["remedies"] == []

    def test_presets_too(self, capsys):
        assert call(["plan", "--presets", "-o", "json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["presets"]["llama-8b"]["model"]["hidden_size"] == 4096
        assert told["estimates_only"]["moe-671b"]["parameters"] == 671_000_000_000


class TestAnnotation:
    def test_a_value_that_looks_like_keys_is_left_as_it_is(self):
        spec = job(envs={"NOTE": "a: b\nlr: 3\n  seed: 4 # not a comment"})
        text = annotated_yaml(spec, default_reasons(values(), spec))
        assert yaml.safe_load(text) == yaml.safe_load(spec_yaml(spec))

    def test_every_reason_is_of_a_value_that_the_spec_has(self):
        spec = job(parallelism="auto", model={"preset": "llama-1b"})
        given = values(parallelism="auto", model={"preset": "llama-1b"})
        reasons = default_reasons(given, spec)
        assert reasons[("model", "vocab_size")] == "of preset llama-1b"
        assert reasons[("snapshots", "replicas")] == "1 where there are two nodes or more"
        assert ("training", "train_batch_size") not in reasons
        assert len(reasons) > 60
