"""Tests on several hosts skip, with the reason, where there can be none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.hosts.network import Network, why_not


@pytest.fixture(scope="session")
def _hosts_work() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def make_network(_hosts_work: None) -> Iterator[Callable[[int], Network]]:
    """Networks of as many hosts as asked for, gone after the test."""
    with ExitStack() as stack:
        yield lambda hosts: stack.enter_context(Network(hosts))
