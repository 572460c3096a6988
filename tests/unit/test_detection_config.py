"""The bounds of the ``detection`` section."""

from __future__ import annotations

import math

import pytest
from pydantic import ValidationError

from monitoring.config import MOST, DetectionConfig


@pytest.mark.parametrize("key", MOST)
def test_a_count_of_steps_beyond_its_bound_is_refused_with_the_reason(key: str) -> None:
    most, why = MOST[key]
    assert getattr(DetectionConfig.model_validate({key: most}), key) == most
    with pytest.raises(ValidationError, match=f"more than {most}: {why}"):
        DetectionConfig.model_validate({key: most + 1})


def test_every_count_of_steps_has_a_bound() -> None:
    counts = {
        name
        for name, field in DetectionConfig.model_fields.items()
        if field.annotation is int and not name.endswith("patience")
    }
    assert counts == set(MOST)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_limit_that_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(ValidationError):
        DetectionConfig(loss_sigmas=value)
