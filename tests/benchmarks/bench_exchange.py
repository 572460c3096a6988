"""The FP8 gradient exchange against torch's BF16 all-reduce, between hosts on shaped links.

    python -m tests.benchmarks.bench_exchange [--hosts 2 4] [--rates 100mbit 1gbit none]
                                              [--millions 1 4 16 64] [--repeats 5]

Hosts are network namespaces of this machine (root and iproute2), one rank and one thread each,
so that the processors are shared as well where there are more hosts than cores: then the casts
of one host wait for another's, which real hosts don't. The two take turns in one run; times are
medians of the slowest rank's.
"""

from __future__ import annotations

import argparse

from tests.hosts.exchanges import exchange
from tests.hosts.network import Network, why_not


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "none"])
    parser.add_argument("--millions", type=float, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    if reason := why_not():
        print(f"not measured: {reason}")
        return
    print("| hosts | link | elements | BF16 | FP8 | BF16 / FP8 |\n|---|---|---|---|---|---|")
    for hosts in arguments.hosts:
        with Network(hosts) as network:
            for rate in arguments.rates:
                network.shape(rate=None if rate == "none" else rate)
                for millions in arguments.millions:
                    numel = int(millions * 2**20)
                    took = exchange(network, ["bf16", "fp8"], numel, arguments.repeats).seconds
                    print(
                        f"| {hosts} | {rate} | {millions:g} M | {1000 * took['bf16']:.0f} ms | "
                        f"{1000 * took['fp8']:.0f} ms | {took['bf16'] / took['fp8']:.2f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
