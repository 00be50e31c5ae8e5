"""Assertions for your own table and transforms: the same batches on every topology, and exact resume.

A *backend* runs the ranks of one topology: :class:`RayBackend` as training does, :class:`PlanBackend` with
the same arithmetic and no Ray, which is fast enough to try every step. Importing this module starts nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ray.data import Dataset

from lance_ray_stream.backends import Backend, PlanBackend, RankRun, RayBackend, State, Topology
from lance_ray_stream.errors import InvalidArgumentError
from lance_ray_stream.layout import SplitLayout, check_int
from lance_ray_stream.position import num_batches

__all__ = [
    "Backend",
    "PlanBackend",
    "RankRun",
    "RayBackend",
    "Topology",
    "assert_exact_resume",
    "assert_same_batches",
    "describe_difference",
]

# Keys that an error text lists.
_SHOWN = 8


def assert_same_batches(
    dataset: Dataset | Backend,
    *,
    world_sizes: Sequence[int],
    global_batch_size: int,
    num_workers: Sequence[int] = (1,),
    epoch: int = 0,
    key: str | None = None,
    drop_last: bool = False,
) -> None:
    """Every topology delivers the plan: the same global batches, ranks disjoint and in step.

    >>> ds = lrs.read_stream(table, num_splits=8).map_batches(decode)
    >>> assert_same_batches(ds, world_sizes=[1, 2, 4], global_batch_size=64, key="id")

    Args:
        dataset: from ``read_stream()``, also with transforms; or a backend.
        world_sizes: the numbers of ranks to try.
        num_workers: the numbers of reader workers to try with each; those that a rank's splits cannot be
            shared among are left out.
        key: a column whose values identify the rows and pass through the transforms unchanged; None:
            ``"_rowid"``, which the stream then has to read.
        drop_last: leave out a last, shorter step.

    Raises:
        AssertionError: naming topology, step and rank, and what is missing, unexpected or out of order.
        LayoutError: if a world size or the batch size does not fit the splits.
    """
    backend = _backend(dataset, key)
    layout = SplitLayout(backend.num_splits)
    topologies = _topologies(layout, world_sizes, num_workers, global_batch_size)
    expected = _Expected(layout, backend.keys(epoch), global_batch_size, drop_last)
    for topology in topologies:
        size = layout.local_batch_size(global_batch_size, topology.world_size)
        runs = backend.run(topology, batch_size=size, drop_last=drop_last, epoch=epoch)
        expected.check(runs, topology, f"{topology}")


def assert_exact_resume(
    dataset: Dataset | Backend,
    *,
    world_sizes: Sequence[int],
    global_batch_size: int,
    steps: Sequence[int] | None = None,
    num_workers: Sequence[int] = (1,),
    epoch: int = 0,
    key: str | None = None,
    drop_last: bool = False,
) -> None:
    """A run that is saved after any step continues exactly on every topology, from rank 0's state alone.

    Every ordered pair of topologies is tried: the first one is saved after step k, the second one loads the
    state and must deliver the rest of the plan. States go through JSON, are equal on all ranks, and
    are the same when they are loaded and saved at once.

    >>> ds = lrs.read_stream(table, num_splits=8).map_batches(decode)
    >>> assert_exact_resume(ds, world_sizes=[1, 4], global_batch_size=64, steps=[0, 5], key="id")

    Args:
        steps: the numbers of steps after which to save; None: every one of the epoch, from 0 to all. With
            Ray each takes a start of every rank of every pair: on a large table name a few.

    The other arguments and the errors are those of :func:`assert_same_batches`.
    """
    backend = _backend(dataset, key)
    layout = SplitLayout(backend.num_splits)
    topologies = _topologies(layout, world_sizes, num_workers, global_batch_size)
    expected = _Expected(layout, backend.keys(epoch), global_batch_size, drop_last)
    stops = _stops(steps, expected.num_steps)
    sizes = {t: layout.local_batch_size(global_batch_size, t.world_size) for t in topologies}
    for first in topologies:
        runs = backend.run(
            first, batch_size=sizes[first], drop_last=drop_last, epoch=epoch, steps=max(stops, default=0)
        )
        expected.check(runs, first, f"{first}", stop=max(stops, default=0))
        for step in stops:
            where = f"saved after {step} steps with {first}"
            state = _state_of_all(runs, step, where)
            # Loaded, the very end of an epoch is the start of the next one, which is not run here.
            limit = 0 if expected.is_end(state) else None
            for second in topologies:
                rest = backend.run(second, batch_size=sizes[second], drop_last=drop_last, state=state, steps=limit)
                _check_rest(rest, state, expected, second, step, f"{where}, resumed with {second}")


def _check_rest(
    runs: list[RankRun], state: State, expected: _Expected, topology: Topology, step: int, where: str
) -> None:
    at_end = expected.is_end(state)
    for rank, run in enumerate(runs):
        assert run.epoch == state["epoch"] + at_end, (
            f"{where}, rank {rank}: goes on in epoch {run.epoch} instead of {state['epoch'] + at_end}"
        )
        assert at_end or run.states[0] == state, (
            f"{where}, rank {rank}: a state that is loaded and saved at once is another one:\n"
            f"  loaded {state}\n  saved  {run.states[0]}"
        )
    if not at_end:
        expected.check(runs, topology, where, start=step)


def _state_of_all(runs: list[RankRun], step: int, where: str) -> dict[str, Any]:
    """Rank 0's state after ``step`` steps, as it comes back from a file; every other rank's is equal."""
    states = [json.loads(json.dumps(run.states[step], allow_nan=False)) for run in runs]
    for rank, state in enumerate(states):
        assert state == states[0], (
            f"{where}: the state of rank {rank} differs from that of rank 0:\n  {state}\n  {states[0]}"
        )
        assert state == runs[rank].states[step], f"{where}, rank {rank}: the state changes on its way through JSON"
    return dict(states[0])


class _Expected:
    """The steps that a plan makes, rank by rank."""

    def __init__(self, layout: SplitLayout, keys: list[list[Any]], global_batch_size: int, drop_last: bool) -> None:
        self.layout = layout
        self.keys = keys
        self.num_cycles = len(keys[0])
        self.num_steps = num_batches(self.num_cycles * len(keys), global_batch_size, drop_last)
        self._global_batch_size = global_batch_size

    def rows(self, step: int, rank: int, world_size: int) -> list[Any]:
        """The keys that a rank receives in a step, in order; the last step may be shorter."""
        places = self.layout.rows_of_step(step, self._global_batch_size, rank=rank, world_size=world_size)
        return [self.keys[split][cycle] for split, cycle in places.tolist() if cycle < self.num_cycles]

    def is_end(self, state: State) -> bool:
        """Whether ``state`` has received everything."""
        return all(count == self.num_cycles for count in state["samples_consumed_per_split"])

    def check_counts(self, state: State, step: int, where: str) -> None:
        """Whether ``state`` counts the rows of ``step`` steps, the same for every split."""
        cycles = min(step * self._global_batch_size // self.layout.num_splits, self.num_cycles)
        counts = state["samples_consumed_per_split"]
        assert counts == [cycles] * self.layout.num_splits, (
            f"{where}: after {step} steps the state counts {counts} rows of each split instead of {cycles}"
        )

    def check(
        self, runs: list[RankRun], topology: Topology, where: str, *, start: int = 0, stop: int | None = None
    ) -> None:
        """Whether ``runs`` delivered the steps ``start`` .. ``stop - 1``, by default all that are left."""
        assert len(runs) == topology.world_size, f"{where}: {len(runs)} ranks delivered batches"
        stop = self.num_steps if stop is None else stop
        for rank, run in enumerate(runs):
            # Batch by batch first: a wrong row says more than a wrong number of batches.
            for step, batch in enumerate(run.batches[: stop - start], start):
                found = describe_difference(self.rows(step, rank, topology.world_size), batch)
                assert not found, f"{where}, step {step}, rank {rank}: {found}"
            for step, state in enumerate(run.states[: stop - start + 1], start):
                self.check_counts(state, step, f"{where}, rank {rank}")
            assert len(run.batches) == stop - start, (
                f"{where}, rank {rank}: delivered {len(run.batches)} batches instead of {stop - start}"
            )


def describe_difference(expected: Sequence[Any], found: Sequence[Any]) -> str:
    """How the keys that were found differ from the expected ones; empty if they do not."""
    if list(expected) == list(found):
        return ""
    wanted, got = Counter(expected), Counter(found)
    missing = [key for key in wanted if key not in got]
    extra = [key for key in got if key not in wanted]
    repeated = [key for key, count in got.items() if count > 1]
    parts = [
        f"{name} rows {_listed(keys)}"
        for name, keys in (("missing", missing), ("unexpected", extra), ("repeated", repeated))
        if keys
    ]
    if not parts:
        place = next(i for i, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1])
        parts = [
            f"the right rows in another order, from row {place} of the batch on: expected "
            f"{_listed(expected[place:])}, got {_listed(found[place:])}"
        ]
    return "; ".join(parts)


def _listed(keys: Sequence[Any]) -> str:
    more = f", ... ({len(keys)} in all)" if len(keys) > _SHOWN else ""
    return ", ".join(map(repr, keys[:_SHOWN])) + more


def _topologies(
    layout: SplitLayout, world_sizes: Sequence[int], num_workers: Sequence[int], global_batch_size: int
) -> list[Topology]:
    if not world_sizes or not num_workers:
        raise InvalidArgumentError("Nothing to compare: name at least one of world_sizes and of num_workers.")
    for world_size in world_sizes:
        layout.check(world_size, global_batch_size=global_batch_size)
    workers = [check_int("num_workers", number, minimum=1) for number in num_workers]
    pairs = [(size, number) for size in world_sizes for number in workers]
    topologies = [Topology(*pair) for pair in pairs if layout.num_splits % (pair[0] * pair[1]) == 0]
    if not topologies:
        raise InvalidArgumentError(
            f"Nothing to compare: no pair of world_sizes={list(world_sizes)} and num_workers={workers} shares "
            f"num_splits={layout.num_splits} evenly."
        )
    return topologies


def _stops(steps: Sequence[int] | None, num_steps: int) -> list[int]:
    if steps is None:
        return list(range(num_steps + 1))
    for step in steps:
        if not 0 <= check_int("steps", step) <= num_steps:
            raise InvalidArgumentError(f"steps names {step}, but the epoch has {num_steps} steps.")
    return sorted(set(steps))


def _backend(dataset: Dataset | Backend, key: str | None) -> Backend:
    if isinstance(dataset, Dataset) or not isinstance(dataset, Backend):
        return RayBackend(dataset, key=key)
    if key is not None:
        raise InvalidArgumentError("key belongs to the backend: give it there.")
    return dataset
