"""What the loss benchmarks say of finished runs, and that they keep them; no run is made here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmarks.bench_curves import EXCHANGES, Case, compared
from tests.benchmarks.demo_runs import Rows, demo_run


@pytest.mark.parametrize(
    ("finals", "against", "said"),
    [
        ([2.0, 2.2], [2.1, 2.3], "overlap"),
        ([2.0, 2.3], [2.1, 2.2], "overlap"),
        ([2.0, 2.1], [2.1, 2.2], "overlap"),
        ([2.0, 2.1], [2.2, 2.3], "apart"),
        ([2.4, 2.5], [2.2, 2.3], "apart"),
        ([2.0], [2.0], "one seed"),
    ],
)
def test_exchanges_overlap_where_their_ranges_over_the_seeds_do(finals, against, said):
    assert compared(finals, against) == said


def test_every_run_has_a_row_of_its_own():
    cases = [
        Case(precision, exchange, seed, steps, replicas)
        for precision in ("fp8", "bf16")
        for exchange in EXCHANGES
        for seed in (0, 1)
        for steps in (240, 5)
        for replicas in (2, 4)
    ]
    assert len({case.key for case in cases}) == len(cases)


def test_rows_outlive_the_process_that_made_them(tmp_path: Path):
    file = tmp_path / "rows.json"
    Rows(file).add("bf16/0/5", 2.5)
    again = Rows(file)
    again.add("bf16/1/5", [2.0, 1.0])
    assert json.loads(file.read_text()) == {"bf16/0/5": 2.5, "bf16/1/5": [2.0, 1.0]}
    assert "bf16/0/5" in again and "bf16/2/5" not in again
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_of_something_else_is_no_file_of_rows(tmp_path: Path):
    file = tmp_path / "rows.json"
    file.write_text("[1, 2]")
    with pytest.raises(ValueError, match=r"rows\.json holds no rows"):
        Rows(file)


@pytest.mark.parametrize("replicas", [1, 2])
def test_replicas_share_the_demos_batch_and_nothing_else_is_changed(replicas: int):
    run = demo_run(7, 30, replicas=replicas, precision="bf16")
    training = run.training
    assert training.train_micro_batch_size_per_gpu is not None
    assert training.gradient_accumulation_steps is not None
    sequences = training.train_micro_batch_size_per_gpu * training.gradient_accumulation_steps
    assert sequences * replicas == training.train_batch_size == 32
    assert (training.seed, training.steps, run.precision, run.drills) == (7, 30, "bf16", ())
    assert (run.parallelism.data, run.parallelism.pipeline) == (replicas, 1)
    assert run.parallelism.zero_stage == 1 and run.communication_data_type == "fp8"


def test_replicas_that_cant_share_the_batch_are_refused():
    with pytest.raises(ValueError, match="3 replicas don't share 32 sequences"):
        demo_run(0, 30, replicas=3)
