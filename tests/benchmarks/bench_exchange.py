"""The FP8 gradient exchange against torch's BF16 all-reduce, between hosts on shaped links.

    python -m tests.benchmarks.bench_exchange [--hosts 2 4] [--rates 100mbit 1gbit none]
        [--millions 1 16 64] [--counted 16] [--repeats 3] [--out DIR]

Hosts are network namespaces of this machine (root and iproute2), one rank and one thread each,
so that the processors are shared as well where there are more hosts than cores: then the casts
of one host wait for another's, which real hosts don't. The two take turns in one run; times are
the slowest rank's. Bytes are the hosts' interfaces' own count, headers and all, of ``--counted``
million elements; ``scattered``: each host takes the mean of its own part, as under ZeRO 1.
A cell whose ranks die or don't end is counted as failed or hung.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from functools import partial

from tests.benchmarks.results import (
    OCTAVO,
    Result,
    add_arguments,
    at_least,
    at_most,
    measured,
    report,
)
from tests.hosts.exchanges import bounded, exchange
from tests.hosts.network import Network, why_not

AIMS = {"100mbit": at_least(1.9), "1gbit": at_least(1.6)}
"""BF16's time over FP8's."""
SIDES = {"fp32": "torch FP32 all-reduce", "bf16": "torch BF16 all-reduce", "fp8": f"{OCTAVO} FP8"}
LIMIT_S = 1800.0
"""Of one cell."""
FAULTS = (RuntimeError, TimeoutError, subprocess.SubprocessError)
"""What hosts and their ranks end with."""


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "none"])
    parser.add_argument("--millions", type=float, nargs="+", default=[1, 16, 64])
    parser.add_argument("--counted", type=float, default=16, help="millions of elements")
    parser.add_argument("--repeats", type=int, default=3)
    add_arguments(parser)
    asked = parser.parse_args()
    began = time.monotonic()
    reason = why_not()
    rows: list[Result] = []
    if not reason:
        for hosts in asked.hosts:
            rows += bytes_rows(hosts, asked.counted)
            for rate in asked.rates:
                for millions in asked.millions:
                    rows += time_rows(hosts, rate, millions, asked.repeats)
    left_out = {"hosts on shaped links": reason} if reason else {}
    seconds = time.monotonic() - began
    report("bench_exchange", rows, asked.out, seconds=seconds, left_out=left_out)


def time_rows(hosts: int, rate: str, millions: float, repeats: int) -> list[Result]:
    """Seconds of both, and BF16's over FP8's in each repeat."""
    link = "no limit" if rate == "none" else rate
    setting = f"{hosts} hosts, {link}, {millions:g} M elements"
    row = partial(measured, setting=setting)
    try:
        with Network(hosts) as network, bounded(network, LIMIT_S):
            network.shape(rate=None if rate == "none" else rate)
            took = exchange(network, ["bf16", "fp8"], _numel(millions), repeats).repeats
    except FAULTS as error:
        print(f"{setting}: {error}", flush=True)
        hung = isinstance(error, TimeoutError)
        return [
            row(TIME, values=[], unit="s", failures=int(not hung), hangs=int(hung), note=str(error))
        ]
    ratios = [bf16 / fp8 for bf16, fp8 in zip(took["bf16"], took["fp8"], strict=True)]
    return [
        *(row(TIME, values=took[way], unit="s", side=SIDES[way]) for way in took),
        row("… BF16's over FP8's", values=ratios, unit="×", aim=AIMS.get(rate)),
    ]


TIME = "gradient exchange"


def bytes_rows(hosts: int, millions: float) -> list[Result]:
    """What one host sends, and FP8's over that of the others."""
    sent: dict[str, float] = {}
    rows: list[Result] = []
    setting = f"{hosts} hosts, {millions:g} M elements"
    row = partial(measured, setting=setting)
    for way, dtype, scattered in (
        ("fp32", "fp32", False),
        ("bf16", "bf16", False),
        ("fp8", "fp8", False),
        ("scattered", "fp8", True),
    ):
        try:
            with Network(hosts) as network, bounded(network, LIMIT_S):
                told = exchange(network, [dtype], _numel(millions), 1, scattered=scattered)
        except FAULTS as error:
            print(f"{setting}, {way}: {error}", flush=True)
            hung = isinstance(error, TimeoutError)
            missed = {"failures": int(not hung), "hangs": int(hung)}
            rows.append(
                row(SENT, values=[], unit="MB", side=SENDERS[way], note=str(error), **missed)
            )
        else:
            sent[way] = told.sent_bytes / 1e6
            rows.append(row(SENT, values=[sent[way]], unit="MB", side=SENDERS[way]))
    for name, way, base, aim in (
        ("… FP8's over BF16's", "fp8", "bf16", 0.52),
        ("… FP8's over FP32's", "fp8", "fp32", 0.26),
        ("… scattered FP8's over BF16's", "scattered", "bf16", 0.26),
    ):
        # Without one of the two it is a row without a value, which meets no aim.
        values = [sent[way] / sent[base]] if way in sent and base in sent else []
        rows.append(row(name, values=values, unit="×", aim=at_most(aim)))
    return rows


SENT = "gradient exchange, a host sends"
SENDERS = {**SIDES, "scattered": f"{OCTAVO} FP8, scattered"}


def _numel(millions: float) -> int:
    return int(millions * 2**20)


if __name__ == "__main__":
    main()
