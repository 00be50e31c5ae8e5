"""Ways to run all ranks of one topology and note what each received; for :mod:`lance_ray_stream.testing`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import pyarrow as pa
from ray.data import Dataset

from lance_ray_stream.cursor import Cursor
from lance_ray_stream.data_config import StreamDataConfig
from lance_ray_stream.epoch_plan import EpochPlan
from lance_ray_stream.errors import InvalidArgumentError
from lance_ray_stream.iterator import StreamIterator
from lance_ray_stream.layout import SplitLayout
from lance_ray_stream.plan import build_plan
from lance_ray_stream.planner import LocalPlanner
from lance_ray_stream.position import num_batches, rows_of_window, windows
from lance_ray_stream.progress import Progress
from lance_ray_stream.reader import ROW_ID, read_rows
from lance_ray_stream.spec import StreamSpec
from lance_ray_stream.transforms import stream_of
from lance_ray_stream.window_reader import read_window

State: TypeAlias = Mapping[str, Any]
# For each step of a rank, the keys of its rows and the state after it.
Steps: TypeAlias = Iterator[tuple[list[Any], dict[str, Any]]]


@dataclass(frozen=True)
class Topology:
    """The number of ranks, and of reader workers in each."""

    world_size: int
    num_workers: int = 1

    def __str__(self) -> str:
        return f"world_size={self.world_size}, num_workers={self.num_workers}"


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """What one rank received in one iteration.

    Attributes:
        epoch: the epoch that it was in.
        batches: for each step, the keys of its rows, in the order in which they were received.
        states: the ``state_dict()`` before the first step and after each one: ``len(batches) + 1`` of them.
    """

    epoch: int
    batches: list[list[Any]] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)


@runtime_checkable
class Backend(Protocol):
    """Something that runs all ranks of a topology.

    Attributes:
        num_splits: the number of splits of the stream.
    """

    num_splits: int

    def keys(self, epoch: int) -> list[list[Any]]:
        """The key of the row at (split s, index i) of the epoch's plan, as ``keys[s][i]``; no key repeats."""
        ...

    def run(
        self,
        topology: Topology,
        *,
        batch_size: int,
        drop_last: bool = False,
        epoch: int | None = None,
        state: State | None = None,
        steps: int | None = None,
        strict: bool = True,
    ) -> list[RankRun]:
        """Start every rank anew and run it to the end of the epoch, or for at most ``steps`` steps.

        Args:
            batch_size: rows of a step on each rank.
            epoch: the epoch to start in; that of the state or of the stream if None.
            state: the state that every rank loads.
            strict: as in ``load_state_dict``.
        """
        ...


class RayBackend:
    """Runs the ranks as training does, with the dataset's transforms, in this process.

    Args:
        dataset: from ``read_stream()``, also with transforms.
        key: the column that identifies a row; ``"_rowid"`` if None.
        interleave: whether ranks take turns, step by step, so that all are open at once as in training. By
            default one runs after the other, which needs the CPUs of one only.
        prefetch_batches: as in ``iter_batches``.
    """

    def __init__(
        self, dataset: Dataset, *, key: str | None = None, interleave: bool = False, prefetch_batches: int = 1
    ) -> None:
        self.dataset = dataset
        self.spec = stream_of(dataset).spec
        self.num_splits = _num_splits(self.spec)
        self.key = ROW_ID if key is None else key
        self.interleave = interleave
        self.prefetch_batches = prefetch_batches
        self._planner = LocalPlanner()

    def keys(self, epoch: int) -> list[list[Any]]:
        """The key of every row of the epoch's plan."""
        return _keys_of(self.spec, build_plan(self.spec, epoch), self.key)

    def run(
        self,
        topology: Topology,
        *,
        batch_size: int,
        drop_last: bool = False,
        epoch: int | None = None,
        state: State | None = None,
        steps: int | None = None,
        strict: bool = True,
    ) -> list[RankRun]:
        """As :meth:`Backend.run`."""
        config = StreamDataConfig(num_workers=topology.num_workers, progress=False)
        ranks = config.iterators("train", self.dataset, topology.world_size, planner=self._planner)
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(dict(state), strict=strict)
            if epoch is not None:
                rank.set_epoch(epoch)
        runs = [RankRun(epoch=rank.epoch, states=[rank.state_dict()]) for rank in ranks]
        _collect([self._steps(rank, batch_size, drop_last) for rank in ranks], runs, steps, interleave=self.interleave)
        return runs

    def _steps(self, rank: StreamIterator, batch_size: int, drop_last: bool) -> Steps:
        for batch in rank.iter_batches(
            batch_size=batch_size,
            drop_last=drop_last,
            batch_format="pyarrow",
            prefetch_batches=self.prefetch_batches,
        ):
            if self.key not in batch.column_names:
                raise InvalidArgumentError(
                    f"The batches have no column {self.key!r} to tell rows apart by: name one with key=..., or "
                    f"read {ROW_ID!r} too (read_stream(columns=[..., {ROW_ID!r}])). They have "
                    f"{batch.column_names}."
                )
            yield batch[self.key].to_pylist(), rank.state_dict()


class PlanBackend:
    """Runs the ranks on plan, cursor and windows alone: the arithmetic of the stream without Ray.

    Args:
        spec: the stream.
        key: the column that identifies a row; the row id if None.
        read: whether rows are read from the table, window by window, with the reader workers of each
            rank. If not, keys are looked up in the plan.
        first_rows: rows of the first window of a reading.
        max_rows: rows of the widest one.
    """

    def __init__(
        self,
        spec: StreamSpec,
        *,
        key: str | None = None,
        read: bool = False,
        first_rows: int = 1_024,
        max_rows: int = 65_536,
    ) -> None:
        self.spec = spec
        self.num_splits = _num_splits(spec)
        self.key = ROW_ID if key is None else key
        self._read = read
        self._window_sizes = {"first_rows": first_rows, "max_rows": max_rows}
        self._plans = _Plans(self.key)

    def keys(self, epoch: int) -> list[list[Any]]:
        """The key of every row of the epoch's plan."""
        return self._plans.epoch(self.spec, epoch)[1]

    def run(
        self,
        topology: Topology,
        *,
        batch_size: int,
        drop_last: bool = False,
        epoch: int | None = None,
        state: State | None = None,
        steps: int | None = None,
        strict: bool = True,
    ) -> list[RankRun]:
        """As :meth:`Backend.run`."""
        layout = SplitLayout(self.num_splits)
        layout.check(topology.world_size, topology.num_workers)
        ranks = [
            Progress(self.spec, Cursor(layout, rank=rank, world_size=topology.world_size, epoch=0), self._plans)
            for rank in range(topology.world_size)
        ]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(dict(state), strict=strict)
            if epoch is not None and epoch != rank.cursor.epoch:
                rank.jump(epoch)
        runs = [RankRun(epoch=rank.cursor.epoch, states=[rank.state_dict()]) for rank in ranks]
        steps_of = [self._steps(rank, topology.num_workers, batch_size, drop_last) for rank in ranks]
        _collect(steps_of, runs, steps, interleave=True)
        return runs

    def _steps(self, rank: Progress[EpochPlan], num_workers: int, batch_size: int, drop_last: bool) -> Steps:
        due, waiting = rank.rows_left, list[Any]()
        rank.begin_reading()
        windows_left = self._windows(rank.cursor, due, num_workers)
        for _ in range(num_batches(due, batch_size, drop_last)):
            while len(waiting) < batch_size and (window := next(windows_left, None)) is not None:
                waiting += window
            batch, waiting = waiting[:batch_size], waiting[batch_size:]
            rank.cursor.receive(len(batch))
            yield batch, rank.state_dict()

    def _windows(self, cursor: Cursor, due: int, num_workers: int) -> Iterator[list[Any]]:
        """The keys of the rows that are due, window by window."""
        plan, keys = self._plans.epoch(self.spec, cursor.epoch)
        start, splits = cursor.own_start(), cursor.splits
        for window in windows(start, num_rows=due, **self._window_sizes):
            if self._read:
                yield read_window(
                    self.spec.table.open(),
                    window,
                    plan.order.part(splits),
                    start,
                    columns=(self.key,),
                    num_workers=num_workers,
                )[self.key].to_pylist()
            else:
                split, cycle = (place.tolist() for place in rows_of_window(window, start))
                yield [keys[splits[s]][c] for s, c in zip(split, cycle, strict=True)]


class _Plans:
    """A planner that publishes nothing: plans and keys of every epoch that was asked for."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._epochs: dict[int, tuple[EpochPlan, list[list[Any]]]] = {}

    def plan(self, spec: StreamSpec, epoch: int, splits: range) -> EpochPlan:
        """As :meth:`Planner.plan`, with all splits."""
        return self.epoch(spec, epoch)[0]

    def plan_ahead(self, spec: StreamSpec, epoch: int) -> None:
        """Nothing: plans are made when they are needed."""

    def epoch(self, spec: StreamSpec, epoch: int) -> tuple[EpochPlan, list[list[Any]]]:
        """The plan of an epoch, and its keys."""
        if epoch not in self._epochs:
            plan = build_plan(spec, epoch)
            self._epochs[epoch] = plan, _keys_of(spec, plan, self._key)
        return self._epochs[epoch]


def _collect(ranks: list[Steps], runs: list[RankRun], num_steps: int | None, *, interleave: bool) -> None:
    """Run ``ranks`` for at most ``num_steps`` steps, noting each step in ``runs``."""
    turns = [list(zip(ranks, runs, strict=True))]
    if not interleave:
        turns = [[turn] for turn in turns[0]]
    try:
        for live in turns:
            steps = 0
            while live and (num_steps is None or steps < num_steps):
                live = [(rank, run) for rank, run in live if _take_step(rank, run)]
                steps += 1
    finally:
        for rank in ranks:
            rank.close()  # type: ignore[attr-defined]


def _take_step(rank: Steps, run: RankRun) -> bool:
    step = next(rank, None)
    if step is None:
        return False
    run.batches.append(step[0])
    run.states.append(step[1])
    return True


def _num_splits(spec: StreamSpec) -> int:
    if spec.num_splits is None:
        raise InvalidArgumentError(
            "The stream has num_splits=None, so every number of ranks has splits of its own and there is nothing to "
            "compare. Name num_splits in read_stream()."
        )
    return spec.num_splits


def _keys_of(spec: StreamSpec, plan: EpochPlan, key: str) -> list[list[Any]]:
    """``keys[split][index]`` of a plan: row ids, or the values of a column, which have to tell rows apart."""
    if key == ROW_ID:
        ids: list[list[int]] = plan.ids.tolist()
        return ids
    table = spec.table.open()
    if key not in table.schema.names:
        raise InvalidArgumentError(
            f"key={key!r} is no column of the table {spec.table.name!r}; it has {table.schema.names}."
        )
    if pa.types.is_nested(table.schema.field(key).type):
        raise InvalidArgumentError(f"key={key!r} is a nested column; name one with plain values.")
    values = read_rows(table, plan.ids.reshape(-1), columns=(key,))[key].to_pylist()
    if len(set(values)) < len(values):
        raise InvalidArgumentError(
            f"key={key!r} does not identify rows: {len(values)} rows have {len(set(values))} values. Name a column "
            f"without repeats, or read {ROW_ID!r} and leave key out."
        )
    length = plan.rows_per_split
    return [values[split * length : (split + 1) * length] for split in range(plan.num_splits)]
