"""The plan of ``shuffle_algorithm="indexed"``: a formula, and with a filter one list of the rows that pass it."""

from __future__ import annotations

import hashlib

import numpy as np
import pyarrow as pa

from lance_ray_stream.epoch_plan import EpochPlan
from lance_ray_stream.errors import PlanError
from lance_ray_stream.permutation import IndexedOrder
from lance_ray_stream.reader import ROW_ID, ROW_OFFSET
from lance_ray_stream.row_order import Addresses, ComputedRows
from lance_ray_stream.spec import StreamSpec, not_enough_rows
from lance_ray_stream.table import describe_table, native_error_text, refuse_if_gone

_SCAN_ROWS = 65_536


def indexed_order(spec: StreamSpec, epoch: int, rows: int) -> IndexedOrder:
    """The order of one epoch over ``rows`` rows.

    Raises:
        NotEnoughRowsError: Fewer rows pass the filter than there are splits.
        InvalidArgumentError: The epoch is impossible.
    """
    if spec.num_splits is None:
        raise PlanError("num_splits is not decided yet; a plan needs it")
    if rows < spec.num_splits:
        raise not_enough_rows(describe_table(spec.table.open()), rows, spec.num_splits, spec.filter)
    return IndexedOrder(
        num_rows=rows,
        num_splits=spec.num_splits,
        seed=spec.shuffle_seed,
        epoch=epoch,
        clump_size=spec.shuffle_clump_size,
        shuffle=spec.shuffle,
    )


def indexed_plan(spec: StreamSpec, epoch: int, passing: Addresses | None) -> EpochPlan:
    """The plan of one epoch, given what :func:`passing_rows` returned."""
    order = indexed_order(spec, epoch, spec.total_rows if passing is None else len(passing))
    return EpochPlan(
        epoch=order.epoch,
        num_splits=order.num_splits,
        rows=order.num_rows,
        rows_per_split=order.rows_per_split,
        order=ComputedRows(order, passing=passing),
        fingerprint=indexed_fingerprint(order, None if passing is None else digest_of(passing)),
        table=spec.table,
    )


def passing_rows(spec: StreamSpec) -> Addresses | None:
    """Row ids of the rows that pass the filter, uint64 in storage order; None without a filter. One scan.

    Raises:
        MissingRowsError: The version was cleaned up.
        PlanError: lancedb could not scan the table.
    """
    if spec.filter is None:
        return None
    table = spec.table.open()
    try:
        query = table.search().where(spec.filter).select([ROW_ID, ROW_OFFSET])
        batches = list(query.to_batches(_SCAN_ROWS))
    except Exception as error:
        message = native_error_text(table, error)
    else:
        if not batches:
            return np.empty(0, dtype=np.uint64)
        found = pa.Table.from_batches(batches)
        # A scan promises no order; storage order makes the stream the same wherever it is planned.
        in_storage = np.argsort(found[ROW_OFFSET].to_numpy(), kind="stable")
        row_ids: Addresses = found[ROW_ID].to_numpy()[in_storage].astype(np.uint64, copy=False)
        return row_ids
    refuse_if_gone(table, message)
    raise PlanError(f"cannot list the rows of {describe_table(table)} that pass {spec.filter!r}: {message}")


def digest_of(passing: Addresses) -> str:
    """Digest of the rows that pass a filter, the same on every platform."""
    return hashlib.blake2b(np.ascontiguousarray(passing, dtype="<u8").data, digest_size=8).hexdigest()


def indexed_fingerprint(order: IndexedOrder, passing_digest: str | None) -> str:
    """The fingerprint of an order, and of the rows that it is over."""
    if passing_digest is None:
        return order.fingerprint
    return hashlib.blake2b(f"{order.fingerprint}:{passing_digest}".encode(), digest_size=8).hexdigest()
