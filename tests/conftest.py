"""What every test gets: one thread a process, no W&B login, no proxy, Ray's usage reports off."""

from __future__ import annotations

import os

# Set before torch or ray is imported anywhere: ranks share two cores with each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("WANDB_MODE", "offline")

from hypothesis import settings

# In CI the same examples every time: a change is judged, not the luck of the draw.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "search")
