"""CPUs that can be had: what actors and placement groups hold, and what an execution waits for in vain."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray._private.state import state
from ray.core.generated import gcs_pb2
from ray.data._internal.execution.execution_callback import ExecutionCallback
from ray.util.placement_group import placement_group_table

_logger = logging.getLogger("lance_ray_stream")

# An execution that gets no rows for so long is looked into. It is fed otherwise, or fails, soon after.
PATIENCE_S = 10.0
# One that gets no rows because all CPUs are busy says so.
_WARN_AFTER_S = 30.0


class CpusHeldError(RuntimeError):
    """An execution asks for CPUs that it cannot get as long as the actors and placement groups of the cluster live."""


def cpus_not_held() -> float:
    """CPUs that no actor and no placement group holds, on the node that has the most of them.

    No task that asks for more can run now, or as long as those live; one that runs shows that there are as many. CPUs
    that are busy with tasks count: those end.

    Reason: Ray's public numbers count what is free at the moment, whoever has the rest and for how long.
    """
    left = {node: resources.get("CPU", 0.0) for node, resources in state.total_resources_per_node().items()}
    for node, cpus in _held():
        if node in left:
            left[node] -= cpus
    return max(left.values(), default=0.0)


def _held() -> Iterator[tuple[str, float]]:
    """Node and CPUs of each bundle, and of each actor in none."""
    for group in placement_group_table().values():
        if group["state"] == "CREATED":
            for index, node in group["bundles_to_node_id"].items():
                yield node, group["bundles"][index].get("CPU", 0.0)
    for serialized in state._connect_and_get_accessor().get_actor_table(None, "ALIVE"):
        actor = gcs_pb2.ActorTableData.FromString(serialized)  # type: ignore[attr-defined]
        if not actor.placement_group_id:
            yield actor.address.node_id.hex(), actor.required_resources.get("CPU", 0.0)


def nodes_may_come() -> bool:
    """Whether the cluster's autoscaler, if it has one, may start nodes with more CPUs."""
    at_most = (state.get_max_resources_from_cluster_config() or {}).get("CPU", 0)
    return float(at_most) > float(ray.cluster_resources().get("CPU", 0.0))


class WatchCpus(ExecutionCallback):
    """Ends an execution that waits for CPUs which it cannot get.

    Reason: Ray's time limit for executions without progress does not ask why there is none: it would also end one that
    waits for its consumer, or for a slow transform.
    """

    _progress: Any = None
    _since = _look_at = 0.0
    _warned = False

    def before_execution_starts(self, executor: Any) -> None:
        """Ray calls this when all parts are there and no task has run."""
        self._begin_anew(executor)

    def on_execution_step(self, executor: Any) -> None:
        """Ray calls this several times a second, in the execution's own thread; what it raises ends the execution."""
        now = time.monotonic()
        if _progress(executor) != self._progress:
            self._begin_anew(executor)
        elif now >= self._look_at:
            self._look_at = now + PATIENCE_S
            self._look(executor, stalled_s=now - self._since)

    def _begin_anew(self, executor: Any) -> None:
        self._progress = _progress(executor)
        self._since = time.monotonic()
        self._look_at = self._since + PATIENCE_S

    def _look(self, executor: Any, *, stalled_s: float) -> None:
        waiting = dict(_waiting(executor))
        if not waiting:  # for its consumer
            return
        left = cpus_not_held()
        if max(waiting.values()) > left and not nodes_may_come():
            raise CpusHeldError(f"{waiting} need more CPUs than the {left:g} that nobody holds")
        free = ray.available_resources().get("CPU", 0.0)
        if max(waiting.values()) > free and stalled_s >= _WARN_AFTER_S and not self._warned:
            self._warned = True
            more = " or for new nodes" if nodes_may_come() else ""
            needs = ", ".join(f"{operator} needs {cpus:g}" for operator, cpus in waiting.items())
            _logger.warning(
                "No rows have come for %.0f s: %s, and the cluster has %g free CPUs; on one node, %g are held by no "
                "actor and no placement group. Waiting for tasks to end%s.",
                stalled_s,
                needs,
                free,
                left,
                more,
            )


def _progress(executor: Any) -> list[tuple[int, int, int]]:
    counts = (operator.metrics for operator in executor._topology)
    return [(count.num_outputs_taken, count.num_task_outputs_generated, count.num_tasks_finished) for count in counts]


def _waiting(executor: Any) -> Iterator[tuple[str, float]]:
    """The operators that have something to do, and the CPUs that a task, or an actor to begin with, asks for."""
    for operator in executor._topology:
        pools = operator.get_autoscaling_actor_pools()
        for pool in pools:
            if pool.num_pending_actors() and not pool.num_running_actors():
                yield operator.name, float(pool.per_actor_resource_usage().cpu)
        if not pools and operator.num_active_tasks():
            yield operator.name, float(operator.incremental_resource_usage().cpu)
