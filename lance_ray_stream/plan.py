"""Which rows: builds the plan of one epoch, by default row for row the one of LanceDB's ``StreamingDataset``."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
from lancedb.permutation import permutation_builder
from lancedb.table import LanceTable

from lance_ray_stream.epoch_plan import EpochPlan
from lance_ray_stream.errors import PlanError
from lance_ray_stream.indexed_plan import indexed_plan, passing_rows
from lance_ray_stream.layout import check_int
from lance_ray_stream.row_order import PlannedRows
from lance_ray_stream.spec import StreamSpec, not_enough_rows, plan_key
from lance_ray_stream.table import describe_table, native_error_text, refuse_if_gone

# The rule of lancedb.streaming: seed of epoch e = shuffle_seed + e * EPOCH_PRIME, in 64 bits.
EPOCH_PRIME = 100003
_MEMORY_LIMIT = "LANCEDB_PERM_BUILDER_MEMORY_LIMIT"
_LANCEDB_DEFAULT_LIMIT = 100 * 2**20
# Sorting takes less than 64 bytes per row (measured up to 12 million). This is a cap, not an allocation.
_BYTES_PER_ROW = 128
_FIXED_BYTES = 32 * 2**20

_environment_lock = threading.Lock()
_filtered_rows: OrderedDict[str, int] = OrderedDict()


def check_epoch(spec: StreamSpec, epoch: int) -> int:
    """``epoch`` if the stream has it: seeds are 64 bits, so epochs come to an end.

    Raises:
        InvalidArgumentError: with the last epoch.
    """
    last = 2**64 - 1 if spec.shuffle_algorithm == "indexed" else (2**64 - 1 - spec.shuffle_seed) // EPOCH_PRIME
    return check_int("epoch", epoch, minimum=0, maximum=last)


def build_plan(spec: StreamSpec, epoch: int) -> EpochPlan:
    """The plan of one epoch.

    The lancedb order takes one scan of the table's row ids, the indexed one none; with a filter both scan its columns.

    Raises:
        InvalidArgumentError: The epoch is impossible.
        MissingRowsError: The version was cleaned up while this process had it open.
        NotEnoughRowsError: Fewer rows pass the filter than there are splits.
        PlanError: lancedb could not build the plan, or built one of another shape.
        TableNotFoundError, VersionNotFoundError: The pinned version cannot be opened.
    """
    if spec.num_splits is None:
        raise PlanError("num_splits is not decided yet; a plan needs it")
    if spec.shuffle_algorithm == "indexed":
        return indexed_plan(spec, epoch, passing_rows(spec))
    number = check_epoch(spec, epoch)
    table = spec.table.open()
    ids = _permutation(spec, spec.num_splits, number, table)
    rows = spec.total_rows if spec.filter is None else _rows_of_filter(spec, table)
    if ids.shape[1] != rows // spec.num_splits:
        raise PlanError(
            f"{describe_table(table)}: lancedb planned {ids.shape[1]} rows per split, but {rows} rows over "
            f"{spec.num_splits} splits are {rows // spec.num_splits} each"
        )
    return EpochPlan(
        epoch=number,
        num_splits=spec.num_splits,
        rows=rows,
        rows_per_split=ids.shape[1],
        order=PlannedRows(ids),
        fingerprint=fingerprint(ids),
        table=spec.table,
    )


def fingerprint(ids: np.ndarray) -> str:
    """Digest of ``(S, L)`` uint64 row ids and of their shape; the same on machines of any byte order."""
    digest = hashlib.blake2b(f"{ids.shape[0]}x{ids.shape[1]}:".encode(), digest_size=8)
    digest.update(np.ascontiguousarray(ids, dtype="<u8").data)
    return digest.hexdigest()


def _permutation(spec: StreamSpec, num_splits: int, epoch: int, table: LanceTable) -> np.ndarray:
    """lancedb's permutation as ``(S, L)`` uint64 row ids."""
    try:
        with _memory_limit(spec.total_rows):
            builder = permutation_builder(table)
            if spec.filter is not None:
                builder = builder.filter(spec.filter)
            if spec.shuffle:
                seed = spec.shuffle_seed + epoch * EPOCH_PRIME
                builder = builder.split_random(fixed=num_splits, seed=seed, clump_size=spec.shuffle_clump_size)
            else:
                builder = builder.split_sequential(fixed=num_splits)
            permutation = builder.execute().to_arrow()
    except Exception as error:
        message = native_error_text(table, error)
    else:
        return _split_matrix(permutation, num_splits, describe_table(table))
    raise _plan_error(spec, num_splits, table, message)


def _plan_error(spec: StreamSpec, num_splits: int, table: LanceTable, message: str) -> Exception:
    """What a failed permutation means, with the way out."""
    if "splits but only" in message:
        rows = spec.total_rows if spec.filter is None else _rows_of_filter(spec, table)
        return not_enough_rows(describe_table(table), rows, num_splits, spec.filter)
    if "divisible by clump size" in message:
        return PlanError(
            f"lancedb cannot shuffle this many rows ({spec.total_rows}) in clumps of "
            f"{spec.shuffle_clump_size}: it then shuffles blocks of 1024 rows, and a clump must divide them. "
            "Use a shuffle_clump_size that is a power of two up to 1024, or None"
        )
    if "memory" in message.lower():
        return PlanError(
            f"planning {spec.total_rows} rows of {describe_table(table)} needs more memory than allowed; "
            f"raise the environment variable {_MEMORY_LIMIT} (bytes): {message}"
        )
    refuse_if_gone(table, message)
    return PlanError(f"lancedb could not plan {describe_table(table)}: {message}")


def _split_matrix(permutation: pa.Table, num_splits: int, table: str) -> np.ndarray:
    """Row ids ``(S, L)`` of a permutation table (row_id, split_id) that is seen to be grouped and even."""
    rows_per_split, surplus = divmod(permutation.num_rows, num_splits)
    split_ids = permutation["split_id"].to_numpy()
    grouped = not surplus and bool((split_ids.reshape(num_splits, -1) == np.arange(num_splits)[:, None]).all())
    if not grouped or permutation["row_id"].null_count:
        sizes = np.unique(split_ids, return_counts=True)[1]
        raise PlanError(
            f"{table}: lancedb returned a permutation that is not {num_splits} equal splits in order (sizes "
            f"{sizes.min(initial=0)}..{sizes.max(initial=0)}, {len(sizes)} splits); no stream can be built "
            "on it"
        )
    return np.ascontiguousarray(permutation["row_id"].to_numpy(), dtype=np.uint64).reshape(num_splits, rows_per_split)


def _rows_of_filter(spec: StreamSpec, table: LanceTable) -> int:
    """N: counted once per version and filter, since a plan alone does not tell how many rows it dropped."""
    key = plan_key(spec)
    if key not in _filtered_rows:
        try:
            _filtered_rows[key] = table.count_rows(spec.filter)
        except Exception as error:
            message = native_error_text(table, error)
        else:
            message = ""
        if message:
            refuse_if_gone(table, message)
            raise PlanError(f"cannot count the rows of {describe_table(table)} that pass {spec.filter!r}: {message}")
        while len(_filtered_rows) > 64:
            _filtered_rows.popitem(last=False)
    return _filtered_rows[key]


@contextmanager
def _memory_limit(rows: int) -> Iterator[None]:
    """Let lancedb sort ``rows`` row ids in memory: its default limit ends at about 2 million.

    The limit can only be given by environment, so it is raised for the time of one plan, one plan at a time.
    """
    need = _FIXED_BYTES + rows * _BYTES_PER_ROW
    with _environment_lock:
        before = os.environ.get(_MEMORY_LIMIT)
        allowed = int(before) if before is not None and before.isdigit() else _LANCEDB_DEFAULT_LIMIT
        if allowed >= need:
            yield
            return
        os.environ[_MEMORY_LIMIT] = str(need)
        try:
            yield
        finally:
            if before is None:
                os.environ.pop(_MEMORY_LIMIT, None)
            else:
                os.environ[_MEMORY_LIMIT] = before
