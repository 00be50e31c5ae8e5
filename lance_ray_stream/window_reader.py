"""Reads one window of a split group, with the reader workers of a rank as threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pyarrow as pa
from lancedb.table import LanceTable

from lance_ray_stream.layout import IntArray
from lance_ray_stream.position import Window, rows_of_window
from lance_ray_stream.reader import read_rows
from lance_ray_stream.row_order import RowOrder


def read_window(
    table: LanceTable,
    window: Window,
    rows: RowOrder,
    position: IntArray,
    *,
    columns: tuple[str, ...] | None,
    num_workers: int = 1,
) -> pa.Table:
    """The rows of a window, in the order in which a rank receives them (G1).

    Args:
        table: the pinned table.
        rows: the order of the group's splits.
        position: int64, shape (splits,): where those splits stood when the reading began.
        columns: the columns to read, all if None.
        num_workers: reader workers; worker w reads the w-th contiguous part of the group. The
            rows and their order do not depend on it.
    """
    split, cycle = rows_of_window(window, position)
    wanted = rows.at(split, cycle)
    read = partial(read_rows, table, columns=columns, address=rows.address)
    # A table without columns has a row count that concat_tables forgets, and nothing to put in order.
    if num_workers == 1 or columns == ():
        return read(wanted)
    worker = ((split + 1) * num_workers - 1) // len(position)  # the parts of SplitLayout.splits_of
    parts = [np.flatnonzero(worker == number) for number in range(num_workers)]
    with ThreadPoolExecutor(num_workers) as pool:
        group_order = pa.concat_tables(pool.map(lambda part: read(wanted[part]), parts)).combine_chunks()
    place = np.empty(len(wanted), dtype=np.int64)
    place[np.concatenate(parts)] = np.arange(len(wanted))
    return group_order.take(place)
