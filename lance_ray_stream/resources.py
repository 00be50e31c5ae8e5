"""CPUs for the feed: what trainers and others leave, and how to read when they leave none."""

from __future__ import annotations

import warnings
from typing import Any

import ray
from ray.data import ActorPoolStrategy, Dataset, TaskPoolStrategy

from lance_ray_stream import ray_internals
from lance_ray_stream.errors import StreamUsageError
from lance_ray_stream.ray_internals import cluster

# What Ray Data asks for a task or an actor that names nothing.
_DEFAULT_CPUS = 1.0


def cpus_left(world_size: int) -> float:
    """CPUs of the cluster that ``world_size`` trainers like this process do not hold."""
    context = ray.get_runtime_context()
    own = context.get_assigned_resources().get("CPU", 0.0) if context.get_actor_id() else 0.0
    return float(ray.cluster_resources().get("CPU", 0.0)) - world_size * own


def fit_into(dataset: Dataset, name: str, *, world_size: int, waited: bool = False) -> Dataset:
    """``dataset``, made to run where trainers and other actors or placement groups hold all CPUs.

    Its tasks then ask for no CPU and run one at a time on each rank, beside whoever holds them; what asks for CPUs by
    name, or runs on actors, cannot be helped. Where an autoscaler may start nodes, nothing is changed: tasks that ask
    for no CPU would start none.

    Args:
        dataset: of one rank.
        name: of the dataset in the trainer.
        world_size: trainers like this process.
        waited: whether it was waited for in vain that others let go of CPUs. The trainers themselves will not.

    Raises:
        StreamUsageError: with the CPUs needed and left, in place of waiting for ever.
    """
    by_trainers, by_all = cpus_left(world_size), cluster.cpus_not_held()
    left = max(0.0, min(by_trainers, by_all))
    if (left >= _DEFAULT_CPUS and not waited) or cluster.nodes_may_come():
        return dataset
    situation = _situation(world_size, left, trainers=by_trainers <= by_all)
    way_out = (
        "Leave CPUs to the feed: fewer workers, ScalingConfig(resources_per_worker={'CPU': 0.5}), or a larger cluster."
    )
    wanted = {op.name: _fixed_cpus(op) for op in ray_internals.operators(dataset)}
    bound = left if waited else by_trainers
    stuck = ", ".join(f"{operator} needs {cpus:g}" for operator, cpus in wanted.items() if cpus > bound)
    if stuck:
        raise StreamUsageError(f"{situation}, but to read dataset {name!r} {stuck}. {way_out}")
    if left >= _DEFAULT_CPUS:
        return dataset  # they were let go of meanwhile
    warnings.warn(
        f"{situation}, so dataset {name!r} is read by one task at a time on each rank, beside them. {way_out}",
        stacklevel=2,
    )

    def squeeze(operator: Any) -> Any:
        if not hasattr(operator, "ray_remote_args") or isinstance(
            getattr(operator, "compute", None), ActorPoolStrategy
        ):
            return operator
        remote_args = {"num_cpus": 0, **operator.ray_remote_args}
        return ray_internals.replace_operator(operator, ray_remote_args=remote_args, compute=TaskPoolStrategy(size=1))

    return ray_internals.rebuild(dataset, squeeze, dataset.context)


def _situation(world_size: int, left: float, *, trainers: bool) -> str:
    if trainers:
        return f"The {world_size} trainers leave {left:g} CPUs of the cluster"
    total = ray.cluster_resources().get("CPU", 0.0)
    return (
        f"Actors and placement groups, also of other jobs, leave {left:g} of the cluster's {total:g} CPUs on any node"
    )


def _fixed_cpus(operator: Any) -> float:
    """CPUs that an operator asks for by name, or for its actors; 0 if its tasks can do with less."""
    compute, asked = getattr(operator, "compute", None), getattr(operator, "ray_remote_args", None) or {}
    if "num_cpus" in asked:
        return float(asked["num_cpus"] or 0.0)
    return 0.0 if compute is None or isinstance(compute, TaskPoolStrategy) else _DEFAULT_CPUS
