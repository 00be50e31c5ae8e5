"""Where: positions of a split group, what comes next, and the windows in which it is read. Pure arithmetic.

A position is an int64 array with the number of rows received of each split. Whatever it is, one rule
says what comes next: of all pairs (cycle, split) with ``cycle >= position[split]``, those that come first in
(cycle, split) order. From equal positions that is the round-robin of G1; from unequal ones it is the order in
which LanceDB's ``StreamingDataset`` catches up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lance_ray_stream.layout import IntArray


def advance(position: IntArray, num_rows: int) -> IntArray:
    """The position after ``num_rows`` more rows: the lowest splits fill up first, ties by split.

    >>> advance(np.array([2, 2, 1]), 2).tolist()
    [3, 2, 2]
    """
    if is_cycle_boundary(position):
        cycles, rest = divmod(num_rows, len(position))
        moved: IntArray = position + cycles + (np.arange(len(position)) < rest)
        return moved
    level = _level(position, num_rows)
    filled: IntArray = np.maximum(position, level)
    rest = num_rows - int((filled - position).sum())
    behind = np.flatnonzero(filled == level)[:rest]
    filled[behind] += 1
    return filled


def _level(position: IntArray, num_rows: int) -> int:
    """The highest cycle up to which ``num_rows`` rows bring every split."""
    ordered = np.sort(position)
    # rows that it takes to lift all splits below the i-th one to its height
    cost = ordered * np.arange(len(ordered)) - (np.cumsum(ordered) - ordered)
    lifted = int(np.searchsorted(cost, num_rows, side="right"))
    return int(ordered[lifted - 1] + (num_rows - cost[lifted - 1]) // lifted)


def rows_left(position: IntArray, rows_per_split: int) -> int:
    """Rows of these splits that are still to come in the epoch."""
    return int((rows_per_split - position).sum())


def rows_to_deliver(position: IntArray, world_size: int, rows_per_split: int) -> int:
    """Rows that every rank delivers until the epoch ends.

    Args:
        position: of all splits of the stream, shape (num_splits,).

    The ranks of a run that resumes inside a cycle on another world size can have unequal rests; all of them
    stop at the smallest, so that no rank waits for another (G6).
    """
    # (num_splits,) -> (world_size, splits per rank)
    groups = position.reshape(world_size, -1)
    return min(rows_left(group, rows_per_split) for group in groups)


def ranks_are_even(position: IntArray, world_size: int) -> bool:
    """Whether all ranks can end the epoch in step: from equal positions always, else with equal rests."""
    if is_cycle_boundary(position):
        return True
    if len(position) % world_size:
        return False
    received = position.reshape(world_size, -1).sum(axis=1)
    return bool((received == received[0]).all())


def num_batches(num_rows: int, batch_size: int, drop_last: bool) -> int:
    """Batches that ``num_rows`` rows make; the last one may be shorter unless it is dropped."""
    return num_rows // batch_size if drop_last else -(-num_rows // batch_size)


def is_cycle_boundary(position: IntArray) -> bool:
    """Whether all splits have delivered equally many rows."""
    return bool((position == position[0]).all())


@dataclass(frozen=True)
class Window:
    """A run of whole cycles ``[start, stop)`` of a split group, of which ``num_rows`` rows are read.

    ``num_rows`` is less than the cycles hold where splits are ahead already, or where the epoch is cut.
    """

    start: int
    stop: int
    num_rows: int


def windows(position: IntArray, *, num_rows: int, first_rows: int, max_rows: int, growth: int = 4) -> Iterator[Window]:
    """Cut the next ``num_rows`` rows of a split group into windows.

    The first window has about ``first_rows`` rows, so that the first batch comes early; each next one is
    ``growth`` times larger, up to ``max_rows``, because wider windows read faster. Borders follow from the
    numbers alone, so a window that is read again has the same rows.
    """
    cycle, size = int(position.min()), max(1, first_rows)
    while num_rows > 0:
        stop = cycle + max(1, size // len(position))
        rows = min(_rows_between(position, cycle, stop), num_rows)
        if rows:
            yield Window(cycle, stop, rows)
        num_rows -= rows
        cycle, size = stop, min(size * growth, max_rows)


def _rows_between(position: IntArray, start: int, stop: int) -> int:
    return int(np.clip(stop - position, 0, stop - start).sum())


def rows_of_window(window: Window, position: IntArray) -> tuple[IntArray, IntArray]:
    """The places in the plan that a window reads, in the order in which a rank receives them.

    Args:
        position: int64, shape (splits,): where the splits of the group stood when the reading began.

    Returns:
        Two int64 arrays of shape (window.num_rows,): the split, as an offset in the group, and the cycle.
    """
    cycles = np.arange(window.start, window.stop)
    # (cycles, splits), cycle-major: the order of delivery; a split that is ahead is not due yet
    due = cycles[:, None] >= position[None, :]
    cycle, split = np.nonzero(due)
    return split[: window.num_rows], cycles[cycle[: window.num_rows]]
