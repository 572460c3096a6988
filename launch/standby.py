"""Workers without a job: imported and idle before a job is submitted.

The controller keeps some on every node; the WorkerGroup of a new job claims them, and its
first step comes seconds earlier. A claimed worker belongs to the claimer, whatever
becomes of the controller.

Promises: a worker is claimed by one claimer only; the pool keeps nothing in memory that a
restarted controller would miss, the actors' names are its records. So are those of a job's own
idle workers, which outlive its supervisor for the next one (``orphans``).
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any

from launch.node_calls import names_of_actors

NAMESPACE = "octavo"
POOLED = "octavo-standby-"
"""How the names of workers without a job begin; their node's id follows."""
ANSWER_S = 5.0
"""Seconds that a worker may take to answer; one that still imports doesn't."""
CLAIM_S = 2.0
"""Seconds after which a worker that a job could use is taken to import still."""
PING_S = 0.5
"""The same where a restart waits for it."""
REFILL_AFTER_S = 30.0
"""Seconds between a claim and its replacement: the job that starts needs the cores."""

logger = logging.getLogger(__name__)


def create_worker(
    name: str, node_id: str, owner: Any, *, on_gpu: bool = False, worker_class: type | None = None
) -> Any:
    """A detached worker actor pinned to a node; it ends itself when ``owner`` is gone."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if worker_class is None:
        from launch.worker import Worker

        worker_class = Worker
    options: dict[str, Any] = {}
    if on_gpu:
        # Ray hides the devices of an actor that asks for none; the keeper holds them.
        options["runtime_env"] = {"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}
    return (
        ray.remote(worker_class)
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            max_concurrency=8,
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
            **options,
        )
        .remote(owner)
    )


def claim(wanted: Mapping[str, int], owner: Any) -> dict[str, list[Any]]:
    """Idle workers by node, of each as many as are ``wanted`` there or as there are; from now on
    ``owner``'s. All nodes are asked at once, and waited for once: those that still import stay in
    the pool, for whoever comes later."""
    import ray

    idle = _answering(wanted, _waiting() if wanted else {})
    claimed: dict[str, list[Any]] = {node_id: [] for node_id in wanted}
    deadline = time.monotonic() + ANSWER_S
    while True:
        asked = {}
        for node_id, count in wanted.items():
            for _ in range(min(count - len(claimed[node_id]), len(idle[node_id]))):
                actor = idle[node_id].pop(0)
                asked[actor.claim.remote(owner)] = (node_id, actor)
        if not asked:
            return claimed
        left = max(0.0, deadline - time.monotonic())
        ray.wait(list(asked), num_returns=len(asked), timeout=left)
        for reference, (node_id, actor) in asked.items():
            try:
                if ray.get(reference, timeout=0):
                    claimed[node_id].append(actor)
            except ray.exceptions.GetTimeoutError:
                # It would be ours, and known to nobody.
                threading.Thread(target=_end_if_ours, args=(reference, actor), daemon=True).start()
            except ray.exceptions.RayError as error:
                logger.info("a standby worker does not answer: %s", error)


def _answering(wanted: Mapping[str, int], names: Mapping[str, list[str]]) -> dict[str, list[Any]]:
    """Workers of these names that say that they are idle, by node; no longer waited for than until
    there are as many as ``wanted``."""
    import ray

    asked = {}
    for node_id in wanted:
        left = list(names.get(node_id, []))
        while (actor := _next(left)) is not None:
            asked[actor.idle.remote()] = (node_id, actor)
    idle: dict[str, list[Any]] = {node_id: [] for node_id in wanted}
    waiting, end = list(asked), time.monotonic() + CLAIM_S
    while waiting and (left_s := end - time.monotonic()) > 0:
        missing = sum(max(0, count - len(idle[node_id])) for node_id, count in wanted.items())
        if not missing:
            break
        enough = min(missing, len(waiting))
        done, waiting = ray.wait(waiting, num_returns=enough, timeout=min(0.1, left_s))
        for reference in done:
            node_id, actor = asked[reference]
            try:
                if ray.get(reference):
                    idle[node_id].append(actor)
            except ray.exceptions.RayError as error:
                logger.info("a standby worker is gone: %s", error)
    return idle


def _end_if_ours(claim: Any, actor: Any) -> None:
    """End a worker whose yes comes too late; one that is another's says no."""
    import ray

    try:
        if ray.get(claim):
            ray.kill(actor, no_restart=True)
    except ray.exceptions.RayError as error:
        logger.info("a standby worker is gone: %s", error)


def orphans(job: str, owner: Any, answer_s: float = PING_S) -> list[Any]:
    """The job's idle workers of a supervisor before ``owner``, from now on ``owner``'s.

    Those that don't answer (they still import, or they hang) are ended.
    """
    import ray

    names, asked = names_of_actors(job_prefix(job)), {}
    while (actor := _next(names)) is not None:
        asked[actor.adopt.remote(owner)] = actor
    if not asked:
        return []
    ray.wait(list(asked), num_returns=len(asked), timeout=answer_s)
    adopted = []
    for reference, actor in asked.items():
        try:
            if ray.get(reference, timeout=0):
                adopted.append(actor)
        except ray.exceptions.GetTimeoutError:
            ray.kill(actor, no_restart=True)
        except ray.exceptions.RayError as error:
            logger.info("a worker of the supervisor before is gone: %s", error)
    return adopted


def job_prefix(job: str) -> str:
    """How the names of a job's own workers begin, and no other job's: ids have no colon."""
    return f"octavo-worker-{job}:"


class StandbyPool:
    """``per_node`` idle workers on every node that has slots."""

    def __init__(self, owner: Any, per_node: int, *, worker_class: type | None = None) -> None:
        """``owner``: handle of the actor without which unclaimed workers end themselves."""
        self._owner = owner
        self._per_node = per_node
        self._worker_class = worker_class
        self._full: dict[str, float] = {}

    def refill(self, now: float) -> int:
        """Create what is missing, not right after a claim; how many were created."""
        import ray

        created, names = 0, _waiting()
        for node in ray.nodes():
            resources = node["Resources"]
            if not node["Alive"] or not (resources.get("CPU") or resources.get("GPU")):
                continue
            node_id = node["NodeID"]
            missing = self._per_node - self._idle(names.get(node_id, []))
            if missing <= 0:
                self._full[node_id] = now
            elif now - self._full.get(node_id, 0.0) > REFILL_AFTER_S:
                for _ in range(missing):
                    name = f"{POOLED}{node_id}-{uuid.uuid4().hex[:12]}"
                    on_gpu = bool(resources.get("GPU"))
                    create_worker(
                        name, node_id, self._owner, on_gpu=on_gpu, worker_class=self._worker_class
                    )
                self._full[node_id] = now
                created += missing
        return created

    def run(self, interval_s: float = 2.0) -> None:
        """Keep the pool full; never returns, never raises. On thousands of nodes it is looked at
        less often: a twentieth of the time at most goes into it."""
        while True:
            began = time.monotonic()
            try:
                self.refill(began)
            except Exception:
                logger.exception("the standby workers could not be looked after")
            time.sleep(max(interval_s, 19 * (time.monotonic() - began)))

    def _idle(self, names: list[str]) -> int:
        """How many of these are unclaimed; those that still import count."""
        import ray

        asked = []
        while (actor := _next(names)) is not None:
            asked.append(actor.idle.remote())
        if not asked:
            return 0
        done, waiting = ray.wait(asked, num_returns=len(asked), timeout=ANSWER_S)
        idle = len(waiting)
        for reference in done:
            try:
                idle += bool(ray.get(reference))
            except ray.exceptions.RayError as error:
                logger.info("a standby worker is gone: %s", error)
        return idle


def _waiting() -> dict[str, list[str]]:
    """Names of the workers that were started for no job, by node; claimed ones included. Asked for
    once, for Ray lists all actors that have a name to whoever wants some."""
    found: dict[str, list[str]] = {}
    for name in names_of_actors(POOLED):
        found.setdefault(name.removeprefix(POOLED).rpartition("-")[0], []).append(name)
    return found


def _next(names: list[str]) -> Any:
    """The first of these actors that there still is, taken off the list with those before it; None
    when there is none."""
    import ray

    while names:
        try:
            return ray.get_actor(names.pop(0), namespace=NAMESPACE)
        except ValueError:  # it ended meanwhile
            continue
    return None
