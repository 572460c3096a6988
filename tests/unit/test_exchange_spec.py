"""What a spec says of the gradient exchange: its limit, its budget, its automatic choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.commands import ExchangeReport
from monitoring.wandb_tables import action_row
from orchestrator.actions import Action
from orchestrator.recovery.resume import standing
from orchestrator.spec.completion import complete
from orchestrator.spec.errors import Source
from orchestrator.spec.job import JobSpec, spec_of
from tests.unit.scripted_job import Bench
from tests.unit.test_spec import problems_of, spec_with


def completed(**changes: Any) -> JobSpec:
    return complete(JobSpec.model_validate(spec_with(**changes)))


def action(kind: str, exchange: str | None) -> Action:
    return Action(kind, 1, 0, 5, 0.0, "because", exchange=exchange)  # type: ignore[arg-type]


@pytest.mark.parametrize(("format", "limit"), [("e4m3", 0.04), ("e5m2", 0.08)])
def test_the_limit_follows_from_the_format(format: str, limit: float) -> None:
    assert completed(gradient_exchange__format=format).detection.exchange_error == limit


def test_a_word_that_is_none_is_refused_once_with_all_that_there_are() -> None:
    (problem,) = problems_of(spec_with(communication_data_type="FP8")).values()
    assert (problem.key, problem.value) == ("communication_data_type", "'FP8'")
    assert problem.remedy == "did you mean 'fp8'?; one of auto, bf16, fp32, fp8"


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_that_leave_nothing_for_fp8_are_refused_where_it_is_asked_for(
    tied: bool,
) -> None:
    kept = {"gradient_exchange__high_precision_parameters": ["embedding.*", "layers.*", "head.*"]}
    asked = {**kept, "model__tie_embeddings": tied}
    (problem,) = problems_of(spec_with(**asked)).values()
    assert problem.key == "gradient_exchange.high_precision_parameters"
    assert problem.remedy == "keep fewer, or set communication_data_type: bf16"
    for other in ("auto", "bf16"):
        data = spec_with(**asked, communication_data_type=other)
        spec_of(Source("job.yaml", data, {}), check_data=False)


def test_a_limit_that_is_given_stays() -> None:
    assert completed(detection__exchange_error=0.5).detection.exchange_error == 0.5


def test_more_coarse_steps_than_the_window_has_are_refused() -> None:
    (problem,) = problems_of(
        spec_with(detection__exchange_error_steps=9, detection__exchange_error_window=8)
    ).values()
    assert problem.key == "detection.exchange_error_steps"
    assert problem.remedy == "make it at most 8"


class TestStanding:
    AUTO = JobSpec.model_validate(spec_with(communication_data_type="auto"))
    FP8 = JobSpec.model_validate(spec_with())

    def test_is_the_specs_word_until_an_action_changes_it(self) -> None:
        other = action("lower_lr", None)
        assert standing(self.FP8, [other]).exchange == "fp8"
        assert standing(self.FP8, [action("exchange_bf16", "bf16"), other]).exchange == "bf16"

    def test_of_auto_is_open_until_it_was_measured(self) -> None:
        assert standing(self.AUTO, []).exchange is None
        chosen = action("exchange_chosen", "bf16")
        assert standing(self.AUTO, [chosen]).exchange == "bf16"


def test_wandb_is_told_what_was_measured(tmp_path: Path) -> None:
    job = Bench(tmp_path, communication_data_type="auto")
    told: list[Any] = []

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return lambda *values: told.append((name, *values))

    job.supervision._journal._run_log = Recorder()  # type: ignore[assignment]
    job.step()
    job.supervision.deliver([ExchangeReport(1, 0, 0, 0, 0.0, "fp8", "it is faster")])
    job.step()
    config = {"exchange": "fp8", "exchange_reason": "it is faster"}
    assert ("log_config", config) in told
    (row,) = [value for name, value in told if name == "log_action"]
    assert "gradient exchange → fp8" in action_row(row)
    job.supervision._journal._run_log = None
    job.close()
