"""What is left in a job's folder when it comes to rest: ``summary.json`` and ``report.html``.

Promises: a reader never sees half of a file; what an attempt that was given up still has to say,
however late it wakes up, never stands in place of what a later one said.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launch.attempt_folder import put_file
from monitoring.job_view import JobView

LIGHT_RECORDS = 100_000
"""Newest steps that a report is of."""
WHOLE_RECORDS = 512
"""Those of them whose per-tensor statistics it has."""


def write_closing(view: JobView, folder: Path, attempt: int) -> dict[str, Any]:
    """Write both, as ``attempt``; the summary. Raises OSError, and AttemptOverError where a later
    attempt has the job."""
    from monitoring.report import render_report
    from monitoring.summary import summarize

    summary = summarize(view)
    told = json.dumps(summary, indent=2, allow_nan=False) + "\n"
    put_file(folder, attempt, "summary.json", told)
    put_file(folder, attempt, "report.html", render_report(view))
    return summary
