"""Where the rows of a plan lie in storage, and what a read of some of them touches. Arithmetic on row ids.

A row id of Lance is ``fragment * 2**32 + offset`` (without stable row ids), so neighbours in storage have
consecutive ids, and a fragment never shares storage with another.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lance_ray_stream.epoch_plan import EpochPlan
from lance_ray_stream.layout import IntArray

RowIds = npt.NDArray[np.uint64]


def storage_positions(plan: EpochPlan) -> IntArray:
    """The place of each row among the plan's rows in storage order, from 0: int64, shape (num_splits, L).

    With stable row ids this is the order in which rows were written.
    """
    row_ids = np.stack([plan.row_ids(split) for split in range(plan.num_splits)])
    positions = np.empty(row_ids.size, dtype=np.int64)
    positions[np.argsort(row_ids, axis=None)] = np.arange(row_ids.size)
    return positions.reshape(row_ids.shape)


def count_ranges(row_ids: RowIds) -> int:
    """Runs of neighbours in storage among ``row_ids``, which are distinct: what cannot be read in one go."""
    ordered = np.sort(row_ids)
    return int(len(ordered) > 0) + int((np.diff(ordered) != 1).sum())


def count_touched_bytes(row_ids: RowIds, *, row_bytes: int, block_bytes: int) -> int:
    """Bytes of the storage blocks in which rows of ``row_bytes`` bytes lie, rows of a fragment back to back.

    A model: it knows nothing of columns, compression and pages, and counts a block once however many of
    its rows are read.
    """
    ordered = np.sort(row_ids)
    fragment, offset = ordered >> np.uint64(32), (ordered & np.uint64(2**32 - 1)).astype(np.int64)
    first, last = offset * row_bytes // block_bytes, ((offset + 1) * row_bytes - 1) // block_bytes
    # the last block that earlier rows of the same fragment touched
    seen = np.full(len(ordered), -1, dtype=np.int64)
    seen[1:] = np.where(fragment[1:] == fragment[:-1], last[:-1], -1)
    return int((last - np.maximum(first, seen + 1) + 1).sum()) * block_bytes
