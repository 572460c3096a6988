"""The controller of a home on a Ray cluster of several hosts that somebody else started.

    eval "$(python -m orchestrator.cluster.on_ray --environment)"  on every host, before `ray start`
    python -m orchestrator.cluster.on_ray HOME --address HOST:PORT [--listen ADDRESS] [--hosts N]

Run the second on the host where the controller is to live, which is the one that the store is
on: as a rule Ray's head. It ends when the controller answers, and says where. With Ray's tables in
a Redis (``cluster.head``) the head may be lost and started again; a controller on another host
then lives on, and one on the head is started again like this, and the jobs go on either way.
Promises: a controller that runs already is found, not doubled; with ``--hosts`` it waits until so
many have joined; a home that is new gets a controller that waits for nodes rather than fail what
exceeds those there are, for a host that is lost may come back.
``--environment`` prints what every ``ray start`` of such a cluster should have; its token is Ray's
own, the same on every host (`ray get-auth-token --generate`, ~/.ray/auth_token, 0600).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import socket
import time
from pathlib import Path

from orchestrator.cluster.environment import CLUSTER_ENVIRONMENT
from orchestrator.home.folder import Home, HomeConfig
from orchestrator.home.listening import ListeningError, check_listening

JOIN_TIMEOUT_S = 120.0
"""Seconds that hosts may take to join."""


def start_on(address: str, home: Home, hosts: int) -> str:
    """Join the Ray at ``address``, start the controller of ``home`` here; its URL.

    Raises TimeoutError when there aren't ``hosts`` nodes in time, ConnectionError without Ray.
    """
    import ray

    from orchestrator.cluster.controller_actor import start_controller
    from orchestrator.protocol import NAMESPACE

    ray.init(
        address=address,
        namespace=NAMESPACE,
        log_to_driver=False,
        configure_logging=False,
        # Else Ray asks the route to the Internet, and where there is none takes any node's.
        _node_ip_address=address_towards(address),
    )
    try:
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while (here := sum(node["Alive"] for node in ray.nodes())) < hosts:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{here} of {hosts} hosts joined {address} in {JOIN_TIMEOUT_S} s"
                )
            time.sleep(0.1)
        return start_controller(home)
    finally:
        with contextlib.suppress(Exception):
            ray.shutdown()


def address_towards(address: str) -> str:
    """This host's own address on the way to ``HOST:PORT``. Raises OSError without a way."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: connecting such a socket only looks up the route.
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


def main() -> None:
    """Entry of ``python -m orchestrator.cluster.on_ray``."""
    parser = argparse.ArgumentParser(description="start the controller of HOME on a Ray cluster")
    parser.add_argument("home", type=Path, nargs="?")
    parser.add_argument("--address", help="of Ray's head, as 10.0.0.1:6379")
    parser.add_argument("--environment", action="store_true", help="print it for a shell, and end")
    parser.add_argument(
        "--listen", default="127.0.0.1", help="of a new home: where the API is to listen"
    )
    for file in ("cert", "key"):
        parser.add_argument(f"--tls-{file}", type=Path, help="of a new home: PEM file for TLS")
    parser.add_argument(
        "--plain-http", action="store_true", help="of a new home: listen on ADDRESS without TLS"
    )
    parser.add_argument("--hosts", type=int, default=1, help="wait for so many")
    arguments = parser.parse_args()
    if arguments.environment:
        print("\n".join(f"export {key}={shlex.quote(v)}" for key, v in CLUSTER_ENVIRONMENT.items()))
        return
    if arguments.home is None or arguments.address is None:
        parser.error("HOME and --address are needed: whose controller, and on which Ray")
    # Ray's settings must be those of the nodes.
    os.environ.update({k: v for k, v in CLUSTER_ENVIRONMENT.items() if k not in os.environ})
    home = Home(arguments.home)
    if not (home.path / "config.json").exists():
        config = HomeConfig(
            host=arguments.listen,
            fixed_cluster=False,
            tls_cert=arguments.tls_cert and arguments.tls_cert.absolute(),
            tls_key=arguments.tls_key and arguments.tls_key.absolute(),
            plain_http=arguments.plain_http,
        )
        try:
            check_listening(config)
        except ListeningError as error:
            parser.error(str(error))
        home.create(config)
    url = start_on(arguments.address, home, arguments.hosts)
    home.write_ray_address(arguments.address)
    print(f"ready {url}", flush=True)


if __name__ == "__main__":
    main()
