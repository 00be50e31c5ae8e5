"""CPUs for the feed: what the trainers leave, and how to read when they leave none."""

from __future__ import annotations

import warnings
from typing import Any

import ray
from ray.data import Dataset, TaskPoolStrategy

from lance_ray_stream import ray_internals
from lance_ray_stream.errors import StreamUsageError

# What Ray Data asks for a task or an actor that names nothing.
_DEFAULT_CPUS = 1.0


def cpus_left(world_size: int) -> float:
    """CPUs of the cluster that ``world_size`` trainers like this process do not hold."""
    context = ray.get_runtime_context()
    own = context.get_assigned_resources().get("CPU", 0.0) if context.get_actor_id() else 0.0
    return float(ray.cluster_resources().get("CPU", 0.0)) - world_size * own


def fit_into(dataset: Dataset, name: str, *, world_size: int) -> Dataset:
    """``dataset``, made to run where the trainers hold all CPUs.

    Its tasks then ask for no CPU and run one at a time on each rank, beside the trainers; what asks for CPUs by name,
    or runs on actors, cannot be helped.

    Raises:
        StreamUsageError: with the CPUs needed and left, in place of waiting for ever.
    """
    left = cpus_left(world_size)
    if left >= _DEFAULT_CPUS:
        return dataset
    stuck = {op.name: cpus for op in ray_internals.operators(dataset) if (cpus := _fixed_cpus(op)) > left}
    situation = f"The {world_size} trainers leave {max(left, 0.0):g} CPUs of the cluster"
    way_out = (
        "Leave CPUs to the feed: fewer workers, ScalingConfig(resources_per_worker={'CPU': 0.5}), or a larger cluster."
    )
    if stuck:
        needed = ", ".join(f"{operator} needs {cpus:g}" for operator, cpus in stuck.items())
        raise StreamUsageError(f"{situation}, but to read dataset {name!r} {needed}. {way_out}")
    warnings.warn(
        f"{situation}, so dataset {name!r} is read by one task at a time on each rank, beside them. {way_out}",
        stacklevel=2,
    )

    def squeeze(operator: Any) -> Any:
        if not hasattr(operator, "ray_remote_args"):
            return operator
        remote_args = {"num_cpus": 0, **operator.ray_remote_args}
        return ray_internals.replace_operator(operator, ray_remote_args=remote_args, compute=TaskPoolStrategy(size=1))

    return ray_internals.rebuild(dataset, squeeze, dataset.context)


def _fixed_cpus(operator: Any) -> float:
    """CPUs that an operator asks for by name, or for its actors; 0 if its tasks can do with less."""
    compute, asked = getattr(operator, "compute", None), getattr(operator, "ray_remote_args", None) or {}
    if "num_cpus" in asked:
        return float(asked["num_cpus"] or 0.0)
    return 0.0 if compute is None or isinstance(compute, TaskPoolStrategy) else _DEFAULT_CPUS
