"""``EpochPlan``: which row is where in one epoch, for those who ask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lance_ray_stream.display import facts_html
from lance_ray_stream.errors import InvalidArgumentError, LayoutError
from lance_ray_stream.layout import IntArray, SplitLayout, check_int
from lance_ray_stream.reader import resolve_offsets
from lance_ray_stream.row_order import Addresses, PlannedRows, RowOrder
from lance_ray_stream.table import TableRef

_LOOKUP_ROWS = 131_072


class PlannedEpoch(Protocol):
    """What every form of a plan says of its epoch."""

    @property
    def rows(self) -> int:
        """N: rows of the version that pass the filter."""
        ...

    @property
    def rows_per_split(self) -> int:
        """L: rows of each split."""
        ...

    @property
    def fingerprint(self) -> str:
        """Digest of the order."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class EpochPlan:
    """The answer to "which row is at (split s, index i)?" for one epoch. Immutable.

    Attributes:
        epoch: The epoch.
        num_splits: Number of splits S.
        rows: N, the rows of the version that pass the filter.
        rows_per_split: L, the rows of each split.
        order: Where the rows are looked up.
        fingerprint: Digest of the order, the same on every platform.
        table: The pinned table, which knows the row ids of an order that is computed.
    """

    epoch: int
    num_splits: int
    rows: int
    rows_per_split: int
    order: RowOrder
    fingerprint: str
    table: TableRef

    @property
    def dropped_rows(self) -> int:
        """Surplus rows of this epoch: ``N % num_splits`` of them, so that all splits are equally long."""
        return self.rows - self.num_splits * self.rows_per_split

    @property
    def ids(self) -> Addresses:
        """All row ids, ``(S, L)`` uint64, read-only: 8 bytes per row."""
        if isinstance(self.order, PlannedRows) and isinstance(self.order.ids, np.ndarray):
            return _read_only(self.order.ids)
        places = np.arange(self.num_splits * self.rows_per_split)
        parts = [self._row_ids_at(*np.divmod(part, self.rows_per_split)) for part in _runs(places)]
        return _read_only(np.concatenate(parts).reshape(self.num_splits, self.rows_per_split))

    def row_ids(self, split: int) -> Addresses:
        """Row ids of one split in order, ``(L,)`` uint64, read-only.

        Raises:
            LayoutError: There is no such split.
        """
        number = check_int("split", split, minimum=0)
        if number >= self.num_splits:
            raise LayoutError(f"there is no split {number}; the {self.num_splits} splits are 0..{self.num_splits - 1}")
        return self._row_ids_at(np.full(self.rows_per_split, number), np.arange(self.rows_per_split))

    def row_ids_of_step(self, step: int, global_batch_size: int) -> Addresses:
        """Row ids of one global batch, ``(G,)`` uint64: cycle by cycle, in each the splits ascending.

        The last step of an epoch may be shorter, by whole cycles.

        Raises:
            LayoutError: ``global_batch_size`` is not a multiple of ``num_splits``.
            InvalidArgumentError: The epoch has no such step.
        """
        size = SplitLayout(self.num_splits).check_global_batch_size(global_batch_size)
        cycles = size // self.num_splits
        steps = -(-self.rows_per_split // cycles)
        if check_int("step", step, minimum=0) >= steps:
            raise InvalidArgumentError(
                f"there is no step {step}: epoch {self.epoch} has {self.rows_per_split} cycles, {steps} "
                f"steps of global_batch_size={size} (0..{steps - 1})"
            )
        # The last step, or one larger than the epoch, ends with the epoch.
        in_step = np.arange(step * cycles, min((step + 1) * cycles, self.rows_per_split))
        # (cycles, S) -> (G,)
        index, split = np.meshgrid(in_step, np.arange(self.num_splits), indexing="ij")
        return self._row_ids_at(split.ravel(), index.ravel())

    def _row_ids_at(self, split: IntArray, index: IntArray) -> Addresses:
        rows = self.order.at(split, index)
        return _read_only(rows if self.order.address == "row_id" else resolve_offsets(self.table.open(), rows))

    def __repr__(self) -> str:
        return (
            f"EpochPlan(epoch={self.epoch}, num_splits={self.num_splits}, rows={self.rows}, "
            f"rows_per_split={self.rows_per_split}, dropped_rows={self.dropped_rows}, "
            f"fingerprint={self.fingerprint!r})"
        )

    def _repr_html_(self) -> str:
        first = self._row_ids_at(np.zeros(8, dtype=np.int64), np.arange(8)) if self.rows_per_split >= 8 else None
        facts = {
            "splits": self.num_splits,
            "rows per split": self.rows_per_split,
            "rows": self.rows,
            "dropped rows": self.dropped_rows,
            "fingerprint": self.fingerprint,
            "first row ids of split 0": ", ".join(map(str, (self.row_ids(0) if first is None else first).tolist())),
        }
        return facts_html(f"EpochPlan of epoch {self.epoch}", facts)


def _runs(places: IntArray) -> Iterator[IntArray]:
    """``places`` in parts that are not too large to look up at once."""
    return (places[start : start + _LOOKUP_ROWS] for start in range(0, len(places), _LOOKUP_ROWS))


def _read_only(array: Addresses) -> Addresses:
    view: Addresses = array.view()
    view.flags.writeable = False
    return view
