"""Gradient exchange: Octavo's engine against DDP with its BF16 and PowerSGD hooks, at equal loss.

    python -m tests.benchmarks.bench_hooks [--steps 240] [--seeds 0 1 2] [--ranks 2 8 32]
        [--shapes demo wide] [--rates 100mbit 1gbit] [--turns 5] [--turn-steps 4]
        [--only losses|wire] [--kept FILE] [--out DIR]

Losses: the demo's model, its linears in BF16, on two data-parallel ranks; every side starts from
the same weights and sees the same batches. The final loss is the mean of the last twenty steps,
its gap the one to the same trainer's FP32 exchange with the same seed. ``other sums`` are controls:
FP32 with micro-batches of half the size, which differ from it by chance alone. An exchange is at
equal loss where its mean gap over the seeds is no larger than the largest of the controls'. Of
PowerSGD's ranks one counts only if all higher ones do.

Wire: the same sides between two hosts (network namespaces, root), in turns at each link rate:
seconds a step and bytes that a host sends in it. Ratios are to Octavo's FP8 of the same turn.
``wide`` has matrices as wide as PowerSGD is meant for; its losses aren't compared. ``--kept``:
losses are kept in that file, and runs in it aren't done again.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks.demo_runs import Rows
from tests.benchmarks.gradient_sides import (
    CONTROLS,
    FP8,
    REFERENCES,
    REPLICAS,
    SHAPES,
    Side,
    losses,
    run_of,
    sides,
)
from tests.benchmarks.gradient_turns import Measured, measure
from tests.benchmarks.peers.turns import Failed
from tests.benchmarks.results import OCTAVO, Result, add_arguments, measured, report
from tests.hosts.network import why_not
from tests.ranks.launch_ranks import RankFailed, run_ranks

LAST = 20
"""Steps at the end whose losses are averaged."""
LONGEST_S = 2 * 3600.0
"""Of one training, and of all turns at one rate."""
LOSS_SHAPE = "demo"

Finals = Mapping[Side, Mapping[int, float | Failed]]
"""Final losses by seed."""


def main() -> None:
    """Print a line a run, then the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=list(SHAPES))
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--turn-steps", type=int, default=4)
    parser.add_argument("--only", choices=("losses", "wire"))
    parser.add_argument("--kept", type=Path, help="JSON file of finished losses, read and written")
    add_arguments(parser)
    asked = parser.parse_args()
    began = time.monotonic()
    every = sides(asked.ranks)
    rows: list[Result] = []
    left_out: dict[str, str] = {}
    equal: Mapping[Side, bool] = {}
    if asked.only != "wire":
        kept = Rows(asked.kept)
        finals = {
            side: {seed: final(side, seed, asked.steps, kept) for seed in asked.seeds}
            for side in (*every, *CONTROLS)
        }
        equal = at_equal_loss(finals)
        rows += loss_rows(finals, equal, asked.steps)
    reason = why_not()
    if asked.only != "losses" and reason:
        left_out["hosts on shaped links"] = reason
    elif asked.only != "losses":
        for shape in asked.shapes:
            of_shape = equal if shape == LOSS_SHAPE else {}
            for rate in asked.rates:
                found = measure(
                    shape,
                    rate,
                    every,
                    turns=asked.turns,
                    steps=asked.turn_steps,
                    limit_s=LONGEST_S,
                )
                for side, turns in found.turns.items():
                    step = statistics.median(turn.seconds for turn in turns)
                    print(f"{shape}, {rate}, {side.name}: {step:.3f} s a step", flush=True)
                for side, why in found.failed.items():
                    print(f"{shape}, {rate}, {side.name}: {why.why}", flush=True)
                rows += wire_rows(shape, rate, every, found, of_shape)
    seconds = time.monotonic() - began
    report("bench_hooks", rows, asked.out, seconds=seconds, left_out=left_out)


def final(side: Side, seed: int, steps: int, kept: Rows) -> float | Failed:
    """The final loss of one training, which is kept where it ended well."""
    key = f"{side.name}/{seed}/{steps}"
    if key not in kept:
        run = run_of(SHAPES[LOSS_SHAPE], side, seed, steps)
        try:
            told = run_ranks(losses, REPLICAS, side, run, timeout_s=LONGEST_S)
        except RankFailed as error:
            print(f"{key}: {error}", flush=True)
            return Failed(str(error), "silent for" in str(error))
        kept.add(key, told[0])
    loss = statistics.fmean(kept[key][-LAST:])
    print(f"{key}: {loss:.4f}", flush=True)
    return loss if math.isfinite(loss) else Failed(f"ended with a loss of {loss}", False)


def gaps(finals: Finals, side: Side) -> list[float]:
    """Percent above the same trainer's FP32 exchange, by the seeds that both have ended."""
    (reference,) = (other for other in REFERENCES if other.trainer == side.trainer)
    pairs = [(loss, finals[reference][seed]) for seed, loss in finals[side].items()]
    return [
        100 * (loss / base - 1)
        for loss, base in pairs
        if isinstance(loss, float) and isinstance(base, float)
    ]


def at_equal_loss(finals: Finals) -> dict[Side, bool]:
    """Whether each side's mean gap is within chance, as the controls show it.

    Of PowerSGD's ranks one counts only if all higher ones do. A side without a gap isn't equal.
    """
    chance = [abs(gap) for control in CONTROLS for gap in gaps(finals, control)]
    equal = {}
    for side in finals:
        own = gaps(finals, side)
        equal[side] = bool(own and chance) and statistics.fmean(own) <= max(chance)
    higher = True
    for side in sorted((s for s in finals if s.exchange == "powersgd"), key=lambda s: -s.rank):
        higher = equal[side] = equal[side] and higher
    return equal


def least_rank(equal: Mapping[Side, bool]) -> int | None:
    """PowerSGD's least rank at equal loss."""
    return min((s.rank for s, is_so in equal.items() if is_so and s.rank), default=None)


def loss_rows(finals: Finals, equal: Mapping[Side, bool], steps: int) -> list[Result]:
    """Final losses, their gaps, and which rank of PowerSGD reaches equal loss."""
    last = min(LAST, steps)
    setting = f"{SHAPES[LOSS_SHAPE].told}, 2 ranks, {steps} steps, mean of the last {last}"
    rows = []
    for side, by_seed in finals.items():
        failed = [value for value in by_seed.values() if isinstance(value, Failed)]
        missed: dict[str, Any] = {
            "failures": sum(not value.hung for value in failed),
            "hangs": sum(value.hung for value in failed),
        }
        found = [value for value in by_seed.values() if isinstance(value, float)]
        rows.append(measured("final loss", setting, found, "nats", side=side.name, **missed))
        own = gaps(finals, side)
        if side in REFERENCES:
            continue
        note = f"mean {statistics.fmean(own):+.2f} %: " if own else ""
        told = "chance" if side.other_sums else "equal" if equal[side] else "not equal"
        name = "final loss, above the trainer's FP32 exchange"
        rows.append(measured(name, setting, own, "%", side=side.name, note=note + told, **missed))
    rank = least_rank(equal)
    tried = ", ".join(str(rank) for rank in sorted({side.rank for side in equal if side.rank}))
    rows.append(
        measured(
            "PowerSGD's least rank at equal loss",
            setting,
            [] if rank is None else [float(rank)],
            "",
            side="DDP PowerSGD hook",
            note=f"{'none' if rank is None else 'least'} of {tried}",
        )
    )
    return rows


def wire_rows(
    shape: str, rate: str, every: Sequence[Side], found: Measured, equal: Mapping[Side, bool]
) -> list[Result]:
    """Seconds and bytes of all sides' steps at one rate, and both over Octavo's FP8's."""
    setting = f"2 hosts, {'no limit' if rate == 'none' else rate}, {SHAPES[shape].told}"
    own = found.turns.get(FP8, [])
    rows = []
    for side in every:
        turns = found.turns.get(side, [])
        why = found.failed.get(side)
        missed: dict[str, Any] = {
            "side": side.name,
            "failures": int(why is not None and not why.hung),
            "hangs": int(why is not None and why.hung),
        }
        note = "" if side not in equal else "equal loss" if equal[side] else "loss not equal"
        row = partial(measured, setting=setting, **missed)
        rows.append(row("a step", values=[turn.seconds for turn in turns], unit="s", note=note))
        sent = [turn.sent_bytes / 1e6 for turn in turns]
        rows.append(row("… a host sends in it", values=sent, unit="MB"))
        if side != FP8:
            pairs = list(zip(turns, own, strict=False))
            ratios = [other.seconds / ours.seconds for other, ours in pairs]
            rows.append(row("… its time over Octavo's FP8's", values=ratios, unit="×"))
    return rows + _fastest(setting, found, equal)


def _fastest(setting: str, found: Measured, equal: Mapping[Side, bool]) -> list[Result]:
    """The fastest of the peers at equal loss, over Octavo's FP8, where that is so too."""
    peers = {s: t for s, t in found.turns.items() if s.trainer != OCTAVO and equal.get(s)}
    own = found.turns.get(FP8, [])
    if not peers or not own or not equal.get(FP8):
        return []
    best = min(peers, key=lambda side: statistics.median(turn.seconds for turn in peers[side]))
    pairs = zip(peers[best], own, strict=True)
    ratios = [other.seconds / ours.seconds for other, ours in pairs]
    name = "the fastest peer at equal loss, its step over Octavo's FP8's"
    return [measured(name, setting, ratios, "×", side=best.name)]


if __name__ == "__main__":
    main()
