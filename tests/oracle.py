"""The oracle: LanceDB's own ``StreamingDataset`` over the ``id`` column of a test table."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from lancedb.streaming import StreamingDataset
from lancedb.table import LanceTable


def oracle(
    table: LanceTable, rank: int, world_size: int, state: Mapping[str, Any] | None = None, **options: Any
) -> StreamingDataset:
    """One rank's dataset; ``options`` are num_splits, shuffle_seed, epoch, ...; it continues ``state``."""
    dataset = StreamingDataset(table, rank=rank, world_size=world_size, columns=["id"], **options)
    if state is not None:
        dataset.load_state_dict(dict(state))
    return dataset


def take(dataset: StreamingDataset, num_rows: int | None = None) -> list[int]:
    """The next ids of ``dataset``, all that are left if ``num_rows`` is None."""
    rows = iter(dataset)
    try:
        return [row["id"] for row in itertools.islice(rows, num_rows)]
    finally:
        rows.close()  # type: ignore[attr-defined]


def oracle_rows(
    table: LanceTable, rank: int, world_size: int, state: Mapping[str, Any] | None = None, **options: Any
) -> list[int]:
    """The ids that rank ``rank`` receives until the end of the epoch, in order."""
    return take(oracle(table, rank, world_size, state, **options))
