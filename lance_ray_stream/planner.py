"""Plans an epoch once for all ranks, one array per split in Ray's object store, and gives each rank its part."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias, TypeVar

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lance_ray_stream.epoch_plan import PlannedEpoch
from lance_ray_stream.errors import PlanError
from lance_ray_stream.indexed_plan import digest_of, indexed_fingerprint, indexed_order, passing_rows
from lance_ray_stream.memory import release_memory
from lance_ray_stream.permutation import IndexedOrder
from lance_ray_stream.plan import build_plan
from lance_ray_stream.row_order import ComputedRows, PlannedRows, RowOrder
from lance_ray_stream.spec import StreamSpec, filter_key, plan_key

# The epoch that is read and the one that follows it.
_KEPT_PLANS = 2
# How often a plan is begun anew when the process that builds it dies.
_PLAN_RETRIES = 2
# So that ranks get a plan that is there while the next one is built.
_CALLS_AT_ONCE = 16
# Memory for each row while LanceDB's builder makes a plan, see docs/scale.md.
_PLANNING_BYTES = 45

# A reference in the object store; to what, the attribute that holds it says.
ObjectRef: TypeAlias = "ray.ObjectRef[Any]"
PlanT_co = TypeVar("PlanT_co", bound=PlannedEpoch, covariant=True)


@dataclass(frozen=True)
class FetchPlanned:
    """A split group's row ids in the object store.

    Args:
        group: to a tuple of references, one for each split: uint64, shape (rows per split,).
    """

    group: ObjectRef

    def fetch(self) -> RowOrder:
        """The order, in a read task; the arrays stay in shared memory."""
        return PlannedRows(ray.get(list(ray.get(self.group))))


@dataclass(frozen=True)
class FetchComputed:
    """A split group of a formula; with a filter, over row ids in the object store."""

    order: IndexedOrder
    first_split: int
    passing: ObjectRef | None

    def fetch(self) -> RowOrder:
        """The order, in a read task."""
        return ComputedRows(self.order, self.first_split, None if self.passing is None else ray.get(self.passing))


FetchRows: TypeAlias = FetchPlanned | FetchComputed


@dataclass(frozen=True, kw_only=True)
class PublishedPlan:
    """An epoch's plan, and where read tasks anywhere look up the rows of some of its splits.

    Attributes:
        splits: those splits, contiguous.
        rows: N, rows of the version that pass the filter.
        rows_per_split: L.
        row_ids: for each of ``splits``, a reference to its row ids: uint64, shape (rows_per_split,); None if
            ``order`` computes them.
        order: the formula, of all splits; None if the plan was built.
        passing: reference to the row ids that pass the filter, which the formula is over; None without a filter.
    """

    epoch: int
    splits: range
    rows: int
    rows_per_split: int
    fingerprint: str
    row_ids: tuple[ObjectRef, ...] | None = None
    order: IndexedOrder | None = None
    passing: ObjectRef | None = None

    def part(self, splits: range) -> PublishedPlan:
        """The same plan with some of its splits: what does not grow with the others."""
        first = self.splits.start
        row_ids = None if self.row_ids is None else self.row_ids[splits.start - first : splits.stop - first]
        return replace(self, splits=splits, row_ids=row_ids)

    def rows_to_fetch(self) -> FetchRows:
        """The order of its splits, small enough to travel with every read task."""
        if self.order is not None:
            return FetchComputed(self.order, self.splits.start, self.passing)
        return FetchPlanned(ray.put(self.row_ids))


class Planner(Protocol[PlanT_co]):
    """Who can be asked for the plan of an epoch."""

    def plan(self, spec: StreamSpec, epoch: int, splits: range) -> PlanT_co:
        """The plan of ``epoch`` with the rows of contiguous ``splits``, built if it is not known yet."""
        ...

    def plan_ahead(self, spec: StreamSpec, epoch: int) -> None:
        """Begin to build the plan of ``epoch``, if that can be done beside the caller; whoever needs it asks again."""
        ...


class LocalPlanner:
    """Plans in this process, and keeps the latest plans."""

    def __init__(self) -> None:
        self._plans: dict[tuple[str, int], PublishedPlan] = {}
        self._one_at_a_time = threading.Lock()
        self._passing: dict[str, tuple[ObjectRef, int, str]] = {}

    def __reduce__(self) -> tuple[type[LocalPlanner], tuple[()]]:
        return LocalPlanner, ()  # another process makes its own plans, which are the same

    def plan(self, spec: StreamSpec, epoch: int, splits: range) -> PublishedPlan:
        """The plan of ``epoch`` with the rows of ``splits``, built once for all splits."""
        return self._whole(spec, epoch).part(splits)

    def plan_ahead(self, spec: StreamSpec, epoch: int) -> None:
        """Nothing: there is no other process to do it."""

    def _whole(self, spec: StreamSpec, epoch: int) -> PublishedPlan:
        key = (plan_key(spec), epoch)
        plan = self._plans.get(key)  # a plan that is there waits for none that is being built
        if plan is not None:
            return plan
        with self._one_at_a_time:
            if key not in self._plans:
                plan = self._computed(spec, epoch) if spec.shuffle_algorithm == "indexed" else _built(spec, epoch)
                while len(self._plans) >= _KEPT_PLANS:
                    del self._plans[self._least_needed(*key)]
                self._plans[key] = plan
            return self._plans[key]

    def _least_needed(self, stream: str, epoch: int) -> tuple[str, int]:
        """A plan of another stream than the one that is asked for, or of the epoch farthest from its epoch.

        Not the oldest plan: workers that begin again just before the end of an epoch need that one and the next.
        """
        return max(self._plans, key=lambda kept: (kept[0] != stream, abs(kept[1] - epoch)))

    def _computed(self, spec: StreamSpec, epoch: int) -> PublishedPlan:
        """A formula; a filter is scanned once for all epochs."""
        passing, rows, digest = None, spec.total_rows, None
        if spec.filter is not None:
            key = filter_key(spec)
            if key not in self._passing:
                row_ids = passing_rows(spec)
                assert row_ids is not None
                self._passing = {key: (ray.put(row_ids), len(row_ids), digest_of(row_ids))}
            passing, rows, digest = self._passing[key]
        order = indexed_order(spec, epoch, rows)
        return PublishedPlan(
            epoch=epoch,
            splits=range(order.num_splits),
            rows=rows,
            rows_per_split=order.rows_per_split,
            fingerprint=indexed_fingerprint(order, digest),
            order=order,
            passing=passing,
        )


def _built(spec: StreamSpec, epoch: int) -> PublishedPlan:
    plan = build_plan(spec, epoch)
    published = PublishedPlan(
        epoch=epoch,
        splits=range(plan.num_splits),
        rows=plan.rows,
        rows_per_split=plan.rows_per_split,
        fingerprint=plan.fingerprint,
        row_ids=tuple(ray.put(ids) for ids in plan.ids),
    )
    del plan
    release_memory()  # LanceDB's builder had many times the size of the plan
    return published


class PlannerProcess:
    """What runs in the planner's actor: a :class:`LocalPlanner` for each stream of a trainer, by its name."""

    def __init__(self) -> None:
        self._planners: dict[str, LocalPlanner] = {}

    def plan(self, stream: str, spec: StreamSpec, epoch: int, splits: range) -> PublishedPlan:
        """As :meth:`LocalPlanner.plan`."""
        return self._planners.setdefault(stream, LocalPlanner()).plan(spec, epoch, splits)


class PlannerActor:
    """A planner in an actor, for all ranks of a run. It lives as long as a handle to it, and as who started it.

    Its plans end with its process, which Ray starts again when it died: who finds row ids lost asks for the plan anew.

    Args:
        handle: of the actor.
        stream: the name of the stream that is planned; each has plans of its own.
    """

    def __init__(self, handle: Any, stream: str = "") -> None:
        self._handle = handle
        self._stream = stream

    @classmethod
    def start(cls) -> PlannerActor:
        """Start the actor on this node, so that it fails for good only together with whoever started it."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = ray.remote(PlannerProcess).options(
            num_cpus=0,
            scheduling_strategy=here,
            max_restarts=-1,
            max_task_retries=_PLAN_RETRIES,
            max_concurrency=_CALLS_AT_ONCE,
        )
        return cls(actor.remote())

    def of_stream(self, name: str) -> PlannerActor:
        """The same actor, as the planner of one stream."""
        return PlannerActor(self._handle, name)

    def plan(self, spec: StreamSpec, epoch: int, splits: range) -> PublishedPlan:
        """The plan of ``epoch`` with the rows of ``splits``, from the actor; built there by the first rank that asks.

        Raises:
            PlanError: if the actor's process is killed each time that it plans.
        """
        try:
            plan: PublishedPlan = ray.get(self._handle.plan.remote(self._stream, spec, epoch, splits))
        except (ActorDiedError, ActorUnavailableError) as error:
            raise PlanError(
                f"The planner's process died while it planned epoch {epoch} of {spec.table!r}, each time that it was "
                f"started. If its node ran out of memory: the default order of {spec.total_rows:,} rows "
                f"takes about {spec.total_rows * _PLANNING_BYTES / 1e9:.1f} GB while it is planned, "
                "read_stream(shuffle_algorithm='indexed') almost none."
            ) from error
        return plan

    def plan_ahead(self, spec: StreamSpec, epoch: int) -> None:
        """Have the actor begin to build the plan of ``epoch``."""
        self._handle.plan.remote(self._stream, spec, epoch, range(0))


class PlannerOfRun:
    """Where the planner of a trainer's run is kept while its workers are stopped and started again.

    A part of a ``DataConfig``. Ray Train copies that for each ``fit()``, sends the copy to the run's controller, and
    from there, at each start of the workers, to a new actor that deals the streams out and ends with those workers,
    together with all that it has started. So the planner is started where the copy arrives, in the controller, and
    sent on from there: it lives as long as the run.

    Args:
        actor: the planner; None outside a run, where each ``configure()`` starts one.
    """

    def __init__(self, actor: PlannerActor | None = None) -> None:
        self.actor = actor
        self._for_run = False

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannerOfRun:
        copy = PlannerOfRun()
        copy._for_run = True
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        return (_arrive, ()) if self._for_run else (PlannerOfRun, (self.actor,))


def _arrive() -> PlannerOfRun:
    """The copy for a run, in the run's controller."""
    in_actor = ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None
    return PlannerOfRun(PlannerActor.start() if in_actor else None)
