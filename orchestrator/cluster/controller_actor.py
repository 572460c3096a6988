"""The controller as a process: a detached, named Ray actor that Ray restarts.

Promises: what was accepted is still there after a restart, at the same address; the
calls of supervisors (``ControllerPort``) and the HTTP API reach the same ``Controller``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

from orchestrator.controller.controller import Controller
from orchestrator.controller.supervisors import RaySupervisors
from orchestrator.controller.webhooks import Webhooks
from orchestrator.home.folder import Home, Server
from orchestrator.home.listening import Certificate, check_listening
from orchestrator.home.lock import HomeLock
from orchestrator.nodes.groups import RayNodeGroups
from orchestrator.protocol import (
    CONTROLLER_ACTOR,
    NAMESPACE,
    Acknowledgement,
    JobHistory,
    PastMark,
    ResumeState,
    SupervisorBatch,
)
from orchestrator.store.database import Store

logger = logging.getLogger(__name__)

START_S = 180.0
"""Seconds until a controller must answer: in a new environment every module is compiled."""
LOCK_S = 30.0
"""Seconds that the controller before this one may take to end."""
CONCURRENCY = 32
"""Calls of supervisors at once; a slow one must not hold up the others."""


class ControllerActor:
    """Serves the home at ``home``; ``supervisor`` replaces the supervisors' class in tests.

    Raises HomeTakenError when another controller, on whatever cluster, has that home.
    """

    def __init__(self, home: str, supervisor: type | None = None) -> None:
        import uvicorn

        from orchestrator.api.access import TokenFile
        from orchestrator.api.app import create_app

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
        self._home = Home(Path(home))
        # One that was killed has let go of it already, one that ends does so in a moment.
        self._lock = HomeLock(self._home, "controller")
        self._lock.take(LOCK_S)
        config = self._home.config()
        check_listening(config)
        token = self._home.token(create=True)
        assert token, "token(create=True) gives one"
        self._controller = Controller(
            Store(self._home.store_url),
            RayNodeGroups(),
            RaySupervisors(supervisor or _supervisor_class()),
            self._home.jobs_dir,
            fixed_cluster=config.fixed_cluster,
            quarantine=config.quarantine,
        )
        listening = self._listen(config.host, config.port)
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        scheme = "http" if config.tls_cert is None else "https"
        self._server = Server(f"{scheme}://{shown}:{port}", port, os.getpid())
        app = create_app(self._controller, TokenFile(self._home), config.rate)
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ssl_certfile=config.tls_cert,
            ssl_keyfile=config.tls_key,
        )
        serve = uvicorn.Server(settings)
        if config.tls_cert is not None and config.tls_key is not None:
            certificate = Certificate(config.tls_cert, config.tls_key)
            threading.Thread(
                # Of uvicorn's, which it makes when it starts.
                target=certificate.keep,
                args=(lambda: getattr(settings, "ssl", None), threading.Event()),
                name="certificate",
                daemon=True,
            ).start()
        threading.Thread(
            target=serve.run, kwargs={"sockets": [listening]}, name="api", daemon=True
        ).start()
        threading.Thread(
            target=self._controller.run, args=(threading.Event(),), name="reconcile", daemon=True
        ).start()
        webhooks = Webhooks(self._controller.store)
        threading.Thread(
            target=webhooks.run,
            args=(threading.Event(), self._controller.changes.wait),
            name="webhooks",
            daemon=True,
        ).start()
        if config.standby:
            self._keep_standby(config.standby)
        self._home.write_server(self._server)

    def ping(self) -> bool:
        """True; standby workers end themselves when nobody answers."""
        return True

    def url(self) -> str:
        """Where the API listens."""
        return self._server.url

    def pid(self) -> int:
        """Process id of this controller."""
        return os.getpid()

    def next_attempt(self, job: str, attempt: int, reason: str) -> ResumeState:
        """``ControllerPort.next_attempt``."""
        return self._controller.next_attempt(job, attempt, reason)

    def history(self, job: str, after: PastMark | None = None) -> JobHistory:
        """``ControllerPort.history``."""
        return self._controller.history(job, after)

    def report(self, job: str, attempt: int, batch: SupervisorBatch) -> Acknowledgement:
        """``ControllerPort.report``."""
        return self._controller.report(job, attempt, batch)

    def _keep_standby(self, per_node: int) -> None:
        import ray

        from launch.standby import StandbyPool

        pool = StandbyPool(ray.get_runtime_context().current_actor, per_node)
        threading.Thread(target=pool.run, name="standby", daemon=True).start()

    def _listen(self, host: str, port: int) -> socket.socket:
        """A listening socket: the port asked for, or the one it had before a restart."""
        before = self._home.server()
        wanted = [port] if port else [before.port if before else 0, 0]
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        for number in wanted:
            listening = socket.socket(family, socket.SOCK_STREAM)
            # The connections of the controller before may still be closing.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listening.bind((host, number))
                listening.listen(128)
            except OSError:
                listening.close()
                if number == wanted[-1]:
                    raise
            else:
                return listening
        raise AssertionError("the last port either binds or raises")


def start_controller(
    home: Home, supervisor: type | None = None, *, timeout_s: float = START_S
) -> str:
    """Start the controller of ``home`` on this process' Ray, or find it; returns its URL.

    It stays on this node, where its store and its address are, through all its restarts. One that
    Ray still knows of a node that is lost is replaced. Raises TimeoutError.
    """
    import ray

    deadline = time.monotonic() + timeout_s
    while True:
        found = _known_controller()
        actor = _new_controller(home, supervisor) if found is None else found
        try:
            left = max(0.0, deadline - time.monotonic())
            return str(ray.get(actor.url.remote(), timeout=left))
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(
                f"the controller of {home.path} did not answer in {timeout_s:.0f} s; Ray's logs of "
                "it (worker-*.err of its session) say why"
            ) from None
        except ray.exceptions.ActorDiedError:
            # Its name is free again within a moment. What fails anew would fail for ever.
            if found is None or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _known_controller() -> Any | None:
    import ray

    with contextlib.suppress(ValueError):
        return ray.get_actor(CONTROLLER_ACTOR, namespace=NAMESPACE)
    return None


def _new_controller(home: Home, supervisor: type | None) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return (
        ray.remote(ControllerActor)
        .options(
            name=CONTROLLER_ACTOR,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=CONCURRENCY,
            # Of two that find none, one makes it.
            get_if_exists=True,
            scheduling_strategy=here,
        )
        .remote(str(home.path), supervisor)
    )


def _supervisor_class() -> type:
    from orchestrator.supervision.supervisor import Supervisor

    return Supervisor
