"""What the controller tells of itself."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from orchestrator.api.models.fields import example


class Health(BaseModel):
    """A controller that answers."""

    model_config = example({"status": "ok"})

    status: Literal["ok"]
