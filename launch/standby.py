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
import time
import uuid
from typing import Any

NAMESPACE = "octavo"
ANSWER_S = 5.0
"""Seconds that a worker may take to answer; one that still imports doesn't."""
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


def claim(node_id: str, owner: Any) -> Any:
    """An idle worker of that node, from now on ``owner``'s; None if there is none."""
    import ray

    for actor in _workers(node_id):
        try:
            if ray.get(actor.claim.remote(owner), timeout=ANSWER_S):
                return actor
        except ray.exceptions.RayError as error:
            logger.info("a standby worker does not answer: %s", error)
    return None


def orphans(job: str, owner: Any, answer_s: float = PING_S) -> list[Any]:
    """The job's idle workers of a supervisor before ``owner``, from now on ``owner``'s.

    Those that don't answer (they still import, or they hang) are ended.
    """
    import ray

    asked = {actor.adopt.remote(owner): actor for actor in _named(job_prefix(job))}
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

        created = 0
        for node in ray.nodes():
            resources = node["Resources"]
            if not node["Alive"] or not (resources.get("CPU") or resources.get("GPU")):
                continue
            node_id = node["NodeID"]
            missing = self._per_node - self._idle(node_id)
            if missing <= 0:
                self._full[node_id] = now
            elif now - self._full.get(node_id, 0.0) > REFILL_AFTER_S:
                for _ in range(missing):
                    name = f"{_prefix(node_id)}{uuid.uuid4().hex[:12]}"
                    on_gpu = bool(resources.get("GPU"))
                    create_worker(
                        name, node_id, self._owner, on_gpu=on_gpu, worker_class=self._worker_class
                    )
                self._full[node_id] = now
                created += missing
        return created

    def run(self, interval_s: float = 2.0) -> None:
        """Keep the pool full; never returns, never raises."""
        while True:
            try:
                self.refill(time.monotonic())
            except Exception:
                logger.exception("the standby workers could not be looked after")
            time.sleep(interval_s)

    def _idle(self, node_id: str) -> int:
        """Unclaimed workers; those that still import count."""
        import ray

        asked = [actor.idle.remote() for actor in _workers(node_id)]
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


def _prefix(node_id: str) -> str:
    return f"octavo-standby-{node_id}-"


def _workers(node_id: str) -> list[Any]:
    """The workers that were started as standby on a node, claimed ones included."""
    return _named(_prefix(node_id))


def _named(prefix: str) -> list[Any]:
    """The living actors whose names begin so."""
    import ray

    actors = []
    for entry in ray.util.list_named_actors(all_namespaces=True):
        if entry["namespace"] == NAMESPACE and entry["name"].startswith(prefix):
            try:
                actors.append(ray.get_actor(entry["name"], namespace=NAMESPACE))
            except ValueError:  # it ended meanwhile
                continue
    return actors
