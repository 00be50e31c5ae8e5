"""What a rank knows of itself: its splits, its rows, its share of a global batch."""

from __future__ import annotations

from typing import Any

from lance_ray_stream.errors import InvalidArgumentError, LayoutError
from lance_ray_stream.layout import check_int
from lance_ray_stream.progress import Progress


class RankFacts:
    """The numbers of one rank of a stream; part of :class:`StreamIterator`."""

    _progress: Progress[Any]
    _global_batch_size: int | None

    @property
    def rank(self) -> int:
        """The rank that this iterator feeds."""
        return self._progress.cursor.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._progress.cursor.world_size

    @property
    def num_splits(self) -> int:
        """The number of splits of the stream."""
        return self._progress.cursor.layout.num_splits

    @property
    def splits(self) -> range:
        """The contiguous splits of this rank."""
        return self._progress.cursor.splits

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration delivers."""
        return self._progress.cursor.epoch

    @property
    def rows_per_split(self) -> int:
        """L: rows of each split in an epoch."""
        return self._progress.rows_per_split

    @property
    def rows_per_epoch(self) -> int:
        """Rows that this rank receives in a whole epoch."""
        return self.rows_per_split * len(self.splits)

    @property
    def table_rows(self) -> int:
        """Rows of the pinned version of the table, before the filter."""
        return self._progress.spec.total_rows

    @property
    def rows(self) -> int:
        """N: rows of the pinned version that pass the filter."""
        return self._progress.rows

    @property
    def dropped_rows(self) -> int:
        """Rows of the table (after the filter) that an epoch leaves out, ``N % num_splits``, over all ranks."""
        return self.rows % self.num_splits

    @property
    def global_batch_size(self) -> int | None:
        """Rows of a step over all ranks, where an iteration names no size: that of ``StreamDataConfig``."""
        return self._global_batch_size

    @property
    def gradient_weight(self) -> float:
        """What this rank multiplies its mean loss by, so that the mean over ranks is that over the global batch.

        1 unless ranks have unequally many splits; see :meth:`SplitLayout.gradient_weight`.
        """
        return self._progress.cursor.layout.gradient_weight(self.rank, self.world_size)

    def local_batch_size(self, global_batch_size: int | None = None) -> int:
        """Rows of one step on this rank: its splits' share of ``global_batch_size``, of StreamDataConfig's if None.

        Raises:
            InvalidArgumentError: if neither names one.
            LayoutError: if the numbers do not fit, listing those that do.
        """
        size = self._global_batch_size if global_batch_size is None else global_batch_size
        if size is None:
            raise InvalidArgumentError(
                "Name global_batch_size, here or once in StreamDataConfig(global_batch_size=...)."
            )
        return self._progress.cursor.layout.local_batch_size(size, self.world_size, self.rank)

    def batch_rows(self, global_batch_size: int | None, batch_size: int | None) -> int:
        """Rows of one step on this rank, by whichever size an iteration names."""
        if batch_size is None and global_batch_size is None:
            global_batch_size = self._global_batch_size
        if (global_batch_size is None) == (batch_size is None):
            raise InvalidArgumentError(
                "Give one of global_batch_size (rows of a step over all ranks, a multiple of "
                f"num_splits={self.num_splits}: the same batches for every number of ranks) and batch_size (rows of a "
                f"step on each rank); got global_batch_size={global_batch_size}, batch_size={batch_size}. "
                "StreamDataConfig(global_batch_size=...) names it once for all."
            )
        if global_batch_size is not None:
            return self.local_batch_size(global_batch_size)
        self.check_equal_groups(f"batch_size={batch_size!r}")
        return check_int("batch_size", batch_size, minimum=1)

    def check_equal_groups(self, what: str) -> None:
        """Refuse ``what`` where ranks have unequally many splits, so that it would end at different steps."""
        if not self._progress.cursor.layout.is_even(self.world_size):
            raise LayoutError(
                f"{what} gives every rank batches of the same size, but with num_splits={self.num_splits} over "
                f"world_size={self.world_size} ranks have unequally many rows and would not end in the same step. Use "
                "global_batch_size=, of which every rank gets its share."
            )
