"""Reads one window of a split group, with the reader workers of a rank as threads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from lancedb.table import LanceTable

from lance_ray_stream.layout import IntArray
from lance_ray_stream.position import Window, rows_of_window
from lance_ray_stream.reader import read_rows


def read_window(
    table: LanceTable,
    window: Window,
    row_ids: Sequence[npt.NDArray[np.uint64]],
    position: IntArray,
    *,
    columns: tuple[str, ...] | None,
    num_workers: int = 1,
) -> pa.Table:
    """The rows of a window, in the order in which a rank receives them (G1).

    Args:
        table: the pinned table.
        row_ids: the plan of the group's splits, each uint64 of shape (rows per split,).
        position: int64, shape (splits,): where those splits stood when the reading began.
        columns: the columns to read, all if None.
        num_workers: reader workers; worker w reads the w-th contiguous part of the group. The
            rows and their order do not depend on it.
    """
    split, cycle = rows_of_window(window, position)
    # (splits, cycles of the window) -> (rows,)
    grid = np.stack([ids[window.start : window.stop] for ids in row_ids])
    wanted = grid[split, cycle - window.start]
    # A table without columns has a row count that concat_tables forgets, and nothing to put in order.
    if num_workers == 1 or columns == ():
        return read_rows(table, wanted, columns=columns)
    worker = split // (len(row_ids) // num_workers)
    parts = [np.flatnonzero(worker == number) for number in range(num_workers)]
    with ThreadPoolExecutor(num_workers) as pool:
        tables = list(pool.map(lambda part: read_rows(table, wanted[part], columns=columns), parts))
    place = np.empty(len(wanted), dtype=np.int64)
    place[np.concatenate(parts)] = np.arange(len(wanted))
    return pa.concat_tables(tables).combine_chunks().take(place)
