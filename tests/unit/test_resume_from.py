"""checkpoint.resume_from: what can be taken up, what is refused at submit and with which words."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.attempt_folder import open_attempt
from launch.checkpoints import commit_checkpoint, write_rank_file
from launch.commands import CopyRefused
from launch.digests import digest_of
from launch.rank_group import RankEnd
from launch.snapshots import DamagedSnapshotError, SnapshotKey
from launch.state_block import StateLayout
from launch.state_header import LAYOUT
from orchestrator.controller.controller import Controller
from orchestrator.saved.checkpoint_facts import differences, facts_of
from orchestrator.saved.restore import newest_written
from orchestrator.saved.resume_from import (
    check_resume_from,
    checkpoints_in,
    control_state,
    foreign_points,
)
from orchestrator.spec.completion import complete
from orchestrator.spec.errors import SpecError, dotted
from orchestrator.spec.job import JobSpec, parse_spec
from parallel.layout import RankLayout
from tests.unit.control_plane import ControlPlane
from tests.unit.scripted_job import Bench, Make

LEFT = ("layers.1.mlp.down",)


def spec(**values: Any) -> JobSpec:
    defaults: dict[str, Any] = {"name": "second", "slots_per_node": 2}
    return complete(JobSpec.model_validate({**defaults, **values}))


def checkpoint(job_dir: Path, step: int, of: JobSpec | None = None) -> Path:
    """Of two pipeline stages, trained with two batches left out and a layer in BF16."""
    open_attempt(job_dir, 1)
    for rank in range(2):
        layer = f"layers.{rank}.mlp.down"
        meta = {
            "step": step,
            "ledger": [3, 7],
            "lr_scale": 0.5,
            "engine": {
                "precision": {"precision": {layer: "bf16" if layer in LEFT else "fp8"}},
                "exchange_dtype": "bf16",
            },
            LAYOUT: RankLayout((2, 1, 1), (rank, 0, 0), 1, (), (layer,)).to_json(),
        }
        layout = StateLayout({"weights": torch.zeros(4)}, len(str(meta)))
        block = torch.zeros(layout.nbytes, dtype=torch.uint8)
        header = layout.header(meta)
        block[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        data = block.numpy()
        write_rank_file(job_dir, SnapshotKey("first", 1, 0, rank, step), data, digest_of(data))
    return commit_checkpoint(job_dir, step, 1, range(2), run=facts_of(of or spec())).path


def begins_at(path: Path, **values: Any) -> JobSpec:
    return spec(checkpoint={"resume_from": str(path)}, **values)


def problems(of: JobSpec) -> list[str]:
    with pytest.raises(SpecError) as caught:
        check_resume_from(of, "job.yaml")
    return [str(problem) for problem in caught.value.problems]


def far_from_its_checkpoint(bench: Make, **sections: Any) -> Bench:
    """A job that has done 312 steps, with a checkpoint of step 12."""
    job = bench(training={"steps": 1000}, **sections)
    job.train(12)
    job.ranks._write_checkpoint()
    job.train(300)
    return job


class TestPlaces:
    @pytest.mark.parametrize("below", [".", "checkpoints", "checkpoints/step-00000020"])
    def test_a_job_its_checkpoints_or_one_of_them_may_be_named(
        self, tmp_path: Path, below: str
    ) -> None:
        for step in (10, 20):
            checkpoint(tmp_path, step)
        job = begins_at(tmp_path / below)
        check_resume_from(job, "job.yaml")
        points = foreign_points(job)
        assert [(p.step, p.tier, p.attempt) for p in points][:1] == [(20, "disk", 0)]
        assert len(points) == (1 if "step" in below else 2)

    def test_one_that_is_cut_off_is_passed_over_and_none_that_is_left_refused(
        self, tmp_path: Path
    ) -> None:
        for step in (10, 20):
            path = checkpoint(tmp_path, step)
        (path / "rank-00001.safetensors").write_bytes(b"")
        assert [p.step for p in foreign_points(begins_at(tmp_path))] == [10]
        shutil.rmtree(tmp_path / "checkpoints" / "step-00000010")
        (told,) = problems(begins_at(tmp_path / "checkpoints"))
        assert "step-00000020" in told and "cut off" in told

    @pytest.mark.parametrize("below", [".", "checkpoints/step-00000020"])
    def test_a_folder_that_may_not_be_listed_keeps_nobody_from_the_others(
        self, tmp_path: Path, below: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        checkpoint(tmp_path, 20)
        scandir = os.scandir

        def refusing(folder: Path) -> object:
            if folder == tmp_path / below:
                raise PermissionError(errno.EACCES, "Permission denied", str(folder))
            return scandir(folder)

        monkeypatch.setattr(os, "scandir", refusing)
        told: list[Path] = []
        found = checkpoints_in(tmp_path / below, lambda folder, why: told.append(folder))
        assert [c.step for c in found] == [20]
        assert told == ([] if found[0].path == tmp_path / below else [tmp_path / below])

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("global_step5/mp_rank_00_model_states.pt", ("DeepSpeed", "--safe_serialization")),
            ("zero_to_fp32.py", ("DeepSpeed", "--safe_serialization")),
            ("__0_0.distcp", ("torch.distributed", "format_utils")),
            ("latest_checkpointed_iteration.txt", ("Megatron", "weights_only=True")),
            ("pytorch_model.bin", ("pickle", "weights_only=True", "model.factory")),
            ("model.ckpt", ("pickle", "safetensors.torch.save_file")),
            ("model-00001-of-00002.safetensors", ("weights alone", "model.factory")),
            ("notes.txt", ("no checkpoint of Octavo, but notes.txt",)),
        ],
    )
    def test_what_is_of_others_is_named_with_what_to_do_and_never_opened(
        self, tmp_path: Path, name: str, words: tuple[str, ...]
    ) -> None:
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.touch(mode=0)
        (told,) = problems(begins_at(tmp_path))
        assert told.startswith("job.yaml: checkpoint.resume_from: ")
        assert all(word in told for word in words), told

    def test_a_file_and_nothing_are_told(self, tmp_path: Path) -> None:
        (told,) = problems(begins_at(tmp_path / "nowhere"))
        assert "does not exist" in told
        (tmp_path / "model.pt").touch()
        (told,) = problems(begins_at(tmp_path / "model.pt"))
        assert "model.pt, a pickle" in told


class TestWhatMustBeTheSame:
    @pytest.mark.parametrize(
        ("values", "told"),
        [
            ({"model": {"num_layers": 8}}, "model.num_layers: was 4 in the job"),
            ({"training": {"seq_len": 64}}, "training.seq_len: was 128"),
            ({"training": {"train_batch_size": 64}}, "training.train_batch_size: was 8"),
            ({"data": {"shuffle_seed": 5}}, "data.shuffle_seed: was 0"),
            ({"fp8": {"recipe": "block"}}, "fp8.recipe: was 'delayed'"),
        ],
    )
    def test_another_model_or_other_tokens_are_refused_at_their_key(
        self, tmp_path: Path, values: dict[str, Any], told: str
    ) -> None:
        checkpoint(tmp_path, 10)
        found = problems(begins_at(tmp_path, **values))
        assert any(told in problem and "make it" in problem for problem in found)

    def test_degrees_length_and_learning_rate_may_differ(self, tmp_path: Path) -> None:
        checkpoint(tmp_path, 10)
        job = begins_at(
            tmp_path,
            parallelism={"pipeline": 2, "zero_stage": 0},
            training={"train_batch_size": 8, "steps": 5000, "lr": 1e-5},
            recovery={"max_restarts": 1},
        )
        check_resume_from(job, "job.yaml")

    def test_a_job_that_would_have_nothing_left_to_do_is_refused(self, tmp_path: Path) -> None:
        checkpoint(tmp_path, 1000)
        (told,) = problems(begins_at(tmp_path))
        assert "of step 1000, and training.steps is 1000" in told

    @pytest.mark.parametrize("key", ["num_layers", "hidden_size", "vocab_size", "num_heads"])
    def test_facts_survive_json(self, key: str) -> None:
        facts = json.loads(json.dumps(facts_of(spec())))
        assert list(differences(spec(), facts)) == []
        other = spec(model={key: 64})
        assert f"model.{key}" in {dotted(f.path) for f in differences(other, facts)}


def test_what_the_state_was_trained_with_is_read_from_every_stage(tmp_path: Path) -> None:
    state = control_state(checkpoint(tmp_path, 10))
    assert (state.step, state.ledger, state.in_bf16) == (10, (3, 7), LEFT)
    assert (state.lr_scale, state.exchange) == (0.5, "bf16")


def test_a_controller_refuses_it_before_anything_is_stored(
    tmp_path: Path, plane: ControlPlane
) -> None:
    controller: Controller = plane.controller
    data = {"name": "a", "slots_per_node": 2, "checkpoint": {"resume_from": str(tmp_path)}}
    with pytest.raises(SpecError, match="no checkpoint of Octavo, but"):
        controller.intake.submit(data, "job.yaml")
    assert controller.store.jobs() == []


def test_relative_paths_are_those_of_whoever_submits(tmp_path: Path) -> None:
    job = parse_spec(
        "name: a\nslots_per_node: 1\ncheckpoint: {resume_from: old, storage_path: jobs}\n",
        "job.yaml",
        base=tmp_path,
    )
    assert job.checkpoint.resume_from == tmp_path / "old"
    assert job.checkpoint.storage_path == tmp_path / "jobs"


def test_a_job_begins_there_once_with_all_that_comes_along(tmp_path: Path, bench: Make) -> None:
    source = tmp_path / "first"
    path = checkpoint(source, 50)
    job = bench(checkpoint={"resume_from": str(source)})
    job.step()
    first = job.ranks.attempts[0][0]
    assert first.restore is not None and first.restore.path == str(path)
    assert (first.ledger, first.lr_scale) == ((3, 7), 0.5)
    assert first.precision == {LEFT[0]: "bf16"}
    assert job.controller.kinds() == ["resumed"]
    assert "step 50" in job.controller.event("resumed").message
    assert not [event for event in job.controller.events if event.kind == "unrecorded"]
    assert list(path.glob("held-by-*"))


def damage(path: Path) -> None:
    """As a disk does: of the same size, and other bytes at its beginning."""
    with path.open("r+b") as file:
        file.write(b"\xff" * 64)


def test_one_whose_files_say_nothing_is_refused_at_submit(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 20)
    damage(path / "rank-00001.safetensors")
    (told,) = problems(begins_at(tmp_path))
    assert "step-00000020 can't be read" in told and "name another one" in told


class TestNothingToStartFrom:
    """Training from step 0 again is nothing that a job does by itself."""

    def test_a_beginning_that_is_damaged_meanwhile_is_left_to_a_person(
        self, tmp_path: Path, bench: Make
    ) -> None:
        source = tmp_path / "first"
        path = checkpoint(source, 50)
        job = bench(checkpoint={"resume_from": str(source)})
        damage(path / "rank-00001.safetensors")
        job.step()
        told = job.settled()
        assert told.states[-1] == ("paused", "STATE_GONE")
        assert job.ranks.attempts == [] and told.actions == []
        message = told.event("ended").message
        assert str(path) in message and "octavo resume" in message

    def test_as_is_one_that_a_rank_finds_damaged(self, tmp_path: Path, bench: Make) -> None:
        source = tmp_path / "first"
        checkpoint(source, 50)
        job = bench(checkpoint={"resume_from": str(source)})
        job.step()
        point = job.ranks.attempts[0][0].restore
        assert point is not None
        job.ranks.deliver([CopyRefused(1, 0, 1, 50, "disk", "bytes from 0 are others", point)])
        cause = DamagedSnapshotError(1, 50, "disk", "digest differs")
        job.ranks.ends[1] = RankEnd(1, "raised", error="damaged", cause=cause)
        for _ in range(10):
            job.step(1.0)
        told = job.settled()
        assert told.states[-1] == ("paused", "STATE_GONE") and len(job.ranks.attempts) == 1
        assert "rank 1" in told.event("ended").message

    def test_and_a_jobs_own_checkpoints_that_are_gone(self, tmp_path: Path, bench: Make) -> None:
        job = bench()
        job.train(12)
        job.ranks._write_checkpoint()
        job.train(3)
        assert job.settled().event("checkpoint_written").detail["step"] == 12
        folder = job.controller.job_dir / "checkpoints"
        folder.rename(tmp_path / "elsewhere")
        job.ranks.held.clear()
        job.ranks.lose(1)
        for _ in range(5):
            job.step(1.0)
        told = job.settled()
        assert told.states[-1] == ("paused", "STATE_GONE") and len(job.ranks.attempts) == 1
        message = told.event("ended").message
        assert "a checkpoint of step 12 was written" in message and str(folder) in message

    def test_where_nothing_was_ever_saved_it_begins_anew(self, bench: Make) -> None:
        job = bench()
        job.train(4)
        job.ranks.held.clear()
        job.ranks.lose(1)
        job.train(3)
        assert job.settled().states[-1][0] == "running" and len(job.ranks.attempts) == 2

    def test_nor_while_a_keeper_that_may_hold_the_state_does_not_answer(self, bench: Make) -> None:
        job = bench()
        job.train(12)
        held, job.ranks.held = job.ranks.held, []
        job.ranks.unheard = ("keeper-1",)
        job.ranks.lose(1)
        for _ in range(5):
            job.step(1.0)
        told = job.settled()
        assert len(job.ranks.attempts) == 1
        (event,) = [e for e in told.events if e.kind == "keepers_awaited"]
        assert "keeper-1" in event.message
        job.ranks.held, job.ranks.unheard = held, ()
        job.step(1.0)
        restore = job.ranks.attempts[1][0].restore
        assert restore is not None and (restore.step, restore.tier) == (10, "memory")

    def test_nor_for_ever(self, bench: Make) -> None:
        job = bench(recovery={"init_timeout_s": 60, "max_attempts_without_progress": 2})
        job.train(4)
        job.ranks.held.clear()
        job.ranks.unheard = ("keeper-1",)
        job.ranks.lose(1)
        for _ in range(30):
            job.step(10.0)
        told = job.settled()
        assert told.states[-1] == ("paused", "BUDGET_SPENT") and len(job.ranks.attempts) == 1

    def test_nor_is_a_checkpoint_given_up_while_one_does_not_answer(
        self, tmp_path: Path, bench: Make
    ) -> None:
        job = bench()
        job.train(12)
        job.ranks._write_checkpoint()
        job.train(1)
        assert job.settled().event("checkpoint_written").detail["step"] == 12
        (job.controller.job_dir / "checkpoints").rename(tmp_path / "elsewhere")
        held, job.ranks.held = job.ranks.held, []
        job.ranks.unheard = ("keeper-1",)
        job.ranks.lose(1)
        for _ in range(3):
            job.step(1.0)
        job.ranks.held, job.ranks.unheard = held, ()
        job.step(1.0)
        assert len(job.ranks.attempts) == 2 and "paused" not in dict(job.settled().states)

    def test_nor_far_back_while_one_may_have_what_was_trained_since(self, bench: Make) -> None:
        job = far_from_its_checkpoint(bench)
        held, job.ranks.held = job.ranks.held, []
        job.ranks.unheard = ("keeper-1",)
        job.ranks.lose(1)
        for _ in range(5):
            job.step(1.0)
        told = job.settled()
        assert len(job.ranks.attempts) == 1
        (event,) = [e for e in told.events if e.kind == "keepers_awaited"]
        assert "step 12" in event.message and "keeper-1" in event.message
        job.ranks.held, job.ranks.unheard = held, ()
        job.step(1.0)
        restore = job.ranks.attempts[1][0].restore
        assert restore is not None and (restore.step, restore.tier) == (310, "memory")

    def test_but_no_longer_than_to_train_that_again_takes(self, bench: Make) -> None:
        job = far_from_its_checkpoint(bench)
        job.ranks.held.clear()
        job.ranks.unheard = ("keeper-1",)
        job.ranks.lose(1)
        # 300 steps of a tenth of a second.
        for _ in range(29):
            job.step(1.0)
        assert len(job.ranks.attempts) == 1
        for _ in range(3):
            job.step(1.0)
        restore = job.ranks.attempts[1][0].restore
        assert restore is not None and (restore.step, restore.tier) == (12, "disk")
        job.ranks.unheard = ()
        job.train(3)
        assert job.settled().states[-1][0] == "running" and len(job.ranks.attempts) == 2

    def test_nor_for_so_long_that_the_start_would_be_late(self, bench: Make) -> None:
        job = far_from_its_checkpoint(bench, recovery={"init_timeout_s": 20})
        job.ranks.held.clear()
        job.ranks.unheard = ("keeper-1",)
        job.ranks.lose(1)
        for _ in range(13):
            job.step(1.0)
        job.train(3)
        assert job.settled().states[-1][0] == "running" and len(job.ranks.attempts) == 2

    def test_a_snapshot_that_may_have_been_on_its_way_is_not_waited_for(self, bench: Make) -> None:
        job = bench()
        job.train(18)
        job.ranks.held = [key for key in job.ranks.held if key.step == 10]
        job.ranks.unheard = ("keeper-1",)
        job.ranks.lose(1)
        job.step()
        job.step()
        restore = job.ranks.attempts[1][0].restore
        assert restore is not None and (restore.step, restore.tier) == (10, "memory")
        assert "keepers_awaited" not in [e.kind for e in job.settled().events]

    def test_a_job_that_has_not_trained_waits_for_nobody(self, bench: Make) -> None:
        job = bench()
        job.ranks.unheard = ("keeper-1",)
        job.train(2)
        assert len(job.ranks.attempts) == 1 and job.ranks.attempts[0][0].restore is None

    def test_what_was_gone_back_from_counts_as_never_written(self) -> None:
        def written(step: int) -> dict[str, Any]:
            return {"kind": "checkpoint_written", "detail": {"step": step}}

        def told(kind: str, to_step: int | None) -> dict[str, Any]:
            return {"kind": kind, "detail": {"to_step": to_step}}

        assert newest_written([]) == 0
        three = [written(10), written(20), written(15)]
        assert newest_written([*three, told("rollback", None)]) == 20
        assert newest_written([*three[:2], told("rollback", 12), three[2]]) == 15
        assert newest_written([*three, told("restart", 12)]) == 10
        assert newest_written([*three, told("rollback", 0)]) == 0
        assert newest_written([*three, told("way_back_missed", 12)]) == 20
