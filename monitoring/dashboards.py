"""The W&B dashboard of a job as code: what people look for in an FP8 run, in sections.

Promises: it draws metrics that the run logs (``monitoring.metrics``), all over ``train/step``, for
the job's run alone; made without a network. Saving it takes W&B's server: tried against its JSON
and a stand-in of its API, not against the service.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from monitoring import metrics

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Section, Workspace

COLUMNS = 24
"""Width of a section in W&B's grid."""


def workspace(job: str, entity: str, project: str) -> Workspace:
    """The dashboard of the run ``job``."""
    from wandb_workspaces import expr
    from wandb_workspaces import workspaces as ws

    return ws.Workspace(
        entity=entity,
        project=project,
        name=f"Octavo {job}",
        sections=_sections(),
        settings=ws.WorkspaceSettings(x_axis=metrics.STEP),
        # The run's id is the job's, through all its attempts.
        runset_settings=ws.RunsetSettings(filters=[expr.Metric("ID") == job]),
    )


def workspace_json(board: Workspace) -> dict[str, Any]:
    """What is sent to W&B when the dashboard is saved, but for the ids that it gives."""
    told: dict[str, Any] = board._to_model().model_dump(mode="json", by_alias=True)
    return told


def _sections() -> list[Section]:
    from wandb_workspaces import workspaces as ws
    from wandb_workspaces.reports.v2 import Layout, MediaBrowser, WeavePanelSummaryTable

    comm = metrics.COMM
    tables = (metrics.INCIDENTS_TABLE, metrics.ACTIONS_TABLE, metrics.SKIP_LEDGER_TABLE)
    return [
        ws.Section(
            name="Training",
            is_open=True,
            panels=[
                # A timeline begins where training went back: the marks of recovery.
                _lines("Loss, and timelines", [metrics.LOSS, metrics.TIMELINE], 0, 0, 12),
                _lines("Gradient norm", [metrics.GRAD_NORM], 12, 0, 12, log_y=True),
                _lines("Learning rate", [metrics.LR], 0, 6, 8),
                _lines("Tokens a second", [metrics.TOKENS_PER_SEC], 8, 6, 8),
                _lines("Step time, s; skipped", [metrics.STEP_TIME_S, metrics.SKIPPED], 16, 6, 8),
                _lines("MFU, % (with resources.device)", [metrics.MFU_PCT], 0, 12, 8),
            ],
        ),
        ws.Section(
            name="FP8",
            is_open=True,
            panels=[
                _lines("Least headroom, octaves", [metrics.WORST_HEADROOM], 0, 0, 8),
                _lines("Most clamped, %", [metrics.WORST_SATURATED], 8, 0, 8),
                _lines("Most flushed to zero, %", [metrics.WORST_UNDERFLOW], 16, 0, 8),
                _family("Headroom of the worst tensors, octaves", "headroom_octaves", 0, 12),
                _family("Amax of the worst tensors", "amax", 12, 12, log_y=True),
                MediaBrowser(
                    title="Clamped values and rise of amax by layer and step; BF16",
                    media_keys=[metrics.HEAT_MAP],
                    num_columns=1,
                    layout=Layout(x=0, y=12, w=COLUMNS, h=12),
                ),
                *(
                    _lines(f"All tensors: {name.rpartition('/')[2]}", [name], 8 * i, 24, 8)
                    for i, name in enumerate(metrics.HISTOGRAMS)
                ),
                _lines("Amax most above its usual, octaves", [metrics.WORST_RISE], 0, 30, 8),
            ],
        ),
        ws.Section(
            name="Recovery",
            is_open=True,
            panels=[
                _lines("Linears in BF16", [metrics.HIGH_PRECISION_LAYERS], 0, 0, 8),
                _lines("Attempt and rollbacks", [metrics.ATTEMPT, metrics.ROLLBACKS], 8, 0, 8),
                _lines("Steps done again", [metrics.STEPS_LOST], 16, 0, 8),
                _lines("Goodput (ETTR)", [metrics.ETTR], 0, 6, 12),
                _lines("Slowest recovery, s", [metrics.TIME_TO_RECOVER_S], 12, 6, 12),
                *(
                    WeavePanelSummaryTable(table_name=name, layout=_place(0, 12 + 6 * i, COLUMNS))
                    for i, name in enumerate(tables)
                ),
            ],
        ),
        ws.Section(
            name="Communication",
            panels=[
                _lines("Bytes a step", [f"{comm}bytes"], 0, 0, 8),
                _lines("Compression against BF16", [f"{comm}compression_ratio"], 8, 0, 8),
                _lines("Rounding error of the exchange", [f"{comm}relative_error"], 16, 0, 8),
                _lines("Gbit/s", [f"{comm}busbw_gbps"], 0, 6, 12),
                _lines(
                    "Seconds: casts and wire",
                    [f"{comm}{part}_s" for part in ("quantize", "wire", "dequantize")],
                    12,
                    6,
                    12,
                ),
            ],
        ),
    ]


def _lines(
    title: str, names: Sequence[str], x: int, y: int, width: int, *, log_y: bool = False
) -> Any:
    from wandb_workspaces.reports.v2 import LinePlot

    place = _place(x, y, width)
    # None: W&B's own default.
    return LinePlot(title=title, x=metrics.STEP, y=list(names), layout=place, log_y=log_y or None)


def _family(title: str, what: str, x: int, width: int, *, log_y: bool = False) -> Any:
    """One line a tensor, of all tensors that the run tells of."""
    from wandb_workspaces.reports.v2 import LinePlot

    return LinePlot(
        title=title,
        x=metrics.STEP,
        metric_regex=f"fp8/(?!worst/).*/{what}",
        layout=_place(x, 6, width),
        log_y=log_y or None,
    )


def _place(x: int, y: int, width: int) -> Any:
    from wandb_workspaces.reports.v2 import Layout

    return Layout(x=x, y=y, w=width, h=6)
