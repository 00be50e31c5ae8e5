"""Where one rank stands. Pure arithmetic; the whole of what a checkpoint has to remember."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lance_ray_stream.layout import IntArray, SplitLayout
from lance_ray_stream.position import advance, is_cycle_boundary, rows_to_deliver
from lance_ray_stream.state import StreamState


class Cursor:
    """The position of one rank: an epoch, where its reading began, and the rows received since.

    The rows of the other ranks are not seen here, but ranks receive equally many; so their positions
    follow from this rank's count, exactly as long as they are in step. Where ranks have unequally many splits they
    receive whole cycles, so that all splits stand at the same row.
    """

    def __init__(self, layout: SplitLayout, *, rank: int, world_size: int, epoch: int) -> None:
        self.layout = layout
        self.rank = rank
        self.world_size = world_size
        self.splits = layout.splits_of(rank, world_size)
        self.jump(epoch)

    def __repr__(self) -> str:
        return f"Cursor(epoch={self.epoch}, rank={self.rank}/{self.world_size}, received={self.received})"

    def jump(self, epoch: int, position: IntArray | None = None, counted: range | None = None) -> None:
        """Stand at ``position`` (int64, shape (num_splits,)) of ``epoch``, at its start if None.

        ``counted`` are the splits whose position was counted and not projected; all if None.
        """
        self.epoch = epoch
        self._counted = range(self.layout.num_splits) if counted is None else counted
        if position is None:
            position = np.zeros(self.layout.num_splits, dtype=np.int64)
        self.start = position.copy()
        self.received = 0

    def of_epoch(self, epoch: int) -> Cursor:
        """This rank at the first row of ``epoch``."""
        return Cursor(self.layout, rank=self.rank, world_size=self.world_size, epoch=epoch)

    def is_at_start(self) -> bool:
        """Whether no row of the epoch was received, by any rank."""
        return not self.received and not self.start.any()

    def receive(self, num_rows: int) -> None:
        """Count rows that were handed to the trainer."""
        self.received += num_rows
        self._counted = self.splits

    def save(self, *, shuffle_seed: int, provenance: Mapping[str, Any]) -> StreamState:
        """The state of the present position.

        At a cycle boundary it vouches for all splits, so that every rank's state is the same; inside a cycle for
        the rank's own, so that the states of all ranks can be merged and a missing one is noticed.
        """
        position = self.position()
        return StreamState(
            num_splits=self.layout.num_splits,
            shuffle_seed=shuffle_seed,
            epoch=self.epoch,
            position=position,
            splits=range(self.layout.num_splits) if is_cycle_boundary(position) else self._counted,
            provenance=provenance,
        )

    def settle(self) -> None:
        """Make the present position the one from which reading begins."""
        self.jump(self.epoch, self.position(), self._counted)

    def resume(self, saved: StreamState, rows_per_split: int) -> None:
        """Stand where ``saved`` was made; the very end of an epoch is the start of the next one."""
        if (saved.position == rows_per_split).all():
            self.jump(saved.epoch + 1)
        else:
            self.jump(saved.epoch, saved.position, saved.splits)

    def position(self) -> IntArray:
        """Rows received of every split, int64 of shape (num_splits,)."""
        if is_cycle_boundary(self.start):
            cycles, inside = divmod(self.received, len(self.splits))
            if not inside:
                moved: IntArray = self.start + cycles
                return moved
            one_group = advance(self.start[: len(self.splits)], self.received)
            return np.tile(one_group, self.world_size)
        # (num_splits,) -> (world_size, splits per rank)
        groups = self.start.reshape(self.world_size, -1)
        return np.concatenate([advance(group, self.received) for group in groups])

    def own_start(self) -> IntArray:
        """Where this rank's splits stood when its reading began, int64 of shape (splits per rank,)."""
        own: IntArray = self.start[self.splits.start : self.splits.stop]
        return own

    def rows_left(self, rows_per_split: int) -> int:
        """Rows that this rank still delivers in this epoch; ranks have them in proportion to their splits."""
        position = self.position()
        if is_cycle_boundary(position):
            return (rows_per_split - int(position[0])) * len(self.splits)
        return rows_to_deliver(position, self.world_size, rows_per_split)
