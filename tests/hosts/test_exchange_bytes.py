"""What a gradient exchange sends, as the hosts' network interfaces count it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.hosts.exchanges import exchange
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
