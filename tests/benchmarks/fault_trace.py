"""Faults at published rates: when, why, and what each takes along. Seeded.

Sources: Llama 3 405B, 54 days on 16,384 GPUs, 419 unexpected interruptions with their causes ("The
Llama 3 Herd of Models", arXiv 2407.21783, table 5); a fault each 7.9 h at 1,024 GPUs and each 1.8 h
at 16,384 (Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research
Clusters", arXiv 2410.21680). What a cause takes along is our reading of its name.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Takes = Literal["process", "node", "hang", "corruption"]

LLAMA3_CAUSES: Mapping[str, tuple[int, Takes]] = {
    "faulty GPU": (148, "node"),
    "GPU HBM3 memory": (72, "node"),
    "software bug": (54, "process"),
    "network switch or cable": (35, "hang"),
    "host maintenance": (32, "node"),
    "GPU SRAM memory": (19, "node"),
    "GPU system processor": (17, "node"),
    "NIC": (7, "node"),
    "NCCL watchdog timeout": (7, "hang"),
    "silent data corruption": (6, "corruption"),
    "GPU thermal interface or sensor": (6, "node"),
    "SSD": (3, "node"),
    "power supply": (3, "node"),
    "server chassis": (2, "node"),
    "IO expansion board": (2, "node"),
    "dependency": (2, "process"),
    "CPU": (2, "node"),
    "system memory": (2, "node"),
}
"""Cause → how often in 54 days, and what it takes along."""
LLAMA3_FAULTS = 419
LLAMA3_S = 54 * 86400.0
LLAMA3_MTTF_S = LLAMA3_S / LLAMA3_FAULTS
GPUS_A_NODE = 8
PARTNER_TOO = 0.02
"""Of node faults, those that take the partner's node with it. An assumption, as in
``orchestrator.planning.intervals.FaultShares.both``."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One of them."""

    time: float
    """Seconds from the job's start."""
    cause: str
    takes: Takes
    node: int
    partner_too: bool
    """The next node goes with it."""


def trace(seconds: float, mttf_s: float, nodes: int, seed: int) -> list[Fault]:
    """Faults of ``seconds``: apart by exponential times of mean ``mttf_s``, causes as Llama 3's."""
    chance = random.Random(seed)
    causes = list(LLAMA3_CAUSES)
    weights = [LLAMA3_CAUSES[cause][0] for cause in causes]
    found: list[Fault] = []
    at = chance.expovariate(1 / mttf_s)
    while at < seconds:
        (cause,) = chance.choices(causes, weights)
        takes = LLAMA3_CAUSES[cause][1]
        both = takes == "node" and chance.random() < PARTNER_TOO
        found.append(Fault(at, cause, takes, chance.randrange(nodes), both))
        at += chance.expovariate(1 / mttf_s)
    return found


def share(takes: Takes) -> float:
    """Of all faults, those that take this along."""
    return sum(count for count, what in LLAMA3_CAUSES.values() if what == takes) / LLAMA3_FAULTS
