"""Plans an epoch once for all ranks and publishes it in Ray's object store, one array per split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lance_ray_stream.plan import build_plan
from lance_ray_stream.spec import StreamSpec, plan_key

# The epoch that is read and the one that follows it.
_KEPT_PLANS = 2


# A reference in the object store; to what, the attribute that holds it says.
ObjectRef: TypeAlias = "ray.ObjectRef[Any]"


@dataclass(frozen=True, kw_only=True)
class PublishedPlan:
    """An epoch's plan whose row ids lie in the object store.

    Attributes:
        row_ids: for each split, a reference to its row ids: uint64, shape (rows_per_split,).
    """

    epoch: int
    num_splits: int
    rows: int
    rows_per_split: int
    fingerprint: str
    row_ids: tuple[ObjectRef, ...]


class Planner(Protocol):
    """Who can be asked for the plan of an epoch."""

    def plan(self, spec: StreamSpec, epoch: int) -> PublishedPlan:
        """The plan of ``epoch``, built if it is not known yet."""
        ...


class LocalPlanner:
    """Plans in this process, and keeps the latest plans."""

    def __init__(self) -> None:
        self._plans: dict[tuple[str, int], PublishedPlan] = {}

    def plan(self, spec: StreamSpec, epoch: int) -> PublishedPlan:
        """The plan of ``epoch``; the same object for the same order and epoch."""
        key = (plan_key(spec), epoch)
        if key not in self._plans:
            plan = build_plan(spec, epoch)
            while len(self._plans) >= _KEPT_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = PublishedPlan(
                epoch=epoch,
                num_splits=plan.num_splits,
                rows=plan.rows,
                rows_per_split=plan.rows_per_split,
                fingerprint=plan.fingerprint,
                row_ids=tuple(ray.put(plan.row_ids(split)) for split in range(plan.num_splits)),
            )
        return self._plans[key]


class PlannerActor:
    """A :class:`LocalPlanner` in an actor, for all ranks of a run. It lives as long as a handle to it."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    @classmethod
    def start(cls) -> PlannerActor:
        """Start the actor on this node, so that it fails only together with whoever started it."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = ray.remote(LocalPlanner).options(num_cpus=0, scheduling_strategy=here)
        return cls(actor.remote())

    def plan(self, spec: StreamSpec, epoch: int) -> PublishedPlan:
        """The plan of ``epoch``, from the actor; built there by the first rank that asks."""
        plan: PublishedPlan = ray.get(self._handle.plan.remote(spec, epoch))
        return plan
