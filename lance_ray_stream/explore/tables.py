"""Layouts, plans and states as pandas tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from lancedb.table import LanceTable, Table
from ray.data import Dataset

from lance_ray_stream.datasource import max_window_rows
from lance_ray_stream.epoch_plan import EpochPlan
from lance_ray_stream.errors import InvalidArgumentError, NotEnoughRowsError
from lance_ray_stream.explore.locality import count_ranges, count_touched_bytes
from lance_ray_stream.feed import FIRST_WINDOW_ROWS
from lance_ray_stream.layout import SplitLayout, check_int
from lance_ray_stream.plan import build_plan
from lance_ray_stream.position import windows
from lance_ray_stream.reader import read_rows
from lance_ray_stream.spec import make_spec
from lance_ray_stream.state import IDENTITY_FIELDS, PLANNED_FIELDS, StreamState, differences, parse_state
from lance_ray_stream.table import TableRef
from lance_ray_stream.transforms import stream_of

# What storage is read in at least: a page of a local disk. Object stores answer in larger units.
BLOCK_BYTES = 4096


def ownership(layout: SplitLayout, world_sizes: Iterable[int], num_workers: int = 1) -> pd.DataFrame:
    """Who owns which splits: one line per reader worker of each rank, for each of ``world_sizes``.

    Columns: world_size, rank, worker, first_split, last_split, num_splits.

    Raises:
        LayoutError: if a world size, or the number of reader workers, does not divide the splits.
    """
    records = []
    for world_size in world_sizes:
        layout.check(world_size, num_workers)
        for rank in range(world_size):
            for worker in range(num_workers):
                splits = layout.splits_of(rank, world_size, worker, num_workers)
                records.append((world_size, rank, worker, splits[0], splits[-1], len(splits)))
    return pd.DataFrame(
        records, columns=["world_size", "rank", "worker", "first_split", "last_split", "num_splits"], dtype="int64"
    )


def topologies(layout: SplitLayout, *, global_batch_size: int, up_to: int | None = None) -> pd.DataFrame:
    """Every legal world size, with what it means for a rank: one line each.

    Columns: world_size, splits_per_rank, local_batch_size (rows of a step on a rank), cycles_per_step (the same for
    all), num_workers (text: the numbers of reader workers that can share a rank's splits).

    Args:
        up_to: the largest world size to list; all if None.

    Raises:
        LayoutError: if ``global_batch_size`` is not a multiple of ``num_splits``.
    """
    layout.check_global_batch_size(global_batch_size)
    records = [
        {
            "world_size": world_size,
            "splits_per_rank": layout.num_splits // world_size,
            "local_batch_size": layout.local_batch_size(global_batch_size, world_size),
            "cycles_per_step": global_batch_size // layout.num_splits,
            "num_workers": _listed(SplitLayout(layout.num_splits // world_size).world_sizes()),
        }
        for world_size in layout.world_sizes(up_to=up_to)
    ]
    return pd.DataFrame.from_records(records)


def costs(
    rows: int, num_splits: Iterable[int], *, global_batch_size: int | None = None, up_to: int = 64
) -> pd.DataFrame:
    """What a choice of ``num_splits`` costs in rows and gives in world sizes: one line for each.

    Columns: num_splits, rows_per_split, dropped_rows (of every epoch), dropped_percent, num_world_sizes and
    world_sizes (text: those up to ``up_to``). With a ``global_batch_size`` also: fits (whether it is a multiple of
    num_splits), steps and last_step_rows of an epoch, which are missing where it does not fit.

    Args:
        rows: N, the rows of the table that pass the filter.

    Raises:
        NotEnoughRowsError: if there are more splits than rows.
    """
    rows = check_int("rows", rows, minimum=1)
    records: list[dict[str, Any]] = []
    for number in num_splits:
        layout = SplitLayout(number)
        if layout.num_splits > rows:
            raise NotEnoughRowsError(f"num_splits={number} needs at least as many rows; there are {rows}.")
        per_split, dropped = divmod(rows, layout.num_splits)
        world_sizes = layout.world_sizes(up_to=up_to)
        record = {
            "num_splits": layout.num_splits,
            "rows_per_split": per_split,
            "dropped_rows": dropped,
            "dropped_percent": 100 * dropped / rows,
            "num_world_sizes": len(world_sizes),
            "world_sizes": _listed(world_sizes),
        }
        if global_batch_size is not None:
            record |= _steps(layout, per_split, check_int("global_batch_size", global_batch_size, minimum=1))
        records.append(record)
    table = pd.DataFrame.from_records(records)
    return table.astype({name: "Int64" for name in ("steps", "last_step_rows") if name in table})


def _steps(layout: SplitLayout, rows_per_split: int, global_batch_size: int) -> dict[str, Any]:
    if global_batch_size % layout.num_splits:
        return {"fits": False, "steps": None, "last_step_rows": None}
    rows = rows_per_split * layout.num_splits
    steps = -(-rows // global_batch_size)
    return {"fits": True, "steps": steps, "last_step_rows": rows - (steps - 1) * global_batch_size}


def rows_of_step(
    plan: EpochPlan,
    step: int,
    global_batch_size: int,
    *,
    world_size: int = 1,
    source: Dataset | Table | None = None,
    columns: Sequence[str] = (),
) -> pd.DataFrame:
    """The rows of one global batch: rank by rank, each in the order in which it receives them.

    Columns: rank, cycle, split, row_id, and ``columns`` of the table.

    Args:
        plan: of the epoch, from ``plan_epoch()`` or :func:`plan`.
        world_size: the number of ranks; it changes who receives a row, not which rows there are.
        source: where ``columns`` are read: the dataset of ``read_stream()`` that the plan was made of (its version
            is pinned), or the opened table at that version.

    Raises:
        LayoutError: if the batch size or the world size does not fit the splits.
        InvalidArgumentError: if there is no such step, or ``columns`` are asked for without a ``source``.
        MissingRowsError: if the source does not have the rows.
    """
    layout = SplitLayout(plan.num_splits)
    layout.check(world_size, global_batch_size=global_batch_size)
    if columns and source is None:
        raise InvalidArgumentError("columns are read from the table: pass source=, the dataset or the opened table.")
    row_ids = plan.row_ids_of_step(step, global_batch_size)
    # the last step of an epoch may be shorter, and one larger than the epoch is the whole of it
    size = min(global_batch_size, plan.num_splits * plan.rows_per_split)
    split, cycle = layout.rows_of_step(step, size)[: len(row_ids)].T
    table = pd.DataFrame(
        {"rank": split // (layout.num_splits // world_size), "cycle": cycle, "split": split, "row_id": row_ids}
    )
    if clash := sorted({*columns} & {*table.columns}):
        raise InvalidArgumentError(
            f"The table's columns {clash} have names of columns of the result: leave them out, or read them by row_id."
        )
    if columns:
        values = read_rows(_opened(source), row_ids, columns=tuple(columns))
        for name in columns:
            table[name] = values[name].to_pylist()
    return table.sort_values("rank", kind="stable", ignore_index=True)


def _opened(source: Dataset | Table | None) -> LanceTable:
    if isinstance(source, Dataset):
        return stream_of(source).spec.table.open()
    if isinstance(source, LanceTable):
        return source
    raise InvalidArgumentError(f"source must be a dataset of read_stream() or a LanceDB table, got {source!r}.")


def plan(table: Table | TableRef, *, num_splits: int, epoch: int = 0, **options: Any) -> EpochPlan:
    """The plan of one epoch of a table, as ``plan_epoch()`` gives it for a dataset; needs no Ray.

    Args:
        options: ``shuffle``, ``shuffle_seed``, ``shuffle_clump_size`` and ``filter``, as in ``read_stream()``.

    Raises:
        ValueError, RuntimeError: as ``read_stream()`` and ``plan_epoch()`` do.
    """
    return build_plan(make_spec(table, num_splits=num_splits, **options), epoch)


def plans_by_clump_size(
    table: Table | TableRef, clump_sizes: Iterable[int | None], **options: Any
) -> dict[int, EpochPlan]:
    """The :func:`plan` for each of several clump sizes; None, no clumps, is clump size 1.

    Args:
        options: the other arguments of :func:`plan`.
    """
    return {size or 1: plan(table, shuffle_clump_size=None if size == 1 else size, **options) for size in clump_sizes}


def window_reads(
    plan: EpochPlan,
    *,
    row_bytes: int,
    world_size: int = 1,
    rank: int = 0,
    max_rows: int | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> pd.DataFrame:
    """What each read task of a rank asks of the storage in an epoch: one line per window.

    Columns: window, first_cycle, last_cycle, rows, ranges (runs of neighbouring rows), rows_per_range, bytes_asked
    (rows * row_bytes), bytes_touched (whole storage blocks that hold these rows), amplification (touched by asked).
    Bytes are a model in which the rows of a fragment lie back to back.

    Args:
        row_bytes: size of a row, of the columns that are read.
        max_rows: rows of the widest window; what a training run takes for rows of this size, if None.
        block_bytes: what the storage reads at least: 4 KiB of a local disk, rather 64 KiB of an object store.
    """
    splits = SplitLayout(plan.num_splits).splits_of(rank, world_size)
    row_bytes = check_int("row_bytes", row_bytes, minimum=1)
    block_bytes = check_int("block_bytes", block_bytes, minimum=1)
    widest = max_window_rows(row_bytes) if max_rows is None else check_int("max_rows", max_rows, minimum=1)
    cuts = windows(
        np.zeros(len(splits), dtype=np.int64),
        num_rows=plan.rows_per_split * len(splits),
        first_rows=min(FIRST_WINDOW_ROWS, widest),
        max_rows=widest,
    )
    records = []
    for number, window in enumerate(cuts):
        stop = min(window.stop, plan.rows_per_split)
        ids = np.concatenate([plan.row_ids(split)[window.start : stop] for split in splits])
        touched = count_touched_bytes(ids, row_bytes=row_bytes, block_bytes=block_bytes)
        records.append((number, window.start, stop - 1, len(ids), count_ranges(ids), len(ids) * row_bytes, touched))
    names = ["window", "first_cycle", "last_cycle", "rows", "ranges", "bytes_asked", "bytes_touched"]
    return _with_ratios(pd.DataFrame.from_records(records, columns=names))


def locality(plans: Mapping[int, EpochPlan], *, world_size: int = 1, **options: Any) -> pd.DataFrame:
    """What an epoch asks of the storage, all ranks together, for several clump sizes: one line for each.

    Columns: clump_size, windows, rows, ranges, bytes_asked, bytes_touched, rows_per_range, amplification.

    Args:
        plans: clump size -> plan, as :func:`plans_by_clump_size` makes them.
        options: those of :func:`window_reads`.
    """
    records = []
    for size, plan in plans.items():
        ranks = [window_reads(plan, world_size=world_size, rank=rank, **options) for rank in range(world_size)]
        reads = pd.concat(ranks)
        sums = reads[["rows", "ranges", "bytes_asked", "bytes_touched"]].sum()
        records.append({"clump_size": size, "windows": len(reads), **sums.to_dict()})
    return _with_ratios(pd.DataFrame.from_records(records))


def _with_ratios(reads: pd.DataFrame) -> pd.DataFrame:
    return reads.assign(
        rows_per_range=reads["rows"] / reads["ranges"], amplification=reads["bytes_touched"] / reads["bytes_asked"]
    )


def shuffle_spread(plans: Mapping[int, EpochPlan], global_batch_size: int) -> pd.DataFrame:
    """From how many separate places of the table the rows of a step come: one line per clump size and step.

    Neighbours in storage are often alike (one video, one document, one day), so a step of few places says less
    than one of many. Columns: clump_size, step, rows, places (runs of neighbouring rows), places_per_row (1 is best).
    Only whole steps are listed.

    Args:
        plans: clump size -> plan, as :func:`plans_by_clump_size` makes them.
    """
    records = []
    for size, plan in plans.items():
        cycles = SplitLayout(plan.num_splits).check_global_batch_size(global_batch_size) // plan.num_splits
        for step in range(plan.rows_per_split // cycles):
            places = count_ranges(plan.row_ids_of_step(step, global_batch_size))
            records.append((size, step, global_batch_size, places, places / global_batch_size))
    return pd.DataFrame.from_records(records, columns=["clump_size", "step", "rows", "places", "places_per_row"])


def compare_states(first: Mapping[str, Any], second: Mapping[str, Any]) -> pd.DataFrame:
    """Two states field by field: where they stand, and whether they are of the same stream.

    Columns: field, first, second, verdict. The verdict is "same", "differs", or "not compared" where a state does
    not know the field, and for the fingerprints of two epochs, which have an order each. Epoch and position may
    differ between two states of one stream; any other field that differs makes ``load_state_dict`` refuse.

    Raises:
        StateError: if one of them is no state.
    """
    states = parse_state(first), parse_state(second)
    places = [_place(state) for state in states]
    same_place = {name: places[0][name] == places[1][name] for name in places[0]}
    same_place["rows_per_split"] = np.array_equal(states[0].position, states[1].position)
    records = [
        (name, places[0][name], places[1][name], "same" if same else "differs") for name, same in same_place.items()
    ]
    one, other = (state.identity() for state in states)
    found = differences(one, other)
    compared = _known(one) & _known(other)
    if not same_place["epoch"]:
        compared.discard("fingerprint")
    for name in IDENTITY_FIELDS:
        if name in one or name in other:
            verdict = "not compared" if name not in compared else "differs" if name in found else "same"
            records.append((name, one.get(name), other.get(name), verdict))
    return pd.DataFrame.from_records(records, columns=["field", "first", "second", "verdict"])


def _place(state: StreamState) -> dict[str, Any]:
    low, high = int(state.position.min()), int(state.position.max())
    return {
        "epoch": state.epoch,
        "rows_received": int(state.position.sum()),
        "rows_per_split": str(low) if low == high else f"{low} .. {high}",
    }


def _known(identity: Mapping[str, Any]) -> set[str]:
    return {name for name, value in identity.items() if value is not None or name not in PLANNED_FIELDS}


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
