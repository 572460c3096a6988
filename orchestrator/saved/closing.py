"""What is left in a job's folder when it comes to rest: ``summary.json`` and ``report.html``.

Promises: a reader never sees half of a file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from monitoring.job_view import JobView

LIGHT_RECORDS = 100_000
"""Newest steps that a report is of."""
WHOLE_RECORDS = 512
"""Those of them whose per-tensor statistics it has."""


def write_closing(view: JobView, folder: Path) -> dict[str, Any]:
    """Write both; the summary. Raises OSError."""
    from monitoring.report import render_report
    from monitoring.summary import summarize

    summary = summarize(view)
    _write(folder / "summary.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")
    _write(folder / "report.html", render_report(view))
    return summary


def _write(path: Path, text: str) -> None:
    """Replace the file in one go."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text)
    partial.replace(path)
