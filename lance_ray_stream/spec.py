"""What a stream delivers: every choice that determines its rows, checked before anything is read."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import random
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
from lancedb.table import LanceTable, Table

from lance_ray_stream.errors import InvalidArgumentError, NotEnoughRowsError
from lance_ray_stream.layout import check_int
from lance_ray_stream.reader import ROW_ID, delivered_schema
from lance_ray_stream.table import TableRef, describe_table, native_error_text

SHUFFLE_ALGORITHMS = ("lancedb", "indexed")
# lancedb takes 64 bits for seed + epoch * 100003; the upper half is left for the epochs.
MAX_SHUFFLE_SEED = 2**63 - 1
_MAX_CLUMP_ROWS = 2**32
# Functions whose value changes between two evaluations: planned again, such a filter keeps other rows.
_VOLATILE = re.compile(
    r"\b(?:(random|rand|uuid|now|today)\s*\(|(current_(?:date|time|timestamp)|local(?:time|timestamp))\b)",
    re.IGNORECASE,
)
_QUOTED = re.compile(r"'(?:[^']|'')*'|\"[^\"]*\"|`[^`]*`")
_MIN_VARIABLE_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class StreamSpec:
    """Everything that says *what* is streamed; small and picklable.

    Attributes:
        table: The table, pinned to a version number.
        num_splits: Number of splits; ``None`` until the world size is known.
        shuffle, shuffle_seed, shuffle_clump_size, filter: As in ``lancedb.streaming.StreamingDataset``.
        columns: Columns that are delivered, in this order; ``None`` means all.
        shuffle_algorithm: Which planner makes the order.
        version_given: Whether the user named the version: a state of another version is then refused.
        seed_given: Whether the user named the seed: a state of another seed is then refused.
        schema: Schema of the delivered rows. Blob columns are ``large_binary``.
        total_rows: Rows of the version, before the filter.
        row_bytes: Estimated bytes of one delivered row, for sizing windows only.
    """

    table: TableRef
    num_splits: int | None
    shuffle: bool
    shuffle_seed: int
    shuffle_clump_size: int | None
    columns: tuple[str, ...] | None
    filter: str | None
    shuffle_algorithm: str
    version_given: bool
    seed_given: bool
    schema: pa.Schema
    total_rows: int
    row_bytes: int


def make_spec(
    table: Table | TableRef,
    *,
    num_splits: int | None,
    shuffle: bool = True,
    shuffle_seed: int | None = 0,
    shuffle_clump_size: int | None = None,
    columns: Iterable[str] | None = None,
    filter: str | None = None,
    shuffle_algorithm: str = "lancedb",
) -> StreamSpec:
    """Check every argument against the table, pin its version, and describe the stream. Reads no row.

    Raises:
        InvalidArgumentError: An argument has a wrong type or an impossible value.
        NotEnoughRowsError: The table has fewer rows than splits.
        UnsupportedColumnError: A column cannot be read.
        TableNotFoundError, VersionNotFoundError: The table or version cannot be opened.
    """
    splits = None if num_splits is None else check_int("num_splits", num_splits, minimum=1)
    if not isinstance(shuffle, bool):
        raise InvalidArgumentError(f"shuffle must be True or False, got {shuffle!r}")
    seed = (
        random.randrange(2**32)
        if shuffle_seed is None
        else check_int("shuffle_seed", shuffle_seed, minimum=0, maximum=MAX_SHUFFLE_SEED)
    )
    clump = (
        None
        if shuffle_clump_size is None
        else check_int("shuffle_clump_size", shuffle_clump_size, minimum=1, maximum=_MAX_CLUMP_ROWS)
    )
    if shuffle_algorithm not in SHUFFLE_ALGORITHMS:
        raise InvalidArgumentError(
            f"shuffle_algorithm must be one of {', '.join(map(repr, SHUFFLE_ALGORITHMS))}, got {shuffle_algorithm!r}"
        )
    names = _check_column_list(columns)
    condition = _check_filter(filter)
    ref = table if isinstance(table, TableRef) else TableRef.from_table(table)
    version_given = isinstance(table, TableRef) and table.version is not None
    pinned = ref.pin()
    return StreamSpec(
        table=pinned,
        num_splits=splits,
        shuffle=shuffle,
        shuffle_seed=seed,
        shuffle_clump_size=clump,
        columns=names,
        filter=condition,
        shuffle_algorithm=shuffle_algorithm,
        version_given=version_given,
        seed_given=shuffle_seed is not None,
        **_facts(pinned, splits, names, condition, reopen=ref.is_pinned),
    )


def repin(spec: StreamSpec, version: int) -> StreamSpec:
    """The same stream on another version of its table; what depends on the version is looked up again.

    Raises:
        Those of :func:`make_spec`: columns, filter and number of splits must fit that version too.
    """
    if version == spec.table.version:
        return spec
    table = spec.table.with_version(version)
    return replace(spec, table=table, **_facts(table, spec.num_splits, spec.columns, spec.filter, reopen=True))


def plan_key(spec: StreamSpec) -> str:
    """A stable digest of what determines the row order of all epochs; ``columns`` is not part of it."""
    parts = {
        "table": spec.table.identity(),
        "version": spec.table.version,
        "num_splits": spec.num_splits,
        "shuffle": spec.shuffle,
        "shuffle_seed": spec.shuffle_seed,
        "shuffle_clump_size": spec.shuffle_clump_size,
        "filter": spec.filter,
        "shuffle_algorithm": spec.shuffle_algorithm,
    }
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def filter_key(spec: StreamSpec) -> str:
    """A digest of what determines which rows pass the filter."""
    parts = [spec.table.identity(), spec.table.version, spec.filter]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def not_enough_rows(table: str, rows: int, num_splits: int, filter: str | None) -> NotEnoughRowsError:
    """The error for splits that would be empty, with both numbers."""
    which = f" that pass the filter {filter!r}" if filter is not None else ""
    way_out = f"use num_splits of at most {rows}" if rows else "there is nothing to stream"
    return NotEnoughRowsError(f"{table} has {rows} rows{which}, fewer than num_splits={num_splits}; {way_out}")


def _facts(
    ref: TableRef, num_splits: int | None, columns: tuple[str, ...] | None, filter: str | None, *, reopen: bool
) -> dict[str, Any]:
    """What the table itself says about the stream: schema, rows, estimated row size.

    With ``reopen`` also whether the version still exists: a handle that is open would not tell.
    """
    table = ref.reopen() if reopen else ref.open()
    _check_columns_exist(table, columns)
    schema = delivered_schema(table, columns)
    if filter is not None:
        _check_filter_on(table, filter)
    rows = table.count_rows()
    if rows < (num_splits or 1):
        raise not_enough_rows(describe_table(table), rows, num_splits or 1, None)
    return {"schema": schema, "total_rows": rows, "row_bytes": _row_bytes(table, schema)}


def _check_column_list(columns: object) -> tuple[str, ...] | None:
    if columns is None:
        return None
    # A set has no order that another process would see too.
    if isinstance(columns, (str, bytes, Set, Mapping)) or not isinstance(columns, Iterable):
        raise InvalidArgumentError(f"columns must be a list of column names or None for all, got {columns!r}")
    names = tuple(columns)
    if not names:
        raise InvalidArgumentError("columns is empty: name at least one column, or pass None for all")
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        raise InvalidArgumentError(f"columns must be column names, got {wrong[0]!r}")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise InvalidArgumentError(f"columns names {', '.join(map(repr, repeated))} more than once")
    return names


def _check_columns_exist(table: LanceTable, columns: tuple[str, ...] | None) -> None:
    known = [*table.schema.names, ROW_ID]
    missing = [name for name in columns or () if name not in known]
    if not missing:
        return
    name = missing[0]
    if "." in name and name.partition(".")[0] in known:
        raise InvalidArgumentError(
            f"column {name!r} is a field inside a struct; ask for the whole column {name.partition('.')[0]!r}"
        )
    by_lower = {other.lower(): other for other in known}
    close = [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=1)]
    hint = f"; did you mean {close[0]!r}" if close else ""
    shown = ", ".join(known[:30]) + (", ..." if len(known) > 30 else "")
    raise InvalidArgumentError(f"{describe_table(table)} has no column {name!r}{hint}. Columns: {shown}")


def _check_filter(filter: object) -> str | None:
    if filter is None:
        return None
    if not isinstance(filter, str):
        raise InvalidArgumentError(f"filter must be an SQL condition as a string, got {type(filter).__name__}")
    if not filter.strip():
        raise InvalidArgumentError("filter is empty; pass an SQL condition such as \"label = 'dog'\", or None")
    code = _QUOTED.sub("''", filter)
    depths = itertools.accumulate((char == "(") - (char == ")") for char in code)
    if min(depths) < 0:
        raise InvalidArgumentError(f"filter {filter!r} closes a parenthesis that it did not open")
    volatile = _VOLATILE.search(code)
    if volatile:
        raise InvalidArgumentError(
            f"filter {filter!r} uses {volatile.group(1) or volatile.group(2)}, whose value changes from one "
            "evaluation to the next: the stream would not be the same after a restart. Write the value into "
            "the filter, or store it in a column"
        )
    return filter


def _check_filter_on(table: LanceTable, filter: str) -> None:
    """Let lancedb parse and resolve the filter; nothing is scanned.

    lancedb reads a condition off the start and ignores the rest: "id < 9 nad label = 1" would mean "id < 9".
    In parentheses the same text has to be a condition from end to end.
    """
    wrong = "does not work on"
    for condition in (filter, f"(\n{filter}\n)"):
        try:
            table.search().where(condition).explain_plan()
        except Exception as error:
            message = native_error_text(table, error)
            break
        wrong = "is not one whole condition, and LanceDB would ignore the rest of it on"
    else:
        return
    raise InvalidArgumentError(f"filter {filter!r} {wrong} {describe_table(table)}: {message}")


def _row_bytes(table: LanceTable, schema: pa.Schema) -> int:
    """Estimated bytes of one delivered row: from fixed-width types, else from the size of the table."""
    delivered = sum(_fixed_bytes(f.type) or 0 for f in schema)
    variable = sum(_fixed_bytes(f.type) is None for f in schema)
    if variable:
        everything = table.schema
        fixed = sum(_fixed_bytes(f.type) or 0 for f in everything)
        num_variable = sum(_fixed_bytes(f.type) is None for f in everything) or 1
        stats = table.stats()
        stored = stats["total_bytes"] / max(1, stats["num_rows"])  # type: ignore[index]
        each = max(_MIN_VARIABLE_BYTES, (stored - fixed) / num_variable)
        delivered += each * variable
    return max(1, round(delivered))


def _fixed_bytes(data_type: pa.DataType) -> float | None:
    """Bytes of one value of a fixed-width type, ``None`` for the others."""
    if isinstance(data_type, pa.BaseExtensionType):
        return _fixed_bytes(data_type.storage_type)
    if pa.types.is_dictionary(data_type):
        return _fixed_bytes(data_type.index_type)
    if pa.types.is_fixed_size_list(data_type):
        value = _fixed_bytes(data_type.value_type)
        return None if value is None else value * data_type.list_size
    if pa.types.is_struct(data_type):
        children = [_fixed_bytes(child.type) for child in data_type]
        return None if None in children else sum(child or 0 for child in children)
    if pa.types.is_null(data_type):
        return 0
    try:
        return float(data_type.bit_width) / 8
    except ValueError:
        return None
