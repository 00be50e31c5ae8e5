"""``step``: the rows of one global batch."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import numpy as np

from lance_ray_stream.cli.output import show, write_csv, write_json, write_table
from lance_ray_stream.cli.stream import Stream, plan_of, stream_of
from lance_ray_stream.epoch_plan import EpochPlan
from lance_ray_stream.errors import InvalidArgumentError
from lance_ray_stream.layout import SplitLayout
from lance_ray_stream.reader import read_rows


def run(arguments: Namespace) -> int:
    """Split, index and row id of every row, with its rank and columns of the table if they were asked for."""
    if arguments.rank is not None and arguments.world_size is None:
        raise InvalidArgumentError("--rank needs --world-size")
    stream = stream_of(arguments)
    _check(SplitLayout(stream.num_splits), arguments)
    plan = plan_of(stream)
    columns = rows_of_step(stream, plan, arguments)
    header, rows = list(columns), list(zip(*columns.values(), strict=True))
    if arguments.format == "csv":
        write_csv(header, rows)
    elif arguments.format == "json":
        records = [dict(zip(header, row, strict=True)) for row in rows]
        write_json({**stream.record(plan), "step": arguments.step, "step_rows": records})
    else:
        who = "" if arguments.rank is None else f", rank {arguments.rank} of {arguments.world_size}"
        facts = stream.facts(plan)
        print(f"step {arguments.step} of epoch {plan.epoch}{who}: {show(len(rows))} rows")
        print(f"{facts['table']}, version {facts['version']}, plan {plan.fingerprint}\n")
        write_table(header, rows)
    return 0


def _check(layout: SplitLayout, arguments: Namespace) -> None:
    """Refuse impossible numbers before the epoch is planned."""
    world_size = 1 if arguments.world_size is None else arguments.world_size
    layout.check(world_size, global_batch_size=arguments.global_batch_size)
    if arguments.rank is not None:
        layout.splits_of(arguments.rank, world_size)


def rows_of_step(stream: Stream, plan: EpochPlan, arguments: Namespace) -> dict[str, list[Any]]:
    """Column by column, the rows of a step: in plan order, or rank by rank if there is a world size."""
    layout, size = SplitLayout(plan.num_splits), arguments.global_batch_size
    row_ids = plan.row_ids_of_step(arguments.step, size)
    # (rows, 2) -> two of (rows,); the last step of an epoch may be shorter
    size = min(size, plan.num_splits * plan.rows_per_split)
    split, index = layout.rows_of_step(arguments.step, size)[: len(row_ids)].T
    columns: dict[str, list[Any]] = {}
    order = np.arange(len(row_ids))
    if arguments.world_size is not None:
        rank = split // (layout.num_splits // arguments.world_size)
        order = np.argsort(rank, kind="stable")
        if arguments.rank is not None:
            order = order[rank[order] == arguments.rank]
        columns["rank"] = rank[order].tolist()
    row_ids = row_ids[order]
    columns |= {"split": split[order].tolist(), "index": index[order].tolist(), "row_id": row_ids.tolist()}
    if arguments.columns:
        values = read_rows(stream.spec.table.open(), row_ids, columns=tuple(arguments.columns))
        own = set(columns)
        for name in arguments.columns:
            columns[f"{arguments.table}.{name}" if name in own else name] = values[name].to_pylist()
    return columns
