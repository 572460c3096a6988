"""A W&B run's tables of incidents, actions and batches left out.

Promises: a row a thing, in words that W&B can sort and filter; of very many the newest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from monitoring import metrics
from monitoring.job_view import Row

MOST_ROWS = 500
"""Newest rows of a table, which is written anew whenever it changes."""


def wandb_tables(incidents: Sequence[Row], actions: Sequence[Row]) -> dict[str, Any]:
    """The tables by metric name."""
    import wandb

    left_out = [row for action in actions[-MOST_ROWS:] for row in _ledger_rows(action)]
    return {
        metrics.SKIP_LEDGER_TABLE: wandb.Table(
            columns=["batch", "step", "kind", "asked_by", "reason"], data=left_out[-MOST_ROWS:]
        ),
        metrics.INCIDENTS_TABLE: wandb.Table(
            columns=["step", "onset", "kind", "message", "suspects"],
            data=[_incident_row(row) for row in incidents[-MOST_ROWS:]],
        ),
        metrics.ACTIONS_TABLE: wandb.Table(
            columns=["step", "kind", "to_step", "reason", "precision", "passed_over", "asked_by"],
            data=[action_row(row) for row in actions[-MOST_ROWS:]],
        ),
    }


def _incident_row(row: Row) -> list[Any]:
    suspects = ", ".join(suspect["layer"] for suspect in row.get("suspects", ()))
    return [row["step"], row["onset_step"], row["kind"], row["message"], suspects]


def _ledger_rows(row: Row) -> list[list[Any]]:
    """The batches that an action left out, one a row, and why: W&B can sort and filter them."""
    by = (row.get("asked") or {}).get("by", "")
    why = [row["step"], row["kind"], by, row["reason"]]
    return [[batch, *why] for batch in row.get("skip_batches", ())]


def action_row(row: Row) -> list[Any]:
    """An action as a row of its table."""
    moved = dict(row.get("precision", {}))
    if row.get("exchange") is not None:
        moved["gradient exchange"] = row["exchange"]
    precision = ", ".join(f"{k} → {v}" for k, v in moved.items())
    passed = "; ".join(f"{p['rung']}: {p['why']}" for p in row.get("passed_over", ()))
    to_step = row.get("to_step")
    return [
        row["step"],
        row["kind"],
        "" if to_step is None else str(to_step),
        row["reason"],
        precision,
        passed,
        (row.get("asked") or {}).get("by", ""),
    ]
