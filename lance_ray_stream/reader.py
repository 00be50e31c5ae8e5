"""Addressed rows, in the given order: what ``take_row_ids`` and ``take_offsets`` do not promise."""

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
from lance_ray_stream.row_order import Address
from lance_ray_stream.table import describe_table, is_gone, native_error_text, refuse_if_gone

ROW_ID = "_rowid"
ROW_OFFSET = "_rowoffset"
_ADDRESS_COLUMNS: dict[Address, str] = {"row_id": ROW_ID, "offset": ROW_OFFSET}
_ATTEMPTS = 4
_FIRST_WAIT_S = 0.2
# Arrow's 32-bit offsets end at 2 GiB in one column; a larger result is read in halves.
_MAX_RESULT_BYTES = 2**30
# LanceDB holds what one take reads more than once. Parts of this size cost no time that could be measured.
_TAKE_BYTES = 16 * 2**20
# The first part tells how many bytes a row has.
_FIRST_TAKE_ROWS = 1_024

# Words of lancedb's error texts: it has no exception classes for these.
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


def read_rows(
    table: LanceTable, rows: np.ndarray, *, columns: tuple[str, ...] | None, address: Address = "row_id"
) -> pa.Table:
    """The addressed rows, in that order; addresses may repeat.

    Args:
        table: The table, checked out at the version the addresses belong to.
        rows: ``(n,)`` uint64: row ids, or offsets among the live rows of the version.
        columns: Columns to read, in this order; ``None`` means all, ``()`` none. ``"_rowid"`` delivers the
            row ids.
        address: What ``rows`` are.

    Returns:
        ``n`` rows with the schema of :func:`delivered_schema`. Blob columns are ``large_binary``; a null blob
        stays null.

    Raises:
        MissingRowsError: The version does not deliver some of the rows.
        ReadError: The storage failed, also after retries.
    """
    wanted = np.ascontiguousarray(rows, dtype=np.uint64)
    unique, inverse = _unique(wanted)
    taken = _take_in_parts(table, unique, columns, address)
    if inverse is not None and taken.nbytes * len(wanted) > _MAX_RESULT_BYTES * len(unique):
        del taken
        half = len(wanted) // 2
        parts = [read_rows(table, part, columns=columns, address=address) for part in (wanted[:half], wanted[half:])]
        return pa.concat_tables(parts)
    order = _order(table, taken, unique, inverse, address)
    if order is not None:
        # Chunks would be copied into one anyway, beside those that LanceDB filled; now these are free before that.
        taken = taken.combine_chunks()
        # With the addresses still in it: a table without columns cannot be put in order, nor repeat a row.
        taken = taken.take(pa.array(order))
    taken = taken.drop_columns([_ADDRESS_COLUMNS[address]])
    row_ids = wanted
    if ROW_ID in taken.column_names:
        row_ids = taken[ROW_ID].to_numpy()
        taken = taken.drop_columns([ROW_ID])
    return _finish(table, taken, row_ids, columns)


def resolve_offsets(table: LanceTable, offsets: np.ndarray) -> np.ndarray:
    """The row ids of the rows at these offsets among the live rows: uint64, same shape ``(n,)``."""
    row_ids: np.ndarray = read_rows(table, offsets, columns=(ROW_ID,), address="offset")[ROW_ID].to_numpy()
    return row_ids


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


def _take_in_parts(
    table: LanceTable, unique: np.ndarray, columns: tuple[str, ...] | None, address: Address
) -> pa.Table:
    """As :func:`_take`, in parts of about ``_TAKE_BYTES``."""
    parts = [_take(table, unique[:_FIRST_TAKE_ROWS], columns, address)]
    row_bytes = parts[0].nbytes / max(1, parts[0].num_rows)
    part_rows = max(1, int(_TAKE_BYTES // max(1.0, row_bytes)))
    for start in range(_FIRST_TAKE_ROWS, len(unique), part_rows):
        parts.append(_take(table, unique[start : start + part_rows], columns, address))
    return pa.concat_tables(parts)


def _take(table: LanceTable, unique: np.ndarray, columns: tuple[str, ...] | None, address: Address) -> pa.Table:
    """The rows in whatever order lancedb likes, with their addresses, and row ids where they are needed."""
    names = None if columns is None else [name for name in columns if name != ROW_ID]

    def take() -> pa.Table:
        if address == "row_id":
            query = table.take_row_ids(unique.tolist()).with_row_id()
            return (query if names is None else query.select(names)).to_arrow()
        query = table.take_offsets(unique.tolist())
        if (columns is not None and ROW_ID in columns) or row_addressable_blob_v2_paths(table.schema):
            query = query.with_row_id()
        return query.select([*(table.schema.names if names is None else names), ROW_OFFSET]).to_arrow()

    return _with_retries(table, take)


def _order(
    table: LanceTable, taken: pa.Table, unique: np.ndarray, inverse: np.ndarray | None, address: Address
) -> np.ndarray | None:
    """Where in ``taken`` each asked row is; ``None`` if they are in order already."""
    found = taken[_ADDRESS_COLUMNS[address]].to_numpy()
    if np.array_equal(found, unique):
        return inverse
    # With stable row ids, storage order is not the order of the ids.
    by_address = np.argsort(found, kind="stable")
    if not np.array_equal(found[by_address], unique):
        missing = np.setdiff1d(unique, found)
        some = ", ".join(map(str, missing[:5].tolist())) + (", ..." if len(missing) > 5 else "")
        raise MissingRowsError(
            f"{describe_table(table)} delivers only {len(found)} of the {len(unique)} rows that were asked "
            f"for by {address.replace('_', ' ')}; missing: {some}. These rows are not of this version, or its data was "
            "changed in place"
        )
    return by_address if inverse is None else by_address[inverse]


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
    refuse_if_gone(table, message)
    raise ReadError(f"cannot read rows of {describe_table(table)}: {message}")


def _may_pass(error: Exception, text: str) -> bool:
    """Whether trying again makes sense; lancedb raises ``RuntimeError`` or ``ValueError`` mostly."""
    if is_gone(text) or any(word in text for word in _FINAL):
        return False
    return isinstance(error, OSError) or any(word in text for word in _PASSING)
