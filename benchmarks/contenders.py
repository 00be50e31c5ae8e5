"""What the feed is measured against, as functions that run in a process of their own and return rows per second."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from lancedb.streaming import StreamingDataset

from benchmarks.common import open_table, rows_per_s
from lance_ray_stream.plan import build_plan
from lance_ray_stream.position import Window, windows
from lance_ray_stream.reader import read_rows
from lance_ray_stream.spec import make_spec

# --- limit lines -----------------------------------------------------------------------------------------


def feed_windows(rows_per_split: int, splits: int, *, first_rows: int, max_rows: int) -> list[Window]:
    """The windows of one rank that reads a whole epoch."""
    position = np.zeros(splits, dtype=np.int64)
    return list(windows(position, num_rows=rows_per_split * splits, first_rows=first_rows, max_rows=max_rows))


@cache
def _plan(uri: str, splits: int) -> tuple[Any, Any]:
    spec = make_spec(open_table(uri), num_splits=splits)
    plan = build_plan(spec, 0)
    return spec.table.open(), np.stack([plan.row_ids(split) for split in range(splits)])


def prepare(uri: str, splits: int) -> None:
    """Import, open and plan, so that a measurement has reading alone."""
    _plan(uri, splits)


def read_bare(uri: str, splits: int, cuts: list[Window]) -> int:
    """Read windows in order of delivery, with nothing around it; returns the rows."""
    table, ids = _plan(uri, splits)
    # (splits, cycles) -> (cycles, splits) -> (rows,)
    wanted = (ids[:, cut.start : cut.stop].T.reshape(-1)[: cut.num_rows] for cut in cuts)
    return sum(read_rows(table, row_ids, columns=None).num_rows for row_ids in wanted)


def scan(uri: str) -> float:
    """A plain scan in storage order: as fast as this table can be read at all."""
    return rows_per_s(open_table(uri).search().to_batches(batch_size=8192), lambda batch: batch.num_rows)


# --- StreamingDataset ------------------------------------------------------------------------------------


def streaming_dataset(uri: str, splits: int, batch: int, limit_s: float, tuning: dict[str, Any]) -> float:
    """LanceDB's own loader in one process, over a whole epoch or about ``limit_s``; its permutation is built before.

    ``tuning``: ``read_batch_size``, ``io_queue_depth`` and ``form``: what its transform makes of a row (``"dict"``: no
    transform, ``"tensor"``, ``"bytes"``, ``"arrow"``). Tensors are stacked into batches of ``batch`` rows.
    """
    options = dict(tuning)
    form = options.pop("form")
    dataset = StreamingDataset(
        open_table(uri), num_splits=splits, shuffle_seed=0, transform=_TRANSFORMS[form], **options
    )
    collate = torch.stack if form == "tensor" else list
    return rows_per_s(_batches(iter(dataset), batch, collate), len, limit_s=limit_s)


def _tensors(batch: pa.RecordBatch) -> list[torch.Tensor]:
    column = batch.column("x")
    values = column.flatten().to_numpy(zero_copy_only=False)
    return list(torch.from_numpy(values.reshape(len(column), -1).copy()))


_TRANSFORMS: dict[str, Any] = {
    "dict": None,
    "tensor": _tensors,
    "bytes": lambda batch: batch.column("x").to_pylist(),
    "arrow": lambda batch: list(batch.column("x")),
}


def _batches(rows: Iterator[Any], batch: int, collate: Any) -> Iterator[Any]:
    """Batches of ``batch`` rows, the last one shorter."""
    held = []
    for row in rows:
        held.append(row)
        if len(held) == batch:
            yield collate(held)
            held = []
    if held:
        yield collate(held)
