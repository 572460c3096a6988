"""A local Ray of the test's own, ended with the module that asked for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """Ray on this machine with eight logical CPUs, namespace ``octavo``."""
    import ray

    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        namespace="octavo",
        log_to_driver=False,
        configure_logging=False,
    )
    yield
    ray.shutdown()
