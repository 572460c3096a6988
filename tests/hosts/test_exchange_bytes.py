"""What a gradient exchange sends, as the hosts' network interfaces count it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.hosts.exchanges import exchange, train
from tests.hosts.network import Network

NUMEL = 1 << 24


@pytest.mark.parametrize("hosts", [2, 3])
def test_fp8_sends_half_of_bf16_and_a_quarter_of_fp32(
    make_network: Callable[[int], Network], hosts: int
) -> None:
    network = make_network(hosts)
    sent = {
        dtype: exchange(network, [dtype], NUMEL, 1).sent_bytes for dtype in ("fp8", "bf16", "fp32")
    }
    assert sent["fp8"] <= 0.52 * sent["bf16"], sent
    assert sent["fp8"] <= 0.26 * sent["fp32"], sent
    numel = NUMEL - NUMEL % hosts
    part = exchange(network, ["fp8"], numel, 1, scattered=True).sent_bytes
    assert part <= 0.26 * sent["bf16"], "under ZeRO 1 a quarter of a BF16 all-reduce"
    # As much as the arithmetic says, so that the counters have counted the whole exchange.
    assert sent["fp8"] >= 2 * (hosts - 1) / hosts * NUMEL, sent


BF16 = {"data_types": {"grad_accum_dtype": "bf16"}}
PLAIN: list[dict[str, Any]] = [{"zero_stage": n} for n in (0, 1, 2)]
STAGED: list[dict[str, Any]] = [{"zero_stage": 1}, {"zero_stage": 1, "deepspeed": BF16}]


@pytest.mark.parametrize(
    ("hosts_of", "degrees", "options"),
    [
        ((0, 1), {}, PLAIN),
        # What replicas exchange crosses the network, and nothing between stages and tensor ranks.
        ((0, 1, 0, 1), {"pipeline": 2}, STAGED),
        ((0, 0, 1, 1), {"tensor": 2}, STAGED),
    ],
    ids=["plain", "PP2", "TP2"],
)
def test_a_step_sends_what_it_says(
    make_network: Callable[[int], Network],
    hosts_of: tuple[int, ...],
    degrees: dict[str, int],
    options: list[dict[str, Any]],
) -> None:
    cases = [
        {**degrees, **case, "communication_data_type": dtype}
        for case in options
        for dtype in ("fp8", "fp32")
    ]
    results = train(make_network(2), hosts_of, cases, tied=bool(degrees))
    for case, fp8, fp32 in zip(options, results[::2], results[1::2], strict=True):
        # The difference, since a step sends more than gradients: weights, losses, maxima.
        sent = fp32.sent_bytes - fp8.sent_bytes
        said = fp32.reported_bytes - fp8.reported_bytes
        assert 0.99 < sent / said < 1.08, (case, fp8, fp32)
        assert fp8.reported_bytes < 0.27 * fp32.reported_bytes, case
