"""The user's transforms, put over another source: refused, checked and shared so that G1 and G6 hold."""

from __future__ import annotations

import collections.abc
import copy
import functools
import inspect
import types
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from ray.data import ActorPoolStrategy, DataContext, Dataset, ExecutionOptions, TaskPoolStrategy

from lance_ray_stream import ray_internals
from lance_ray_stream.datasource import StreamDatasource
from lance_ray_stream.errors import InvalidArgumentError, RowCountChangedError, UnsupportedOperatorError
from lance_ray_stream.ray_internals import MapBatches, Read
from lance_ray_stream.ray_internals.cluster import WatchCpus


def find_stream(dataset: object) -> StreamDatasource | None:
    """The stream under a dataset's transforms, or None if it reads something else."""
    source = ray_internals.source_of(dataset) if isinstance(dataset, Dataset) else None
    return source if isinstance(source, StreamDatasource) else None


def stream_of(dataset: object) -> StreamDatasource:
    """The stream under a dataset's transforms.

    Raises:
        InvalidArgumentError: if the dataset does not come from ``read_stream``.
        UnsupportedOperatorError: if a stream is in it, but mixed with other sources.
    """
    source = find_stream(dataset)
    if source is not None:
        return source
    if not isinstance(dataset, Dataset):
        raise InvalidArgumentError(f"Expected a ray.data.Dataset made by read_stream(), got {type(dataset).__name__}.")
    operators = ", ".join(operator.name for operator in ray_internals.operators(dataset))
    raise InvalidArgumentError(
        f"The dataset does not come from read_stream() alone, but from {operators}. A materialized, united or joined "
        "dataset has lost its plan; pass the dataset that read_stream() and its row-wise transforms return."
    )


def contains_stream(dataset: object) -> bool:
    """Whether any source of a dataset is a stream, also one of several."""
    return isinstance(dataset, Dataset) and any(
        isinstance(op, Read) and isinstance(op.datasource, StreamDatasource) for op in ray_internals.operators(dataset)
    )


def check_operators(dataset: Dataset, name: str) -> None:
    """Refuse operators that cannot give one row per row in order.

    Raises:
        UnsupportedOperatorError: naming the operators and the way out.
    """
    refused = [op.name for op in ray_internals.operators(dataset) if not ray_internals.is_row_preserving(op)]
    if refused:
        raise UnsupportedOperatorError(
            f"Dataset {name!r} uses {', '.join(refused)}, which cannot keep one row per row in order, so "
            "positions and global batches would be wrong. What works: read_stream(filter=...) in place of a filter "
            "or limit, read_stream(shuffle=...) in place of sorting, shuffling or repartitioning, "
            "a list column in place of flat_map; map, map_batches, with_column, select_columns, rename_columns and "
            "drop_columns are fine."
        )


def rebase(
    dataset: Dataset, source: StreamDatasource, *, world_size: int, options: ExecutionOptions, quiet: bool = True
) -> Dataset:
    """The user's transforms over ``source``, for one of ``world_size`` ranks, to be run in order.

    Every ``map_batches`` function is checked to give as many rows as it got; a ``concurrency`` that was
    asked for the whole job is divided among the ranks.
    """
    num_tasks = len(source.get_read_tasks(1))

    def change(operator: Any) -> Any:
        changes: dict[str, Any] = {}
        if isinstance(operator, Read):
            changes |= {
                "datasource": source,
                "datasource_or_legacy_reader": source,
                "parallelism": num_tasks,
                "num_outputs": num_tasks,
            }
        elif isinstance(operator, MapBatches):
            changes["fn"] = count_rows_through(operator.fn, operator.name)
        compute = getattr(operator, "compute", None)
        if compute is not None and world_size > 1:
            changes["compute"] = share_of(compute, world_size)
        return ray_internals.replace_operator(operator, **changes) if changes else operator

    return ray_internals.rebuild(dataset, change, ordered_context(dataset.context, options, quiet=quiet))


def ordered_context(context: DataContext, options: ExecutionOptions, *, quiet: bool) -> DataContext:
    """A copy of ``context`` that keeps order and raises a transform's own error; without bars if ``quiet``."""
    context = context.copy()
    context.execution_options = copy.deepcopy(options)
    context.execution_options.preserve_order = True
    # Blocks that failed and were left out would move every row after them.
    context.max_errored_blocks = 0
    ray_internals.let_tasks_end(context)
    # A trainer may pause in mid-epoch for as long as it likes; who waits for CPUs in vain is found by WatchCpus.
    context.execution_no_progress_timeout_s = -1
    if quiet:
        context.enable_progress_bars = False
        context.print_on_execution_start = False
    context.raise_original_map_exception = True
    # For stats(): the read and each transform apart, also where Ray runs them as one operator.
    context.per_stage_map_timing = True
    context.custom_execution_callback_classes = [
        *context.custom_execution_callback_classes,
        ray_internals.StartWithAllResources,
        WatchCpus,
    ]
    return context


def share_of(compute: Any, world_size: int) -> Any:
    """One rank's share of a pool that was asked for the whole job, at least one worker."""

    def share(size: Any) -> Any:
        return size if size == float("inf") else max(1, size // world_size)

    if isinstance(compute, TaskPoolStrategy):
        return compute if compute.size is None else TaskPoolStrategy(size=share(compute.size))
    if isinstance(compute, ActorPoolStrategy):
        # a copy, so that options which this package does not know are kept
        part = copy.copy(compute)
        part.min_size = share(compute.min_size)
        part.initial_size = share(compute.initial_size)
        part.max_size = share(compute.max_size)
        return part
    return compute


def count_rows_through(fn: Any, operator: str) -> Any:
    """``fn`` of a ``map_batches``, failing when it returns another number of rows than it was given.

    Functions, generator functions, and callable classes (also with async calls) keep their kind and
    name, by which Ray tells them apart.
    """
    if inspect.isclass(fn):
        checked = {"__call__": _checked(fn.__call__, operator, skip_self=True), "__doc__": fn.__doc__}
        return types.new_class(fn.__name__, (fn,), exec_body=lambda body: body.update(checked))
    return _checked(fn, operator)


def _checked(fn: Callable[..., Any], operator: str, *, skip_self: bool = False) -> Callable[..., Any]:
    batch_at = 1 if skip_self else 0

    if inspect.isasyncgenfunction(fn):

        async def check_async_generator(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            given, returned = _num_rows(args[batch_at]), 0
            async for part in fn(*args, **kwargs):
                returned += _num_rows(part)
                yield part
            _compare(operator, given, returned)

        return _named(check_async_generator, fn)
    if inspect.iscoroutinefunction(fn):

        async def check_async(*args: Any, **kwargs: Any) -> Any:
            given = _num_rows(args[batch_at])
            result = await fn(*args, **kwargs)
            _compare(operator, given, _num_rows(result))
            return result

        return _named(check_async, fn)

    def check(*args: Any, **kwargs: Any) -> Any:
        given = _num_rows(args[batch_at])
        result = fn(*args, **kwargs)
        if isinstance(result, types.GeneratorType):
            return _check_generator(result, operator, given)
        _compare(operator, given, _num_rows(result))
        return result

    return _named(check, fn)


def _named(wrapper: Callable[..., Any], fn: Any) -> Callable[..., Any]:
    """``wrapper`` under the name of ``fn``; also for partials and callable objects, which have none."""
    functools.update_wrapper(wrapper, fn)
    inner = fn.func if isinstance(fn, functools.partial) else fn
    wrapper.__name__ = getattr(inner, "__name__", type(inner).__name__)
    # Ray must look at the wrapper itself, and pickles must not carry the function twice.
    wrapper.__dict__.pop("__wrapped__", None)
    return wrapper


def _check_generator(parts: Iterator[Any], operator: str, given: int) -> Iterator[Any]:
    returned = 0
    for part in parts:
        returned += _num_rows(part)
        if returned > given:
            _compare(operator, given, returned)
        yield part
    _compare(operator, given, returned)


def _compare(operator: str, given: int, returned: int) -> None:
    if returned != given:
        raise RowCountChangedError(
            f"{operator} was given a batch of {given} rows and returned {returned}. A stream counts rows, so a "
            "transform must return one row per row. To leave rows out use read_stream(filter=...); to mark bad "
            "ones add a column; to make several from one return them as a list column."
        )


def _num_rows(batch: Any) -> int:
    """Rows of a batch in any of Ray's formats: dict of columns, DataFrame, Arrow table, ndarray."""
    if isinstance(batch, collections.abc.Mapping):
        return max((len(column) for column in batch.values()), default=0)
    if hasattr(batch, "num_rows"):
        return int(batch.num_rows)
    return len(batch) if hasattr(batch, "__len__") else 0
