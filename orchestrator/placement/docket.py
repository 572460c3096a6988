"""What comes of the accusations of nodes: who is left out, for whom, and for how long. Pure.

A node is accused by what its ranks did, or by preflight; what is stored of that decides. Promises:
a quarantine that the controller decided has an end, and a longer one each time it comes back; a job
can't cost a cluster its nodes, nor can the controller's own machine: where ranks of a job die on
node after node, it is the job; what preflight says of most nodes alike is told of what they have in
common, and costs that job alone its nodes; the only node that a job could run on is left in use, at
least for other jobs; what it takes grows with the nodes and with what is held against them, not
with the one times the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from launch.preflight import OF_LINKS, OF_THE_MACHINE, Check
from orchestrator.placement.accusation import Accusation, AccusationKind
from orchestrator.placement.checks import Checked
from orchestrator.placement.placement import NodeCapacity
from orchestrator.placement.quarantine import ByMachine, Quarantine, barring, names_of
from orchestrator.spec.config import QuarantineConfig


@dataclass(frozen=True, slots=True)
class Dismissed:
    """An accusation that changes nothing (yet)."""

    why: str
    news: bool = False
    """Whether it would have counted, which people should know."""


@dataclass(frozen=True, slots=True)
class Shared:
    """An accusation that holds of so many nodes that it is what they have in common, not they."""

    entry: Quarantine
    """For the job alone."""
    nodes: int
    """Of which the same is said."""
    look_at: str
    """What a person has to look at."""
    taken_back: tuple[Quarantine, ...]
    """Those decided before it was known."""


@dataclass(frozen=True, slots=True)
class _Common:
    """That a check failed on most nodes."""

    nodes: int
    look_at: str
    decided: tuple[Quarantine, ...]
    """Before it was known, and not taken back yet."""


_LOOK_AT: Mapping[Check, str] = {
    **dict.fromkeys(("folder", "disk"), "the job's storage"),
    **dict.fromkeys(("clock_ahead", "clock_behind"), "the clock of the controller's machine"),
    **dict.fromkeys(
        OF_LINKS,
        "the network between the job's nodes, and a node that is part of every link which failed",
    ),
    **dict.fromkeys(
        ("answer", "probe"),
        "the job's storage, and the network between the controller's machine and the nodes",
    ),
}
"""What nodes have in common that fail a check; of the others ``_LOOK_AT_LAST``."""
_LOOK_AT_LAST = "what the job brings to its nodes, and what was installed on all of them of late"


_Kind = tuple[AccusationKind, Check]
"""What is said of a node, whatever was measured."""


class Docket:
    """What is held against nodes, while the accusations of a job are judged one after the other."""

    def __init__(
        self,
        job: str,
        past: Sequence[Accusation],
        quarantines: Iterable[Quarantine],
        nodes: Sequence[NodeCapacity],
        config: QuarantineConfig,
        *,
        now: float,
        checks: Sequence[Checked] = (),
        cleared: Collection[tuple[int, str]] = (),
    ) -> None:
        """``past``: accusations of ``window_s`` and those that are judged; ``quarantines``: those
        in force, those that the machines ever had, and those that the job has cost within the
        window; ``nodes``: those that are large enough for a seat of the job; ``checks``: what
        preflight came to in the job's attempts within the window; ``cleared``: (attempt, node)
        that it accused there and that are not at fault: what came of that is ``withdrawn``."""
        self._job = job
        self._config = config
        self._now = now
        self._checks = checks
        self._nodes = len(nodes)
        held = [
            a
            for a in past
            if a.job != job or a.kind != "preflight" or (a.attempt, a.node_id) not in cleared
        ]
        self._past = held
        self._by_check: dict[_Kind, list[Accusation]] = {}
        for one in held:
            if one.kind in ("preflight", "unfit"):
                self._by_check.setdefault((one.kind, one.check), []).append(one)
        self._common: dict[_Kind, _Common | None] = {}
        self._against = ByMachine(quarantines)
        no_fault = set(past) - set(held)
        self.withdrawn = self._decided_by(no_fault, ("preflight", "unfit"), now)
        for entry in self.withdrawn:
            self._against.drop(entry)
        self._able: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for node in nodes:
            for name in names_of(node.node_id, node.address):
                self._able.setdefault(name, []).append((node.node_id, node.address))
        barred = barring(self._against.every(), nodes, job, now)
        self._free = {node.node_id for node in nodes} - barred.keys()

    def judge(self, case: Accusation) -> Quarantine | Shared | Dismissed:
        """What comes of an accusation, which those that are judged after it know."""
        found = self._judged(case)
        if isinstance(found, Shared):
            for entry in found.taken_back:
                self._take_back(entry)
        if not isinstance(found, Dismissed):
            entry = found.entry if isinstance(found, Shared) else found
            self._against.add(entry)
            if entry.keeps_out(self._job, self._now):
                self._free -= self._concerned(entry).keys()
        return found

    def at_fault_after_all(self) -> list[Quarantine]:
        """Of the job's nodes that failed a check, each in an attempt of its own, and were left to
        other jobs: those that, by what has passed it since, are not most of its nodes any more. As
        if that had been known at once; in the order in which they failed."""
        found = []
        together = Counter((one.attempt, one.check) for one in self._past if one.job == self._job)
        for case in self._past:
            # What many nodes fail at once passes for all of them: it tells nothing of each.
            if together[case.attempt, case.check] > 1:
                continue
            machines = self._against.of(case.node_id, case.address)
            if not self._let_off(case, machines) or self._in_common(case) is not None:
                continue
            told = case.message.rstrip(". ")
            why = f"{told}; it was left to other jobs at first, and as many nodes have passed since"
            entry = _left_out(case, "preflight", why, machines, self._config)
            if entry.active(self._now) and self._free - self._concerned(entry).keys():
                found.append(entry)
                self._against.add(entry)
                self._free -= self._concerned(entry).keys()
        return found

    def _let_off(self, case: Accusation, machines: Sequence[Quarantine]) -> bool:
        """Whether the controller, and no person, left the node to other jobs, and it has not passed
        what it failed since."""
        if case.job != self._job or case.kind != "preflight" or case.check == "unknown":
            return False
        later = [one for one in self._checks if one.attempt > case.attempt]
        if any(case.node_id in one.passed(case.check) for one in later):
            return False
        came = [q for q in machines if q.job == case.job and q.since == case.time]
        if any(q.kind == "preflight" and not q.taken_back for q in came):
            return False
        return any(q.taken_back if q.kind == "preflight" else not q.released_at for q in came)

    def _take_back(self, entry: Quarantine) -> None:
        self._against.drop(entry)
        for node_id, address in self._concerned(entry).items():
            others = self._against.of(node_id, address)
            if not any(other.keeps_out(self._job, self._now) for other in others):
                self._free.add(node_id)

    def _concerned(self, entry: Quarantine) -> dict[str, str]:
        """Nodes that are the machine, with their addresses."""
        names = names_of(entry.node_id, entry.address)
        return {node_id: at for name in names for node_id, at in self._able.get(name, ())}

    def _judged(self, case: Accusation) -> Quarantine | Shared | Dismissed:
        machines = self._against.of(case.node_id, case.address)
        if any(q.active(case.time) and _holds(q, case.kind, case.job) for q in machines):
            return Dismissed("it is quarantined for that already")
        told = case.message.rstrip(". ")
        others = bool(self._free - {case.node_id})
        if case.kind in ("ranks_lost", "corruption", "slow") and not others:
            why = f"no other node has room for its ranks, so it stays in use ({told})"
            return Dismissed(why, news=case.kind == "corruption")
        if case.kind == "ranks_lost":
            lost = self._lost(case, machines)
            if isinstance(lost, Dismissed):
                return lost
            told = f"ranks on it were lost {lost} times; the last time: {told}"
        if case.kind in ("preflight", "unfit"):
            common = self._in_common(case)
            if common is not None:
                return self._shared(case, common, machines)
        if case.kind == "preflight" and not others:
            why = f"{told}; no other node has room for {case.job}, and it is left out for it alone"
            return _left_out(case, "unfit", why, machines, self._config)
        return _left_out(case, case.kind, told, machines, self._config)

    def _lost(self, case: Accusation, machines: Sequence[Quarantine]) -> int | Dismissed:
        """Attempts within the window in which the machine lost ranks, where they are enough."""
        since = case.time - self._config.window_s
        seen = [a for a in self._past if a.kind == case.kind and _same_machine(a, case)]
        attempts = {(a.job, a.attempt) for a in seen if since < a.time <= case.time}
        if len(attempts) < self._config.ranks_lost:
            enough = self._config.ranks_lost
            return Dismissed(f"{len(attempts)} of quarantine.ranks_lost = {enough}")
        if any(
            q.kind == case.kind and q.job == case.job and q.since > since and q not in machines
            for q in self._against.every()
        ):
            why = "ranks of this job died on another node as often: it is the job"
            return Dismissed(why, news=True)
        return len(attempts)

    def _in_common(self, case: Accusation) -> _Common | None:
        """What most nodes have in common of which the same is said as of that of ``case``; None
        where it is alone with it, or they are few."""
        said = case.kind, case.check
        if said not in self._common:
            alike = self._said_of_most(case)
            self._common[said] = self._common_of(case, alike) if alike else None
        return self._common[said]

    def _said_of_most(self, case: Accusation) -> list[Accusation]:
        """The accusations that say the same of most nodes: of those that the job had, or of the
        cluster's."""
        kind, check = case.kind, case.check
        if check == "unknown":
            return []
        alike = self._by_check.get((kind, check), [])
        # Two nodes may well fail these by chance.
        of_itself = check in OF_THE_MACHINE
        # What other jobs can't use for want of the same is nothing to this one.
        if kind == "preflight" and len(_machines(alike)) > max(1 + of_itself, self._nodes / 2):
            return alike
        if of_itself:
            return []
        mine = [a for a in alike if a.job == case.job]
        failed = _machines(mine)
        # By whatever name the accusations know it: one that failed it as well has not passed.
        at = {a.node_id: a.address or a.node_id for a in mine}
        passed = {at.get(node, node) for one in self._checks for node in one.passed(check)}
        return mine if len(failed) > max(1, len(passed - failed)) else []

    def _common_of(self, case: Accusation, alike: Sequence[Accusation]) -> _Common:
        # What it is for this job alone stays so.
        preflight = case.kind == "preflight"
        decided = self._decided_by(alike, [case.kind], case.time) if preflight else ()
        look_at = _LOOK_AT.get(case.check, _LOOK_AT_LAST)
        return _Common(len(_machines(alike)), look_at, decided)

    def _decided_by(
        self, cases: Iterable[Accusation], kinds: Collection[AccusationKind], now: float
    ) -> tuple[Quarantine, ...]:
        """Quarantines in force that came of these."""
        shown = {(a.job, a.time, *name) for a in cases for name in names_of(a.node_id, a.address)}
        return tuple(
            q
            for q in self._against.every()
            if q.kind in kinds
            and q.active(now)
            and any((q.job, q.since, *name) in shown for name in names_of(q.node_id, q.address))
        )

    def _shared(self, case: Accusation, common: _Common, machines: Sequence[Quarantine]) -> Shared:
        """``machines``: as for ``_left_out``."""
        why = (
            f"{case.message.rstrip('. ')}; {common.nodes} nodes failed alike, so it is left out "
            f"for {case.job} alone: look at {common.look_at}"
        )
        entry = _left_out(case, "unfit", why, machines, self._config)
        self._common[case.kind, case.check] = replace(common, decided=())
        return Shared(entry, common.nodes, common.look_at, common.decided)


def _left_out(
    case: Accusation,
    kind: AccusationKind,
    why: str,
    machines: Sequence[Quarantine],
    config: QuarantineConfig,
) -> Quarantine:
    """``machines``: the quarantines that the machine ever had."""
    before = sum(_holds(q, kind, case.job) and not q.taken_back for q in machines)
    longest_s = config.unfit_longest_s if kind == "unfit" else config.longest_s
    seconds = min(_term(kind, config) * 2.0**before, longest_s)
    if case.rehearsed:
        why, seconds = f"rehearsed by a drill: {why}", config.rehearsed_s
    return Quarantine(
        node_id=case.node_id,
        address=case.address,
        kind=kind,
        reason=f"{why[0].upper()}{why[1:]}.",
        by="",
        job=case.job,
        since=case.time,
        until=case.time + seconds,
    )


def _same_machine(entry: Quarantine | Accusation, case: Accusation) -> bool:
    same_address = bool(entry.address) and entry.address == case.address
    return entry.node_id == case.node_id or same_address


def _holds(entry: Quarantine, kind: AccusationKind, job: str) -> bool:
    """Whether it is of this kind, and concerns the job."""
    return entry.kind == kind and (kind != "unfit" or entry.job == job)


def _machines(cases: Sequence[Accusation]) -> set[str]:
    """Those that they are of; Ray's id changes, and an address isn't always known."""
    at = {case.node_id: case.address for case in cases if case.address}
    return {at.get(case.node_id, case.node_id) for case in cases}


def _term(kind: AccusationKind, config: QuarantineConfig) -> float:
    terms: dict[AccusationKind, float] = {
        "ranks_lost": config.ranks_lost_s,
        "corruption": config.corruption_s,
        "slow": config.slow_s,
        "preflight": config.preflight_s,
        "unfit": config.unfit_s,
    }
    return terms[kind]
