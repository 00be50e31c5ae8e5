"""A rank's executions, one an epoch: begun where the rank stands, the next epoch's before the present one has ended."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import ray
from ray.data import ActorPoolStrategy, Dataset

from lance_ray_stream.cursor import Cursor
from lance_ray_stream.datasource import MAX_WINDOW_BYTES, WindowDatasource
from lance_ray_stream.feed import Feed
from lance_ray_stream.next_epoch import NextEpoch
from lance_ray_stream.planner import PublishedPlan
from lance_ray_stream.progress import Progress
from lance_ray_stream.ray_internals import Execution, operators
from lance_ray_stream.spec import StreamSpec
from lance_ray_stream.transforms import stream_of

# The next epoch is begun when all but this many windows of the present one have arrived: its first reads take the CPUs
# that have nothing left to do.
_WINDOWS_LEFT = 2
# Read ahead of its time, of the next epoch: as much as two CPUs have at hand.
_AHEAD_BYTES = 2 * MAX_WINDOW_BYTES


@dataclass(frozen=True, kw_only=True)
class EpochReading:
    """What is left of an epoch for one rank, being read.

    Attributes:
        spec, plan: what is read.
        tail_rows: of its last windows.
    """

    spec: StreamSpec
    plan: PublishedPlan
    execution: Execution
    tail_rows: int

    def stop(self) -> None:
        """End it, and let go of what was read ahead."""
        self.execution.stop()


class Reader:
    """Begins a rank's readings.

    Args:
        feed: how the rank reads.
        progress: where it stands.
    """

    def __init__(self, feed: Feed, progress: Progress[PublishedPlan]) -> None:
        self._feed = feed
        self._progress = progress
        self._next: NextEpoch[EpochReading] = NextEpoch()
        # Of the present reading, for the thread that fetches its blocks, which may outlive it for a moment.
        self._lock = threading.Lock()
        self._present: EpochReading | None = None
        self._rows_to_come = 0
        self._prepares = False
        self._waited = False

    def __reduce__(self) -> tuple[type[Reader], tuple[Feed, Progress[PublishedPlan]]]:
        return Reader, (self._feed, self._progress)  # what has begun stays in its process

    def begin(self) -> Execution:
        """What is left of the epoch; begun already, if it was prepared."""
        progress, cursor = self._progress, self._progress.cursor
        reading = self._next.take(cursor.epoch)
        if reading is not None and (reading.spec != progress.spec or not cursor.is_at_start()):
            reading.stop()  # a state was loaded meanwhile
            reading = None
        if reading is None:
            waited, self._waited = self._waited, False
            reading = _begin(self._feed, progress.spec, progress.begin_reading(), cursor, waited=waited)
        else:
            progress.begin_reading(reading.plan)
            reading.execution.go_on()
        if self._feed.prepare_next_epoch and cursor.rank == 0:
            progress.planner.plan_ahead(progress.spec, cursor.epoch + 1)  # once, for all ranks
        with self._lock:
            self._present, self._rows_to_come = reading, progress.rows_left
        self._prepares = self._feed.prepare_next_epoch and in_trainer() and not has_actors(reading.execution.dataset)
        return reading.execution

    def wait_no_longer(self) -> None:
        """The CPUs that it waited for cannot be had: the next reading does without, or says what is missing."""
        self._waited = True

    def on_rows(self, num_rows: int) -> None:
        """Rows have arrived; begins the next epoch when few are left."""
        with self._lock:
            self._rows_to_come -= num_rows
            present = self._present
            if present is not None and self._prepares and self._rows_to_come <= present.tail_rows:
                self._prepare(present)

    def end(self, *, finished: bool) -> None:
        """The iteration is over. If the epoch is too, what was prepared waits a while for its turn."""
        with self._lock:
            self._present = None
        if finished:
            self._next.keep_for_a_while()
        else:
            self._next.drop()

    def _prepare(self, present: EpochReading) -> None:
        feed, spec, planner = self._feed, present.spec, self._progress.planner
        upcoming = self._progress.cursor.of_epoch(present.plan.epoch + 1)

        def begin() -> EpochReading:
            plan = planner.plan(spec, upcoming.epoch, upcoming.splits)
            return _begin(feed, spec, plan, upcoming, hold_bytes=_AHEAD_BYTES)

        self._next.prepare(upcoming.epoch, begin)


def in_trainer() -> bool:
    """Whether this process is an actor, as trainers are. A driver may shut Ray down while it reads ahead."""
    return ray.get_runtime_context().get_actor_id() is not None


def has_actors(dataset: Dataset) -> bool:
    """Whether transforms run on actors: two executions at once would have them twice, with their models and CPUs."""
    pools = (getattr(operator, "compute", None) for operator in operators(dataset))
    return any(isinstance(pool, ActorPoolStrategy) for pool in pools)


def _begin(
    feed: Feed,
    spec: StreamSpec,
    plan: PublishedPlan,
    cursor: Cursor,
    *,
    hold_bytes: int | None = None,
    waited: bool = False,
) -> EpochReading:
    dataset = feed.rest_of_epoch(spec, plan, cursor, waited=waited)
    source = stream_of(dataset)
    assert isinstance(source, WindowDatasource)
    tail_rows = sum(window.num_rows for window in source.windows[-_WINDOWS_LEFT:])
    return EpochReading(spec=spec, plan=plan, execution=Execution(dataset, hold_bytes=hold_bytes), tail_rows=tail_rows)
