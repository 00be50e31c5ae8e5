"""Every private name of Ray that this package touches, each with the reason.

Ray Data has a public interface for reading (``Datasource``) and for consuming (``DataIterator``), but none for
"the same transforms over another source", "count rows when they are handed over" or "run in order". Those three
are what the names below are for. They are tied to the Ray releases in ``pyproject.toml``; this
module fails at import, with that sentence, where one of them has moved. Those of Ray Train are in ``train``.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pyarrow as pa
import ray
from ray.data import DataContext, DataIterator, Dataset, Datasource, ExecutionResources
from ray.data.block import BlockMetadata
from ray.util.debug import log_once

try:
    # The stub column by which Ray Data keeps the row count of a block that has no columns.
    from ray.data._internal.arrow_block import _BATCH_SIZE_PRESERVING_STUB_COL_NAME as ROW_COUNT_COLUMN

    # The batch iterator behind DataIterator: its context manager around each hand-over is the only
    # place that knows the row count of a batch at the moment the trainer receives it.
    from ray.data._internal.block_batching.iter_batches import BatchIterator

    # What the parts of an execution hand to each other, how they are told what they may use, and the one
    # place to speak up before they start.
    from ray.data._internal.execution.execution_callback import ExecutionCallback
    from ray.data._internal.execution.interfaces import BlockEntry, RefBundle

    # The logical plan of a dataset: read to refuse operators, rebuilt to put another source under
    # the user's transforms.
    from ray.data._internal.logical.interfaces import LogicalOperator, LogicalPlan
    from ray.data._internal.logical.operators import (
        Download,
        MapBatches,
        MapRows,
        Project,
        Read,
        StreamingRepartition,
    )
    from ray.data._internal.stats import DatasetStats
except ImportError as error:  # pragma: no cover - needs another Ray
    raise ImportError(
        f"lance_ray_stream does not know the inside of Ray {ray.__version__} ({error}). "
        "Install a release of Ray in the range that its pyproject.toml names."
    ) from error

# Ray's own names that other modules use.
__all__ = ["ROW_COUNT_COLUMN", "LogicalOperator", "MapBatches", "Read"]

# More than a task ever has: a window is 64 MiB, a block of a transform's output 128.
_BLOCKS_OF_A_TASK = 1_000

# Operators that give one row per row, in order. MapBatches is among them because its function is checked
# at run time; everything that is not listed is refused, so that a new operator of Ray is refused too.
_ROW_PRESERVING = (Read, MapBatches, MapRows, Project, Download, StreamingRepartition)


def operators(dataset: Dataset) -> list[LogicalOperator]:
    """The logical operators of a dataset, sources first. Reason: ``Dataset`` has no public view of them."""
    return list(dataset._logical_plan.dag.post_order_iter())


def source_of(dataset: Dataset) -> Datasource | None:
    """The datasource of a dataset with exactly one ``Read``, else None."""
    sources = [op for op in operators(dataset) if not op.input_dependencies]
    if len(sources) == 1 and isinstance(sources[0], Read):
        return sources[0].datasource
    return None


def is_row_preserving(operator: LogicalOperator) -> bool:
    """Whether the operator gives one row per row, in the same order."""
    return isinstance(operator, _ROW_PRESERVING)


def replace_operator(operator: LogicalOperator, **changes: Any) -> LogicalOperator:
    """A copy of a (frozen) logical operator with some fields changed."""
    return dataclasses.replace(operator, **changes)


def rebuild(dataset: Dataset, change: Callable[[LogicalOperator], LogicalOperator], context: DataContext) -> Dataset:
    """A new dataset whose operators are those of ``dataset`` after ``change``, with its own context.

    Reason: ``_apply_transform`` is the one function that rebuilds a plan bottom-up; ``Dataset``'s
    constructor takes a plan and is marked internal.
    """
    dag = dataset._logical_plan.dag._apply_transform(change)
    return Dataset(
        LogicalPlan(dag, context),
        context,
        DatasetStats(metadata={}, parent=None),
        dataset_name=dataset.name,
    )


def let_tasks_end(context: DataContext) -> None:
    """Have tasks put out their blocks without waiting for a consumer.

    Reason: after a few blocks Ray pauses a task until they are read, and it keeps its CPU. The paused tasks of a rank
    that waits, in a collective say, for another rank can hold all CPUs, and with them the other rank: for ever. The
    same number is how many blocks of each task Ray expects to come, at most as many as tasks had on average, so that
    what is in the object store stays within its limits.
    """
    context._max_num_blocks_in_streaming_gen_buffer = _BLOCKS_OF_A_TASK


def static_schema(dataset: Dataset) -> Any:
    """The Arrow schema of a dataset if it is known without running anything, else None."""
    return dataset._logical_plan.dag.infer_schema()


def operator_seconds(dataset: Dataset) -> list[tuple[str, float]]:
    """Name and seconds of each operator of the latest execution, the sum over its tasks so far, in order of the plan.

    Reason: ``Dataset.stats()`` has these numbers only inside its text. Ray Data fuses operators and joins their names;
    with ``DataContext.per_stage_map_timing`` each has its own seconds.
    """
    summaries, pending = [], [dataset.get_stats_summary()]
    while pending:
        summaries.append(pending.pop())
        pending += summaries[-1].parents
    seconds: list[tuple[str, float]] = []
    for operator in (operator for summary in reversed(summaries) for operator in summary.operators_stats):
        names = operator.operator_name.split("->")
        if operator.stage_time and len(operator.stage_time) == len(names):
            seconds += zip(names, (stage.sum for stage in operator.stage_time), strict=True)
        elif operator.wall_time:
            seconds.append((operator.operator_name, operator.wall_time.sum))
    return seconds


def delivery_seconds(dataset: Dataset) -> list[tuple[str, float]]:
    """Seconds of each stage between the arrival of blocks and the hand-over of batches, in the latest execution.

    Reason: Ray's batch iterator adds them to the object that the execution began with, which ``Dataset.stats()`` no
    longer shows when the execution has made another.
    """
    stats = dataset._cache.get_stats()
    if stats is None:
        return []
    return [
        ("fetch blocks", stats.iter_get_s.get()),
        ("cut batches", stats.iter_next_batch_s.get()),
        ("format", stats.iter_format_batch_s.get()),
        ("collate", stats.iter_collate_batch_s.get()),
        ("to device", stats.iter_finalize_batch_s.get()),
    ]


class _Quiet(logging.Filter):
    """Keeps log lines of some datasets' executions out, unless something is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.dataset_uuids: deque[str] = deque(maxlen=64)

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.INFO or not any(uuid in record.getMessage() for uuid in self.dataset_uuids)


_quiet = _Quiet()


def silence(dataset: Dataset) -> None:
    """Keep Ray Data's lines at the start and end of ``dataset``'s execution out; warnings and errors stay.

    Reason: no option of ``DataContext`` silences them; with a rank and an epoch each they drown the trainer's own.
    """
    _quiet.dataset_uuids.append(dataset._uuid)
    # The second one tells that two executions are logging at once.
    for name in ("ray.data._internal.execution.streaming_executor", "ray.data._internal.logging"):
        logging.getLogger(name).addFilter(_quiet)
    # Ray's advice to switch on the bars that this package switches off; it asks log_once whether to give it.
    log_once("ray_data_progress_manager_disabled")


def _unlink_when_cleared(executor: Any) -> None:
    """Have the queues between operators let go of their blocks when they are cleared.

    Reason: they are lists linked in both directions, and Ray clears them by forgetting both ends. After a break, what
    was read ahead, windows of 64 MiB, would stay in the object store until Python happens to collect garbage.
    """
    for state in executor._topology.values():
        state.output_queue.clear = partial(_take_all, state.output_queue)


def _take_all(queue: Any) -> None:
    while queue.pop() is not None:
        pass


def _free_uncounted(executor: Any) -> None:
    """Have an execution that has ended let go of the blocks that were on their way between its parts.

    Reason: Ray leaves them in the queues in which it counts what an operator holds and in those for metadata.
    """
    for operator in executor._topology:
        counted = operator.metrics
        for queue in (*counted._internal_inqueues, counted._internal_outqueue, counted._pending_task_inputs):
            while queue.has_next():
                queue.get_next()
    for waiting in vars(executor._metadata_fetcher).values():
        if isinstance(waiting, dict | list | set):
            waiting.clear()


class StartWithAllResources(ExecutionCallback):
    """Lets an execution use the whole cluster, within the user's limits, from its first task on.

    Reason: Ray asks another process in the background what an execution may use, and looks again after a second. Until
    then it allows one task at a time.
    """

    def before_execution_starts(self, executor: Any) -> None:
        """Ray calls this when all parts are there and no task has run."""
        manager = executor._resource_manager
        ask, whole = manager._get_total_resources, ExecutionResources.from_resource_dict(ray.cluster_resources())
        manager._get_total_resources = lambda: whole
        manager.get_global_limits()
        manager._get_total_resources = ask


class Execution:
    """A dataset that this process has begun to run.

    Args:
        dataset: what is run; at least its first block has come when this returns.
        hold_bytes: how far it may read ahead until :meth:`go_on`; as far as Ray lets it if None.

    Reason: ``Dataset.iterator()`` makes the same call, and hides the executor that has to be shut down after a break.
    """

    def __init__(self, dataset: Dataset, *, hold_bytes: int | None = None) -> None:
        self.dataset = dataset
        options = dataset.context.execution_options
        self._limits = options.resource_limits
        if hold_bytes is not None:
            options.resource_limits = self._limits.min(ExecutionResources.for_limits(object_store_memory=hold_bytes))
        self.bundles, self.stats, self.executor = dataset._execute_to_iterator()
        if self.executor is not None:
            _unlink_when_cleared(self.executor)

    def go_on(self) -> None:
        """Read as far ahead as Ray lets it."""
        self.dataset.context.execution_options.resource_limits = self._limits
        if self.executor is not None:
            self.executor._options.resource_limits = self._limits

    def stop(self) -> None:
        """Ask its tasks to end, and let go of what was read ahead."""
        if ray.is_initialized():  # else all of it has ended
            _stop(self.executor)


def _stop(executor: Any) -> None:
    """End an execution.

    Reason: Ray's own way cancels by force, which kills the reader processes: a run that breaks and goes on would wait
    seconds for new ones. Asked politely, a read task ends with its window.
    """
    if executor is not None:
        executor.shutdown(force=False)
        if not executor.is_alive():  # else it is in the middle of a step, for longer than Ray waits
            _free_uncounted(executor)


def _handed_on_at_once(bundles: Iterator[Any], on_block: Callable[[int, int], None]) -> Iterator[Any]:
    """``bundles``, each reported with its rows and bytes; the first is followed by one without rows.

    Reason: Ray's prefetcher hands a block on when the next one has come, so the first batch would wait for the second
    window.
    """
    first = True
    for bundle in bundles:
        on_block(bundle.num_rows(), bundle.size_bytes())
        yield bundle
        if first:
            block: Any = ray.put(pa.table({}))
            metadata = BlockMetadata(num_rows=0, size_bytes=0, exec_stats=None)
            yield RefBundle((BlockEntry(block, metadata),), schema=None, owns_blocks=True)
        first = False


class _ReceivingBatchIterator(BatchIterator):
    """Ray's batch iterator that reports the rows of each batch that it hands to the trainer, and leaves no thread."""

    def __init__(self, *args: Any, on_receive: Callable[[int], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._on_receive = on_receive

    @contextmanager
    def yield_batch_context(self, batch: Any) -> Iterator[None]:
        self._on_receive(batch.metadata.num_rows)
        with super().yield_batch_context(batch):
            yield

    # Reason: Ray stops the thread that fetches blocks ahead only when the last batch was taken; after a break, and
    # always with prefetch_batches=0, it would stay for ever, and hold the latest blocks in the object store.
    def _iter_batches(self) -> Iterator[Any]:
        try:
            yield from super()._iter_batches()
        finally:
            self._prefetcher.stop()


class HookedDataIterator(DataIterator):
    """A ``DataIterator`` whose private hooks have names and meanings of our own."""

    def execution_to_read(self) -> Execution:
        """What the iteration which starts now is to read, running in this process."""
        raise NotImplementedError

    def on_receive(self, num_rows: int) -> None:
        """Called right before a batch of ``num_rows`` rows is handed to the trainer."""
        raise NotImplementedError

    def make_batches(self, **kwargs: Any) -> Any:
        """What every ``iter_*`` method iterates over; the arguments are those of ``iter_batches``."""
        raise NotImplementedError

    def on_block(self, num_rows: int, num_bytes: int) -> None:
        """Called, in the thread that fetches ahead, when a block has arrived for the batches to come."""
        raise NotImplementedError

    def metric_tags(self) -> dict[str, str | None]:
        """The labels ``dataset`` and ``split_index`` of Ray Data's metrics."""
        raise NotImplementedError

    def ray_batches(self, **kwargs: Any) -> Iterable[Any]:
        """Ray's own batches, of the execution that ``execution_to_read`` gives when they are iterated over."""
        return super()._iter_batches(**kwargs)

    # Reason: DataIterator's one abstract method for its source.
    def _to_ref_bundle_iterator(self) -> tuple[Iterator[Any], Any, Any]:
        execution = self.execution_to_read()
        return execution.bundles, execution.stats, execution.executor

    # Reason: all of iter_batches, iter_torch_batches, iter_tf_batches, ... go through it.
    def _iter_batches(self, **kwargs: Any) -> Any:
        return self.make_batches(**kwargs)

    # Reason: the place where Ray makes the batch iterator that has to report hand-overs.
    def _create_batch_iterator(
        self, ref_bundles_iter: Iterator[Any], prefetch_bytes_callback: Any = None, **kwargs: Any
    ) -> Any:
        return _ReceivingBatchIterator(
            _handed_on_at_once(ref_bundles_iter, self.on_block),
            on_receive=self.on_receive,
            prefetch_bytes_callback=prefetch_bytes_callback,
            **kwargs,
        )

    # Reason: see _stop.
    def _on_iteration_end(self, executor: Any) -> None:
        _stop(executor)

    # Reason: without it the metrics of all streams would count as "unknown_dataset".
    def _get_dataset_tag(self) -> dict[str, str | None]:
        return self.metric_tags()
