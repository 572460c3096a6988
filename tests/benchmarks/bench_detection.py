"""How soon trouble is seen, how much is missed, and how often a healthy step is struck.

The same records go to Octavo's detectors and to the published rules of others with their own
defaults (``published_rules``). A trouble's delay is counted from its onset: 0 is the very
step. A strike before an onset, or in a healthy trace, is a false alarm; one that falls on the same
step without the trouble has not seen it, and counts for nothing. What follows a strike
is not modelled: records go on, so a rule that strikes on and on is counted each time, while an
incident of Octavo's holds for ``settle_steps``.

    python -m tests.benchmarks.bench_detection [--traces FOLDER] [--steps N] [--out DIR]

Real traces are recorded once a folder (some minutes on two cores); without one they are left out.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from monitoring.config import DetectionConfig
from monitoring.detectors import DetectorBank
from monitoring.records import StepRecord
from tests.benchmarks.detection_traces import AFTER, Trace, healthy, recorded, troubled
from tests.benchmarks.published_rules import PUBLISHED, Rule
from tests.benchmarks.results import OCTAVO, Result, add_arguments, at_most, measured, report


class Octavo:
    """All detectors, with a spec's defaults."""

    name = "Octavo"

    def __init__(self) -> None:
        self._bank = DetectorBank(DetectionConfig(exchange_error=0.04), guessing_loss=math.log(256))

    def observe(self, record: StepRecord) -> bool:
        """Whether there is an incident."""
        return bool(self._bank.observe(record))


RULES: tuple[type[Rule], ...] = (Octavo, *PUBLISHED)


@dataclass(slots=True)
class Score:
    """One rule on all traces of one case."""

    delays: list[int] = field(default_factory=list)
    misses: int = 0
    alarms: int = 0
    healthy_steps: int = 0

    def take(self, trace: Trace, strikes: Sequence[int]) -> None:
        """Count the steps at which the rule struck on ``trace``."""
        onset = trace.onset
        before = [step for step in strikes if onset is None or step < onset]
        self.alarms += len(before)
        self.healthy_steps += len(trace.records) if onset is None else onset
        if onset is None:
            return
        found = next((step - onset for step in strikes if onset <= step < onset + AFTER), None)
        if found is None:
            self.misses += 1
        else:
            self.delays.append(found)

    def told(self) -> str:
        """The median delay, with the number of traces missed."""
        if not self.delays:
            return "missed"
        delay = f"{statistics.median(self.delays):g}"
        return f"{delay} ({self.misses} missed)" if self.misses else delay


def strikes(rule: Rule, records: Iterable[StepRecord]) -> list[int]:
    """Steps at which ``rule`` strikes."""
    return [record.step for record in records if rule.observe(record)]


def scores(traces: Iterable[Trace]) -> dict[str, dict[str, Score]]:
    """Case → rule → its score."""
    found: dict[str, dict[str, Score]] = defaultdict(lambda: defaultdict(Score))
    on_twins: dict[tuple[str, int], set[int]] = {}
    for trace in traces:
        for rule in RULES:
            twin = (rule.name, id(trace.twin))
            if twin not in on_twins:
                on_twins[twin] = set(strikes(rule(), trace.twin))
            by_chance = on_twins[twin]
            struck = [
                step
                for step in strikes(rule(), trace.records)
                if step < (trace.onset or 0) or step not in by_chance
            ]
            found[trace.case][rule.name].take(trace, struck)
    return found


def leads(traces: Iterable[Trace]) -> list[int]:
    """Steps by which Octavo was ahead of the loss, where amax moves first."""
    ahead = []
    for trace in traces:
        if trace.loss_moves is not None and trace.onset is not None:
            seen = [s for s in strikes(Octavo(), trace.records) if s >= trace.onset]
            ahead.append(trace.loss_moves - seen[0] if seen else -AFTER)
    return ahead


def main() -> int:
    """Print the tables; 1 if Octavo missed a case or struck on a healthy step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, help="folder of the real traces")
    parser.add_argument("--steps", type=int, default=2000, help="of each healthy control")
    add_arguments(parser)
    options = parser.parse_args()
    began = time.monotonic()
    made = list(troubled())
    real = list(recorded(options.traces)) if options.traces else []
    sick = [t for t in (*made, *real) if t.onset is not None]
    sound = [t for t in (*healthy(options.steps), *real) if t.onset is None]
    by_case = scores(sick)
    print("Steps from onset to the first strike, median over seeds; missed: none within "
          f"{AFTER} steps.\n")  # fmt: skip
    _table("trouble", {c: {r: s.told() for r, s in of.items()} for c, of in by_case.items()})
    calm = scores(sound)
    print("\nFalse alarms, each step struck counted.\n")
    alarms = {c: {r: str(s.alarms) for r, s in of.items()} for c, of in calm.items()}
    steps = {c: next(iter(of.values())).healthy_steps for c, of in calm.items()}
    _table("healthy", {f"{c} ({steps[c]:,} steps)": of for c, of in alarms.items()})
    print()
    rows = rows_of(by_case, calm, leads(made))
    left_out = (
        {} if options.traces else {"real traces": "give --traces FOLDER, where they are kept"}
    )
    seconds = time.monotonic() - began
    report("bench_detection", rows, options.out, seconds=seconds, left_out=left_out)
    missed = [case for case, of in by_case.items() if of[Octavo.name].misses]
    false = [c for c, of in {**by_case, **calm}.items() if of[Octavo.name].alarms]
    print("Octavo misses: " + ("; ".join(missed) or "none"))
    print("Octavo strikes on healthy steps of: " + ("; ".join(false) or "none"))
    return int(bool(missed or false))


def rows_of(
    sick: dict[str, dict[str, Score]], sound: dict[str, dict[str, Score]], ahead: Sequence[int]
) -> list[Result]:
    """Of each rule over all cases: what it misses, how soon it sees the rest, its false alarms."""
    rows = []
    for rule in RULES:
        ours = rule is Octavo
        side = OCTAVO if ours else rule.name
        none = at_most(0) if ours else None
        met = [of[rule.name] for of in sick.values()]
        every = [*met, *(of[rule.name] for of in sound.values())]
        delays = [d for score in met for d in score.delays]
        missed = sum(score.misses for score in met)
        steps = sum(score.healthy_steps for score in every)
        alarms = sum(score.alarms for score in every)
        traces = f"{missed + len(delays)} troubles of {len(sick)} kinds"
        healthy = f"{steps:,} healthy steps"
        rate = 1e4 * alarms / steps
        name = "steps from the onset of a trouble to the first strike"
        rows += [
            measured("troubles missed", traces, [missed], "", side=side, aim=none),
            measured(name, traces, delays, "", side=side),
            measured("false alarms in 10,000 steps", healthy, [rate], "", side=side, aim=none),
        ]
    rows.append(measured("steps ahead of the loss", "gradual growth of amax", ahead, ""))
    return rows


def _table(head: str, rows: dict[str, dict[str, str]]) -> None:
    names = [rule.name for rule in RULES]
    print(f"| {head} | {' | '.join(names)} |")
    print(f"|---{'|---' * len(names)}|")
    for case, of in rows.items():
        print(f"| {case} | {' | '.join(of[name] for name in names)} |")


if __name__ == "__main__":
    raise SystemExit(main())
