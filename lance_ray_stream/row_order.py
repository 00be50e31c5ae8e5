"""Which row is at (split, index): looked up in the arrays of a plan, or computed from a formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from lance_ray_stream.layout import IntArray
from lance_ray_stream.permutation import IndexedOrder

# How rows are addressed: by Lance's row id, or by their place among the live rows of the version.
Address: TypeAlias = Literal["row_id", "offset"]
Addresses: TypeAlias = npt.NDArray[np.uint64]


class RowOrder(Protocol):
    """The order of some contiguous splits; splits are counted from the first of them."""

    @property
    def address(self) -> Address:
        """What :meth:`at` returns."""
        ...

    def at(self, split: IntArray, index: IntArray) -> Addresses:
        """The addresses of the rows at these places: three arrays of one shape (rows,)."""
        ...

    def part(self, splits: range) -> RowOrder:
        """The order of some of these splits, contiguous ones."""
        ...


@dataclass(frozen=True)
class PlannedRows:
    """Rows of a plan that was built.

    Args:
        ids: for each split, its row ids: uint64, shape (rows per split,).
    """

    ids: Sequence[Addresses] | Addresses

    @property
    def address(self) -> Address:
        """Row ids."""
        return "row_id"

    def at(self, split: IntArray, index: IntArray) -> Addresses:
        """As in :class:`RowOrder`."""
        if len(index) == 0:
            return np.empty(0, dtype=np.uint64)
        first, last = int(index.min()), int(index.max()) + 1
        # (splits, last - first), then the places asked for
        rows: Addresses = np.stack([ids[first:last] for ids in self.ids])[split, index - first]
        return rows

    def part(self, splits: range) -> PlannedRows:
        """As in :class:`RowOrder`."""
        return PlannedRows(self.ids[splits.start : splits.stop])


@dataclass(frozen=True)
class ComputedRows:
    """Rows of an :class:`IndexedOrder`: nothing was built.

    Args:
        order: of all splits.
        first_split: the split that counts as 0 here.
        passing: uint64, the row ids that pass the filter in storage order; None without a filter.
    """

    order: IndexedOrder
    first_split: int = 0
    passing: Addresses | None = None

    @property
    def address(self) -> Address:
        """Offsets, or row ids where a filter has listed them."""
        return "offset" if self.passing is None else "row_id"

    def at(self, split: IntArray, index: IntArray) -> Addresses:
        """As in :class:`RowOrder`."""
        places = self.order.offsets_at(split + self.first_split, index)
        return places if self.passing is None else self.passing[places]

    def part(self, splits: range) -> ComputedRows:
        """As in :class:`RowOrder`."""
        return replace(self, first_split=self.first_split + splits.start)
