"""Tables on disk for the tests: ``T(n)`` of the cases."""

from __future__ import annotations

import itertools
from pathlib import Path

import lancedb
import numpy as np
import pyarrow as pa
from lancedb.table import LanceTable

NUM_APPENDS = 4


def make_rows(start: int, stop: int) -> pa.Table:
    """Rows ``start``..``stop - 1``: id; label = id % 7; text, of varying length; vector = 4 floats."""
    ids = np.arange(start, stop)
    vectors = (ids[:, None] + np.arange(4) / 4).astype(np.float32)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "label": pa.array(ids % 7, pa.int32()),
            "text": pa.array([f"row {i} " + "x" * (i % 5) for i in ids], pa.string()),
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), 4),
        }
    )


def make_table(
    path: str | Path,
    rows: int,
    *,
    name: str = "rows",
    columns: list[str] | None = None,
    appends: int = NUM_APPENDS,
) -> LanceTable:
    """``T(rows)``: a new table ``name`` in directory ``path``, id = 0..rows-1, in ``appends`` appends.

    The other columns are those of :func:`make_rows`; ``columns`` selects some of them. Version 1 is the empty
    table, so the newest version of a table that was just made is ``appends + 1``, if it has that many rows.
    """
    schema = make_rows(0, 0).select(columns or ["id", "label", "text", "vector"]).schema
    table = lancedb.connect(path).create_table(name, schema=schema)
    assert isinstance(table, LanceTable)
    borders = np.linspace(0, rows, appends + 1).astype(int)
    for start, stop in itertools.pairwise(borders.tolist()):
        if start < stop:
            table.add(make_rows(start, stop).select(schema.names))
    return table


def ids_of(table: LanceTable, row_ids: np.ndarray) -> list[int]:
    """The id column of the given rows, in that order, read without the package."""
    rows = table.search().select(["id"]).with_row_id(True).limit(2**31).to_arrow()
    by_row_id = dict(zip(rows["_rowid"].to_pylist(), rows["id"].to_pylist(), strict=True))
    return [by_row_id[row_id] for row_id in row_ids.tolist()]
