"""A window read from the table, whatever the reader workers and wherever the splits stand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from lancedb.table import LanceTable

from lance_ray_stream.epoch_plan import EpochPlan
from lance_ray_stream.errors import MissingRowsError
from lance_ray_stream.plan import build_plan
from lance_ray_stream.position import Window, windows
from lance_ray_stream.row_order import PlannedRows
from lance_ray_stream.spec import make_spec
from lance_ray_stream.window_reader import read_window
from tests.tables import ids_of, make_rows, make_table

ROWS, NUM_SPLITS = 120, 8


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> LanceTable:
    return make_table(tmp_path_factory.mktemp("windows"), ROWS)


@pytest.fixture(scope="module")
def plan(table: LanceTable) -> EpochPlan:
    return build_plan(make_spec(table, num_splits=NUM_SPLITS, shuffle_seed=5), epoch=1)


def due(table: LanceTable, plan: EpochPlan, position: list[int], splits: range) -> list[int]:
    """G1 by definition, from wherever the splits stand."""
    places = [
        (cycle, split)
        for cycle in range(plan.rows_per_split)
        for split, start in zip(splits, position, strict=True)
        if cycle >= start
    ]
    return ids_of(table, np.array([plan.ids[split, cycle] for cycle, split in places], dtype=np.uint64))


POSITIONS = {
    "start": [0, 0, 0, 0],
    "cycle boundary": [7, 7, 7, 7],
    "inside a cycle": [4, 4, 3, 3],
    "far apart": [15, 0, 9, 2],
    "one row left": [15, 15, 15, 14],
}


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
@pytest.mark.parametrize("start", POSITIONS)
def test_g1_windows_are_the_order_of_delivery(table, plan, start, num_workers) -> None:
    """C07, G1: all windows of a group together are its rest, in order, for every number of reader workers."""
    splits, position = range(4, 8), np.array(POSITIONS[start])
    rest = due(table, plan, POSITIONS[start], splits)
    cuts = windows(position, num_rows=len(rest), first_rows=4, max_rows=16)
    read = [
        read_window(
            table,
            cut,
            PlannedRows([plan.row_ids(split) for split in splits]),
            position,
            columns=("id",),
            num_workers=num_workers,
        )
        for cut in cuts
    ]
    assert list(itertools.chain(*(part["id"].to_pylist() for part in read))) == rest
    assert len(read) > 1 or start == "one row left"


@pytest.mark.parametrize("num_workers", [1, 2, 8])
def test_a_window_can_be_cut_short(table, plan, num_workers) -> None:
    """G6: where the epoch is cut for all ranks, the last window has fewer rows than its cycles hold."""
    splits, position = range(NUM_SPLITS), np.zeros(NUM_SPLITS, dtype=np.int64)
    row_ids = PlannedRows([plan.row_ids(split) for split in splits])
    for num_rows in (1, 3, 8, 13, 16):
        window = Window(5, 7, num_rows)
        rows = read_window(table, window, row_ids, position, columns=("id",), num_workers=num_workers)
        assert rows["id"].to_pylist() == due(table, plan, [5] * NUM_SPLITS, splits)[:num_rows]


def test_c02_read_again_it_is_the_same_table(table, plan) -> None:
    """A retried task gives the same blocks: same rows, same columns, one chunk layout for every number of workers."""
    splits, position = range(4), np.array([1, 1, 0, 0])
    row_ids = PlannedRows([plan.row_ids(split) for split in splits])
    wanted = due(table, plan, [1, 1, 0, 0], splits)[:26]
    columns = ("vector", "id", "_rowid", "text", "label")
    tables = [
        read_window(table, Window(0, 7, 26), row_ids, position, columns=columns, num_workers=num_workers)
        for num_workers in (1, 1, 2, 4)
    ]
    for rows in tables:
        assert rows.equals(tables[0])
        assert tuple(rows.column_names) == columns
        assert rows["id"].to_pylist() == wanted
        assert ids_of(table, rows["_rowid"].to_numpy()) == wanted
        expected = make_rows(0, ROWS).take(wanted)
        assert rows.select(expected.column_names).cast(expected.schema).equals(expected)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_all_columns_and_no_columns(table, plan, num_workers) -> None:
    row_ids = PlannedRows([plan.row_ids(split) for split in range(2)])
    position = np.zeros(2, dtype=np.int64)
    window = Window(0, 3, 6)
    everything = read_window(table, window, row_ids, position, columns=None, num_workers=num_workers)
    assert everything.column_names == table.schema.names
    assert everything.num_rows == 6
    nothing = read_window(table, window, row_ids, position, columns=(), num_workers=num_workers)
    assert nothing.shape == (6, 0)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_g5_a_row_that_is_missing_is_an_error_from_every_worker(table, num_workers) -> None:
    """G5: never a short window."""
    row_ids = PlannedRows([np.array([0, 1], dtype=np.uint64), np.array([2, 2**40], dtype=np.uint64)])
    with pytest.raises(MissingRowsError):
        read_window(
            table,
            Window(0, 2, 4),
            row_ids,
            np.zeros(2, dtype=np.int64),
            columns=("id",),
            num_workers=num_workers,
        )
