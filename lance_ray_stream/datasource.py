"""Ray Data datasources over a plan: one read task per split, or one per window of a split group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
from ray.data import DataContext, Datasource
from ray.data.block import BlockMetadata
from ray.data.datasource import ReadTask

from lance_ray_stream.layout import IntArray
from lance_ray_stream.memory import release_memory
from lance_ray_stream.planner import FetchRows, LocalPlanner
from lance_ray_stream.position import Window
from lance_ray_stream.ray_internals import ROW_COUNT_COLUMN
from lance_ray_stream.reader import read_rows
from lance_ray_stream.spec import StreamSpec
from lance_ray_stream.window_reader import read_window

# Wider reads are faster until a window is this many rows or bytes; measured, see docs/performance.md.
MAX_WINDOW_ROWS = 131_072
MAX_WINDOW_BYTES = 64 * 1024 * 1024

Columns = tuple[str, ...] | None


def max_window_rows(row_bytes: int) -> int:
    """Rows of the widest window for rows of about ``row_bytes`` bytes."""
    return max(1, min(MAX_WINDOW_ROWS, MAX_WINDOW_BYTES // max(1, row_bytes)))


class StreamDatasource(Datasource):
    """A stream as a plain dataset: one read task per split, in split order, rows in plan order.

    Args:
        spec: what is streamed.
        epoch: whose plan is read.
    """

    def __init__(self, spec: StreamSpec, *, epoch: int = 0) -> None:
        super().__init__()
        self.spec = spec
        self.epoch = epoch
        self._projection_map: dict[str, str] | None = None

    def get_name(self) -> str:
        """The name that Ray shows for the read."""
        return "LanceStream"

    def supports_projection_pushdown(self) -> bool:
        """``select_columns`` on the dataset narrows what is read."""
        return True

    @property
    def columns(self) -> Columns:
        """The columns that are read; all if None."""
        selected = self._get_data_columns()
        return self.spec.columns if selected is None else tuple(selected)

    @property
    def schema(self) -> pa.Schema:
        """The schema of the rows that are read."""
        selected = self._get_data_columns()
        if selected is None:
            return self.spec.schema
        return pa.schema([self.spec.schema.field(name) for name in selected])

    @property
    def num_splits(self) -> int:
        """The splits that are read: as a plain dataset, a stream without ``num_splits`` is one."""
        return self.spec.num_splits or 1

    def estimate_inmemory_data_size(self) -> int | None:
        """Bytes of all rows, from the schema and the table's statistics; None if a filter hides their number."""
        rows = self._rows_per_split()
        return None if rows is None else rows * self.num_splits * self.spec.row_bytes

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: DataContext | None = None,
    ) -> list[ReadTask]:
        """One task per split, whatever ``parallelism`` is asked for.

        Ray calls this for row counts and schemas too; only an execution passes ``data_context``, and
        only then is the epoch planned.
        """
        if data_context is None:
            rows = self._rows_per_split()
            return [self._task(_not_planned, rows, per_task_row_limit) for _ in range(self.num_splits)]
        spec, columns = replace(self.spec, num_splits=self.num_splits), self.columns
        plan = LocalPlanner().plan(spec, self.epoch, range(self.num_splits))
        parts = [plan.part(range(split, split + 1)) for split in plan.splits]
        return [
            self._task(
                _split_reader(spec, columns, part.rows_to_fetch(), part.rows_per_split),
                part.rows_per_split,
                per_task_row_limit,
            )
            for part in parts
        ]

    def _rows_per_split(self) -> int | None:
        if self.spec.filter is not None:
            return None
        return self.spec.total_rows // self.num_splits

    def _task(
        self, read: Callable[[], Iterator[pa.Table]], num_rows: int | None, row_limit: int | None = None
    ) -> ReadTask:
        size = None if num_rows is None else num_rows * self.spec.row_bytes
        metadata = BlockMetadata(num_rows=num_rows, size_bytes=size, input_files=None, exec_stats=None)
        return ReadTask(read, metadata, schema=self.schema, per_task_row_limit=row_limit)


class WindowDatasource(StreamDatasource):
    """What is left of an epoch for one rank: one read task per window, rows in the order of delivery.

    Args:
        rows: where a read task finds the order of the rank's splits.
        position: int64, shape (splits per rank,): where those splits stand.
        windows: what to read, in order.
        num_workers: threads of a read task, each with its part of the split group.
    """

    def __init__(
        self,
        spec: StreamSpec,
        *,
        epoch: int,
        rows: FetchRows,
        position: IntArray,
        windows: list[Window],
        num_workers: int,
    ) -> None:
        super().__init__(spec, epoch=epoch)
        self.windows = windows
        self._rows = rows
        self._position = position
        self._num_workers = num_workers

    def estimate_inmemory_data_size(self) -> int | None:
        """Bytes of the rows that are left."""
        return sum(window.num_rows for window in self.windows) * self.spec.row_bytes

    def get_read_tasks(
        self,
        parallelism: int,
        per_task_row_limit: int | None = None,
        data_context: DataContext | None = None,
    ) -> list[ReadTask]:
        """One task per window, in order, whatever ``parallelism`` is asked for."""
        spec, columns, rows = self.spec, self.columns, self._rows
        position, num_workers = self._position, self._num_workers
        return [
            self._task(
                _window_reader(spec, columns, rows, window, position, num_workers),
                window.num_rows,
                per_task_row_limit,
            )
            for window in self.windows
        ]


# The functions that a task carries are made here, at module level, so that they capture the few names
# they use and never a datasource.


def _not_planned() -> Iterator[pa.Table]:
    raise RuntimeError("This read task describes a split; an execution makes its own tasks.")


def _split_reader(
    spec: StreamSpec, columns: Columns, rows: FetchRows, rows_per_split: int
) -> Callable[[], Iterator[pa.Table]]:
    block_rows = max_window_rows(spec.row_bytes)

    def read_split() -> Iterator[pa.Table]:
        order, table = rows.fetch(), spec.table.open()
        for start in range(0, rows_per_split, block_rows):
            index = np.arange(start, min(start + block_rows, rows_per_split))
            wanted = order.at(np.zeros_like(index), index)
            release_memory()  # of the block before
            block = _block(read_rows(table, wanted, columns=columns, address=order.address))
            release_memory()  # before Ray copies the block into its store
            yield block

    return read_split


def _window_reader(
    spec: StreamSpec,
    columns: Columns,
    rows: FetchRows,
    window: Window,
    position: IntArray,
    num_workers: int,
) -> Callable[[], Iterator[pa.Table]]:
    def read() -> Iterator[pa.Table]:
        order, table = rows.fetch(), spec.table.open()
        release_memory()  # of the window before, which this process read too
        block = _block(read_window(table, window, order, position, columns=columns, num_workers=num_workers))
        release_memory()  # before Ray copies the block into its store
        yield block

    return read


def _block(rows: pa.Table) -> pa.Table:
    """``rows`` as Ray Data takes them: without a column, as for ``count()``, a block would lose its row count."""
    if rows.num_columns:
        return rows
    return pa.table({ROW_COUNT_COLUMN: pa.nulls(rows.num_rows)})
