"""What of a cluster's nodes together stands in the way of training.

Each node is examined by itself (``orchestrator.doctor.checks``), its clock is held against this
machine's, and the nodes against each other: versions everywhere, devices within a group. Promises:
pure; what differs is told with the addresses of the nodes on each side; a node that gave no answer
is an error and no pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launch.machine_facts import MachineFacts
from launch.preflight import Answer, Probe, clock_skew_s
from orchestrator.doctor.checks import Level, MachineFinding, examine

MAX_SKEW_S = 5.0
"""As ``preflight.max_clock_skew_s`` by default."""
SAME = ("octavo", "torch", "deepspeed", "ray", "transformer-engine")
"""Packages whose versions must be equal on all nodes."""


@dataclass(frozen=True, slots=True)
class NodeAnswer:
    """A node's facts, with the times here at which it was asked and answered; or why there are
    none."""

    node: str
    """Its address."""
    group: str
    facts: MachineFacts | None
    asked: float = 0.0
    answered: float = 0.0
    error: str = ""


def compare(answers: Sequence[NodeAnswer]) -> list[MachineFinding]:
    """All findings of nodes: each by itself, and together."""
    found: list[MachineFinding] = []
    for answer in answers:
        if answer.facts is None:
            remedy = "`ray list nodes`; a node whose processes hang is started again"
            told = f"no answer: {answer.error}"
            found.append(MachineFinding("node", Level.error, told, remedy, answer.node))
        else:
            found += examine(answer.facts, answer.node)
            found += _skew(answer)
    known = [answer for answer in answers if answer.facts is not None]
    return found + list(_versions(known)) + list(_kinds(known))


def _skew(answer: NodeAnswer) -> Iterator[MachineFinding]:
    assert answer.facts is not None
    probe = Probe(answer.facts.clock, 0, 0, 0, 0, "")
    skew = clock_skew_s(Answer(probe, answer.asked, answer.answered))
    if abs(skew) > MAX_SKEW_S:
        told = f"its clock is {skew:+.1f} s off this machine's"
        yield MachineFinding("clock", Level.error, told, "see to its NTP", answer.node)


def _versions(answers: Sequence[NodeAnswer]) -> Iterator[MachineFinding]:
    for name in ("python", *SAME):
        by_version: dict[str, list[str]] = {}
        for answer in answers:
            assert answer.facts is not None
            have = answer.facts.python if name == "python" else answer.facts.packages.get(name, "–")
            by_version.setdefault(have, []).append(answer.node)
        if len(by_version) > 1:
            told = "; ".join(f"{v} on {', '.join(nodes)}" for v, nodes in by_version.items())
            # An extra of GPU nodes.
            level = Level.warning if name == "transformer-engine" else Level.error
            remedy = "install the same everywhere: one image, or one environment"
            yield MachineFinding("versions", level, f"{name} differs: {told}", remedy)
        elif answers and name == "ray":
            (have,) = by_version
            yield MachineFinding("versions", Level.ok, f"ray {have} on all {len(answers)} nodes")


def _kinds(answers: Sequence[NodeAnswer]) -> Iterator[MachineFinding]:
    """Nodes of one group are alike."""
    groups: dict[str, dict[str, list[str]]] = {}
    for answer in answers:
        assert answer.facts is not None
        found = answer.facts.devices.get("devices", [])
        kind = f"{len(found)} × {found[0]['name']}" if found else "CPU"
        groups.setdefault(answer.group, {}).setdefault(kind, []).append(answer.node)
    for group, kinds in groups.items():
        if len(kinds) > 1:
            told = "; ".join(f"{kind} on {', '.join(nodes)}" for kind, nodes in kinds.items())
            remedy = "nodes of one group are alike: look for a GPU that has fallen off its bus"
            name = f"group {group}" if group else "the nodes"
            yield MachineFinding("devices", Level.error, f"{name} differ: {told}", remedy)
