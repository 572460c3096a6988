"""W&B's heat map: the worst of each column's steps, at a bounded size, and in words."""

from __future__ import annotations

import base64
import dataclasses
import io
import re

import numpy as np
import pytest
from PIL import Image

from monitoring import metrics
from monitoring.heat_image import COLUMNS, PALETTE, HeatImage
from monitoring.tensor_stats import TensorColumns
from tests.unit.monitoring_traces import FALLEN, healthy_trace, recovered_view


def picture(page: str) -> np.ndarray:
    """[rows, columns, 3] of the page's picture."""
    found = re.search(r'src="data:image/png;base64,([^"]+)"', page)
    assert found is not None
    with Image.open(io.BytesIO(base64.b64decode(found[1]))) as image:
        return np.asarray(image.convert("RGB"))


def colour(number: int) -> list[int]:
    return list(bytes.fromhex(PALETTE[number][1:]))


def test_cells_have_the_colours_of_the_report() -> None:
    view = recovered_view()
    heat = HeatImage()
    for record in view.steps:
        heat.add(record)
    page = heat.html()
    cells = picture(page)
    assert cells.shape == (16, 120, 3), "two steps a column"
    fallen = list(view.steps[0].tensors).index(f"{FALLEN[0]}/input") // 3
    assert cells[fallen, 45].tolist() == colour(0), "steps 90 and 91 were clamped"
    assert cells[fallen, 60].tolist() == colour(7), "steps 120 and 121 were in BF16"
    assert cells[fallen, 100].tolist() == cells[0, 20].tolist() == colour(6)
    assert "FP8 range of 16 layers, steps 0 to 239; a column is 2 steps" in page
    assert f"<li>{FALLEN[0]}: clamped 88 % in step 9" in page


def test_a_page_is_bounded_whatever_a_long_run_of_many_layers_does() -> None:
    rng = np.random.default_rng(0)
    names = tuple(f"layers.{i}.mlp.down/input" for i in range(1000))
    heat = HeatImage()
    base = healthy_trace(1, layers=())[0]
    for step in range(0, 60_000, 211):
        columns = TensorColumns(
            names,
            amax=np.exp(rng.normal(0.0, 1.0, 1000)),
            scale=np.full(1000, 100.0),
            saturated_pct=rng.random(1000) * 20,
            underflow_pct=np.zeros(1000),
            nonfinite=np.zeros(1000, dtype=np.int64),
            sqnr_db=np.full(1000, np.nan),
            calibrated=np.ones(1000, dtype=np.bool_),
        )
        heat.add(dataclasses.replace(base, step=step, tensors=columns))
    page = heat.html()
    rows, wide, _ = picture(page).shape
    assert rows == 1000 and COLUMNS / 2 <= wide <= COLUMNS
    assert len(page) < 120_000


def test_names_are_escaped_and_nothing_outside_is_needed() -> None:
    record = healthy_trace(2, layers=("<script>alert(1)</script>",))[1]
    heat = HeatImage()
    assert heat.html() == ""
    heat.add(record)
    assert "<script" not in heat.html() and "http" not in heat.html()


@pytest.mark.parametrize("name", metrics.HISTOGRAMS)
def test_every_calibrated_tensor_in_fp8_counts_once_in_each_histogram(name: str) -> None:
    record = healthy_trace(3)[2]
    counts, edges = metrics.histograms(record, "HYBRID")[name]
    assert (sum(counts), len(edges)) == (len(record.tensors), len(counts) + 1)
    away = dataclasses.replace(record, high_precision_layers=FALLEN)
    counts, _ = metrics.histograms(away, "HYBRID")[name]
    assert sum(counts) == len(record.tensors) - 6
    assert metrics.histograms(healthy_trace(1)[0], "HYBRID") == {}, "no scale is made from data"
