"""The report as a browser shows it, on a screen and on a phone.

Needs chromium (Debian: `apt-get install chromium`). One page with the report in two widths is
opened twice, for its layout and for a picture of it.
"""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from monitoring.report import render_report
from tests.unit.monitoring_traces import eventful_view

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
WIDTHS = {"screen": 1280, "phone": 390}
HEIGHT = 4600

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium to look at the report with (apt-get install chromium)"
)

MEASURE = """
const told = {};
for (const frame of document.querySelectorAll("iframe")) {
  const page = frame.contentDocument;
  const seen = e => e.getClientRects().length > 0;
  const box = e => { const r = e.getBoundingClientRect(); return [r.x, r.y, r.width, r.height]; };
  const before = page.documentElement.scrollWidth;
  const place = {};
  for (const section of page.querySelectorAll("section")) {
    const title = section.querySelector("h2");
    if (title) place[title.textContent] = box(section);
  }
  const charts = [...page.querySelectorAll("svg[role=img]")].filter(seen);
  const labels = charts.map(c => c.getAttribute("aria-label"));
  const legends = [...page.querySelectorAll(".legend svg rect")].filter(seen).map(
    r => [r.getAttribute("class"), box(r)]);
  const outside = [];
  for (const chart of charts) {
    const own = chart.getBoundingClientRect();
    for (const word of chart.querySelectorAll("text")) {
      const r = word.getBoundingClientRect();
      if (r.left < own.left - 1 || r.right > own.right + 1) outside.push(word.textContent);
    }
  }
  const overlaps = [];
  for (const chart of charts) {
    const words = [...chart.querySelectorAll("text")].map(
      w => [w.textContent, w.getBoundingClientRect()]);
    for (let i = 0; i < words.length; i++) for (let j = i + 1; j < words.length; j++) {
      const [a, b] = [words[i][1], words[j][1]];
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 1 && high > 4) overlaps.push([words[i][0], words[j][0]]);
    }
  }
  for (const hidden of page.querySelectorAll("details")) hidden.open = true;
  told[frame.id] = {before, opened: page.documentElement.scrollWidth,
    inner: frame.contentWindow.innerWidth, text: page.body.innerText, place, labels, legends,
    outside, overlaps};
}
const note = document.createElement("script");
note.type = "application/json"; note.id = "told";
note.textContent = JSON.stringify(told).replaceAll("<", "\\\\u003c");
document.body.append(note);
"""


def chromium(folder: Path, page: Path, *asked: str) -> str:
    assert CHROMIUM is not None
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
        *("--virtual-time-budget=2000", f"--user-data-dir={folder}/profile"),
        *(f"--window-size={sum(WIDTHS.values()) + 20},{HEIGHT}", *asked, page.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page that holds the report in both widths."""
    folder = tmp_path_factory.mktemp("browser")
    source = html.escape(render_report(eventful_view()), quote=True)
    frames = "".join(
        f'<iframe id="{name}" srcdoc="{source}" style="border:0;width:{width}px;'
        f'height:{HEIGHT}px"></iframe>'
        for name, width in WIDTHS.items()
    )
    body = f'<body style="margin:0;white-space:nowrap">{frames}'
    script = f"<script>onload=()=>{{{MEASURE}}}</script>"
    page = folder / "host.html"
    page.write_text(f"<!doctype html><meta charset=utf-8>{body}{script}", encoding="utf-8")
    return page


@pytest.fixture(scope="module")
def told(host: Path) -> dict[str, Any]:
    """What the browser says of the report's layout, by frame."""
    dom = chromium(host.parent, host, "--dump-dom")
    found = re.search(r'<script type="application/json" id="told">(.*?)</script>', dom, re.S)
    assert found is not None
    answer: dict[str, Any] = json.loads(found[1])
    assert set(answer) == set(WIDTHS)
    return answer


@pytest.fixture(scope="module")
def picture(host: Path) -> npt.NDArray[np.uint8]:
    """[height, width, 3], 0 to 255: both frames beside each other."""
    from PIL import Image

    file = host.parent / "shot.png"
    # Details stay closed: no script runs.
    plain = host.with_name("plain.html")
    plain.write_text(host.read_text().partition("<script>")[0], encoding="utf-8")
    chromium(host.parent, plain, f"--screenshot={file}")
    with Image.open(file) as shot:
        return np.asarray(shot.convert("RGB"))


@pytest.mark.parametrize("frame", WIDTHS)
def test_all_that_a_reader_looks_for_is_there(told: dict[str, Any], frame: str) -> None:
    text = told[frame]["text"]
    for word in (
        *("Loss", "What happened", "Where the time went", "Gradient norm", "Precision map"),
        *("FP8 range by layer and step", "Environment", "Configuration", "Summary"),
        *("productive", "lost", "recovering", "waiting", "wall time", "in the queue"),
        *("Rank died", "FP8 saturation and amax surge and loss spike", "torch", "2.13.0"),
    ):
        assert word in text, word
    charts = " | ".join(told[frame]["labels"])
    assert "Training loss in nats a token: 5.4" in charts and "undone steps reached" in charts
    assert "Where the time went: productive" in charts
    # What the charts show is told in words too.
    assert re.search(r"layers\.2\.mlp\.down\s+\d+ % in step 9\d", text)
    assert re.search(r"layers\.2\.mlp\.gate_up\s+80 to 149", text)


@pytest.mark.parametrize("frame", WIDTHS)
def test_nothing_scrolls_sideways_or_lies_over_other_text(told: dict[str, Any], frame: str) -> None:
    page = told[frame]
    assert page["inner"] == WIDTHS[frame]
    assert page["before"] <= WIDTHS[frame] and page["opened"] <= WIDTHS[frame]
    assert page["outside"] == [], "texts that leave their chart"
    assert page["overlaps"] == []


def test_the_picture_has_the_colours_where_they_belong(
    told: dict[str, Any], picture: npt.NDArray[np.uint8]
) -> None:
    def near(area: npt.NDArray[np.uint8], colour: tuple[int, int, int]) -> float:
        """Share of an area in a colour."""
        return float((np.abs(area.astype(int) - colour).max(axis=-1) < 24).mean())

    blue, red, orange, stripe = (0, 114, 178), (194, 65, 12), (224, 138, 60), (86, 180, 233)
    dark_red = (127, 29, 29)
    for frame, left in (("screen", 0), ("phone", WIDTHS["screen"])):

        def area(title: str, frame: str = frame, left: int = left) -> npt.NDArray[np.uint8]:
            x, y, width, height = map(round, told[frame]["place"][title])
            assert y + height < HEIGHT, f"{title} isn't in the picture"
            return picture[y : y + height, left + x : left + x + width]

        assert near(area("Loss"), blue) > 0.002, "the line of kept steps"
        assert near(area("Loss"), orange) > 0.0002, "undone steps"
        assert near(area("Where the time went"), blue) > 0.02, "productive time"
        assert near(area("Where the time went"), red) > 0.001, "recovering"
        assert near(area("FP8 range by layer and step"), dark_red) > 0.0002, "clamped"
        assert near(area("Gradient norm"), dark_red) < 0.00005
        assert near(area("Precision map"), stripe) > 0.001, "BF16"
        assert near(area("Gradient norm"), (255, 255, 255)) > 0.5


def test_uses_and_troubles_differ_without_colour_too(
    told: dict[str, Any], picture: npt.NDArray[np.uint8]
) -> None:
    """In grey, a swatch of a pattern has more than one tone and a plain one has one."""
    grey = picture.astype(float) @ np.array([0.299, 0.587, 0.114])
    for kind, (x, y, width, height) in told["screen"]["legends"]:
        area = grey[round(y) + 2 : round(y + height) - 2, round(x) + 3 : round(x + width) - 3]
        plain = kind in ("h3", "h4", "h5", "h6", "u-productive")
        assert (area.std() < 2.0) == plain, kind
