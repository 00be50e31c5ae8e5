"""Rows of given ids, in the given order: what ``take_row_ids`` does not promise."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
import pyarrow as pa
from lancedb.schema import blob_column_paths, row_addressable_blob_v2_paths
from lancedb.table import LanceTable

from lance_ray_stream.errors import MissingRowsError, ReadError, UnsupportedColumnError
from lance_ray_stream.table import describe_table, native_error_text

ROW_ID = "_rowid"
_ATTEMPTS = 4
_FIRST_WAIT_S = 0.2
# Arrow's 32-bit offsets end at 2 GiB in one column; a larger result is read in halves.
_MAX_RESULT_BYTES = 2**30

# Words of lancedb's error texts: it has no exception classes for these.
_GONE = ("not found", "no such file")
_FINAL = ("denied", "forbidden", "unauthorized", "unauthenticated", "expired", "invalid input, schema")
_PASSING = (
    "lanceerror(io)",
    "io {",
    "timeout",
    "timed out",
    "connect",
    "throttl",
    "slowdown",
    "reset by peer",
)

_T = TypeVar("_T")


def read_rows(table: LanceTable, row_ids: np.ndarray, *, columns: tuple[str, ...] | None) -> pa.Table:
    """The rows of ``row_ids``, in that order; ids may repeat.

    Args:
        table: The table, checked out at the version the ids belong to.
        row_ids: ``(n,)`` uint64.
        columns: Columns to read, in this order; ``None`` means all, ``()`` none. ``"_rowid"`` delivers the
            row ids.

    Returns:
        ``n`` rows with the schema of :func:`delivered_schema`. Blob columns are ``large_binary``; a null blob
        stays null.

    Raises:
        MissingRowsError: The version does not deliver some of the rows.
        ReadError: The storage failed, also after retries.
    """
    ids = np.ascontiguousarray(row_ids, dtype=np.uint64)
    unique, inverse = _unique(ids)
    rows = _take(table, unique, columns)
    if inverse is not None and rows.nbytes * len(ids) > _MAX_RESULT_BYTES * len(unique):
        del rows
        half = len(ids) // 2
        return pa.concat_tables([read_rows(table, part, columns=columns) for part in (ids[:half], ids[half:])])
    order = _order(table, rows, unique, inverse)
    rows = rows.drop_columns([ROW_ID])
    if order is not None and rows.num_columns:
        rows = rows.take(pa.array(order))
    return _finish(table, rows, ids, columns)


def delivered_schema(table: LanceTable, columns: tuple[str, ...] | None) -> pa.Schema:
    """The schema of what :func:`read_rows` returns, from a read of no rows.

    Raises:
        UnsupportedColumnError: A blob column that cannot be delivered as bytes.
    """
    _check_blobs(table, columns)
    return read_rows(table, np.empty(0, dtype=np.uint64), columns=columns).schema


def _unique(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """The ids ascending without repeats, and where each asked one is among them; ``None``: as they are."""
    if bool((ids[1:] > ids[:-1]).all()):
        return ids, None
    unique, inverse = np.unique(ids, return_inverse=True)
    return unique, inverse


def _take(table: LanceTable, unique: np.ndarray, columns: tuple[str, ...] | None) -> pa.Table:
    """The rows in whatever order lancedb likes, with their row ids in the last column."""

    def take() -> pa.Table:
        query = table.take_row_ids(unique.tolist()).with_row_id()
        if columns is not None:
            query = query.select([name for name in columns if name != ROW_ID])
        return query.to_arrow()

    return _with_retries(table, take)


def _order(table: LanceTable, rows: pa.Table, unique: np.ndarray, inverse: np.ndarray | None) -> np.ndarray | None:
    """Where in ``rows`` each asked row is; ``None`` if they are in order already."""
    found = rows[ROW_ID].to_numpy()
    if np.array_equal(found, unique):
        return inverse
    # With stable row ids, storage order is not the order of the ids.
    by_id = np.argsort(found, kind="stable")
    if not np.array_equal(found[by_id], unique):
        missing = np.setdiff1d(unique, found)
        some = ", ".join(map(str, missing[:5].tolist())) + (", ..." if len(missing) > 5 else "")
        raise MissingRowsError(
            f"{describe_table(table)} delivers only {len(found)} of the {len(unique)} rows that were asked "
            f"for by row id; missing: {some}. The row ids are not of this version, or its data was changed "
            "in place"
        )
    return by_id if inverse is None else by_id[inverse]


def _finish(table: LanceTable, rows: pa.Table, ids: np.ndarray, columns: tuple[str, ...] | None) -> pa.Table:
    """Blob bytes and row ids put in place."""
    names = rows.column_names if columns is None else list(columns)
    for name in row_addressable_blob_v2_paths(table.schema):
        if name in names:
            blobs = _with_retries(table, partial(table.fetch_blobs, name, ids.tolist()))
            place = rows.schema.get_field_index(name)
            nullable = table.schema.field(name).nullable
            rows = rows.set_column(place, pa.field(name, pa.large_binary(), nullable=nullable), blobs)
    if ROW_ID in names:
        rows = rows.add_column(names.index(ROW_ID), pa.field(ROW_ID, pa.uint64()), pa.array(ids, pa.uint64()))
    return rows


def _check_blobs(table: LanceTable, columns: tuple[str, ...] | None) -> None:
    """Refuse blobs that lancedb cannot fetch by row id: older encodings, blobs inside lists or structs."""
    schema = table.schema
    fetchable = set(row_addressable_blob_v2_paths(schema)) & set(schema.names)
    for path in blob_column_paths(schema):
        column = path.partition(".")[0]
        if path not in fetchable and (columns is None or column in columns):
            raise UnsupportedColumnError(
                f"blob column {path!r} of {describe_table(table)} cannot be delivered: lancedb fetches only "
                "top-level blobs of the current encoding. Leave it out with columns=[...], or rewrite it as "
                "such a blob column or as large_binary"
            )


def _with_retries(table: LanceTable, read: Callable[[], _T]) -> _T:
    """``read()``, again after a pause if the storage failed in a way that may pass."""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_FIRST_WAIT_S * 2 ** (attempt - 1))
        try:
            return read()
        except Exception as error:
            message = native_error_text(table, error)
            if not _may_pass(error, message.lower()):
                break
    # Outside of the handler: the text is scrubbed, the original error is not.
    if any(word in message.lower() for word in _GONE):
        raise MissingRowsError(
            f"data of {describe_table(table)} no longer exists; was the version cleaned up? Tag a version to "
            f"keep it. LanceDB says: {message}"
        )
    raise ReadError(f"cannot read rows of {describe_table(table)}: {message}")


def _may_pass(error: Exception, text: str) -> bool:
    """Whether trying again makes sense; lancedb raises ``RuntimeError`` or ``ValueError`` mostly."""
    if any(word in text for word in _GONE + _FINAL):
        return False
    return isinstance(error, OSError) or any(word in text for word in _PASSING)
