"""``read_stream`` as a plain Ray dataset: one read task per split, in split order, rows in plan order."""

from __future__ import annotations

import logging
import random
import time
from pathlib import Path

import lancedb
import numpy as np
import pyarrow as pa
import pytest
import ray
from ray.data import DataContext, Dataset

import lance_ray_stream as lrs
from lance_ray_stream import datasource
from lance_ray_stream.transforms import stream_of
from tests.probes import RecordedTable, SlowTable, count_plans, oracle
from tests.tables import ids_of, make_rows, make_table

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(240)]
NUM_SPLITS = 8


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return make_table(tmp_path_factory.mktemp("db"), 240)


@pytest.fixture
def recorded(tmp_path) -> RecordedTable:
    make_table(tmp_path, 240)
    return RecordedTable(str(tmp_path), "rows")


@pytest.fixture
def plans(monkeypatch) -> list[int]:
    """The epochs that were planned in this process."""
    return count_plans(monkeypatch)


def ids(dataset: Dataset) -> list[int]:
    return [row["id"] for row in dataset.iter_rows()]


def planned_ids(table, dataset: Dataset) -> list[int]:
    """Split after split, from the plan."""
    return ids_of(table, lrs.plan_epoch(dataset).ids.ravel())


def all_rows(dataset: Dataset) -> pa.Table:
    return pa.Table.from_batches([batch for ref in dataset.to_arrow_refs() for batch in ray.get(ref).to_batches()])


def read_tasks(dataset: Dataset, parallelism: int = 200) -> list:
    """The read tasks of an execution."""
    return stream_of(dataset).get_read_tasks(parallelism, data_context=DataContext.get_current())


@pytest.mark.parametrize("epoch", [0, 3])
def test_rows_are_the_plan_split_after_split(table, epoch):
    dataset = lrs.read_stream(table, num_splits=NUM_SPLITS, epoch=epoch, shuffle_seed=5)
    rows = oracle(table, NUM_SPLITS, epoch=epoch, shuffle_seed=5)
    by_split = [i for split in range(NUM_SPLITS) for i in rows[split::NUM_SPLITS]]
    assert ids(dataset) == planned_ids(table, dataset) == by_split


@pytest.mark.parametrize("parallelism", [-1, 1, 3, 1000])
def test_one_read_task_per_split_whatever_the_parallelism(table, parallelism):
    dataset = lrs.read_stream(table, num_splits=NUM_SPLITS)
    tasks = read_tasks(dataset, parallelism)
    plan = lrs.plan_epoch(dataset)
    for split, task in enumerate(tasks):
        rows = pa.concat_tables(task())
        assert rows["id"].to_pylist() == ids_of(table, plan.row_ids(split))
        assert task.metadata.num_rows == rows.num_rows == plan.rows_per_split
        assert task.schema == rows.schema
    assert len(tasks) == NUM_SPLITS
    assert dataset.materialize().num_blocks() == NUM_SPLITS


def test_a_large_split_comes_in_blocks_whose_borders_are_row_counts(table, monkeypatch):
    monkeypatch.setattr(datasource, "MAX_WINDOW_ROWS", 7)
    dataset = lrs.read_stream(table, num_splits=NUM_SPLITS)
    for task in read_tasks(dataset):
        assert [block.num_rows for block in task()] == [7, 7, 7, 7, 2]
        assert [block.num_rows for block in task()] == [7, 7, 7, 7, 2], "a retried task gives the same blocks"
    assert ids(dataset) == planned_ids(table, dataset)


def test_wide_rows_come_in_smaller_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(datasource, "MAX_WINDOW_BYTES", 10_000)
    rows = make_rows(0, 64).append_column("image", pa.array([bytes([i]) * 2_000 for i in range(64)]))
    table = lancedb.connect(tmp_path).create_table("rows", rows)
    tasks = read_tasks(lrs.read_stream(table, num_splits=2))
    sizes = [block.num_rows for block in tasks[0]()]
    assert sum(sizes) == 32
    assert 3 <= max(sizes) <= 5, "about 10 kB each"


def test_c02_delays_do_not_change_the_order(tmp_path, monkeypatch):
    """C02: readers and transforms delayed at random, the first slowest; no Ray option set by the user."""
    monkeypatch.setattr(datasource, "MAX_WINDOW_ROWS", 5)
    table = make_table(tmp_path, 240)
    dataset = lrs.read_stream(SlowTable(str(tmp_path), "rows"), num_splits=NUM_SPLITS)
    order = planned_ids(table, dataset)
    first = order[0]

    def delayed(batch):
        time.sleep(1.0 if first in batch["id"] else random.SystemRandom().uniform(0, 0.3))
        return batch

    assert ids(dataset.map_batches(delayed, batch_size=15)) == order
    assert not DataContext.get_current().execution_options.preserve_order, "the user's own context is left alone"


def test_selected_columns_alone_are_read(recorded):
    dataset = lrs.read_stream(recorded, num_splits=NUM_SPLITS)
    selected = dataset.select_columns(["label", "id"])
    batch = all_rows(selected)
    assert batch.column_names == ["label", "id"]
    assert sorted(batch["id"].to_pylist()) == list(range(240))
    assert {tuple(columns or ()) for _, columns in recorded.reads()} == {("label", "id")}
    assert selected.schema().names == ["label", "id"]


def test_renamed_and_added_columns_keep_the_order(recorded):
    dataset = lrs.read_stream(recorded, num_splits=NUM_SPLITS)
    order = ids(dataset)
    renamed = dataset.rename_columns({"id": "key"}).select_columns(["key"])
    assert [row["key"] for row in renamed.iter_rows()] == order
    assert ids(dataset.drop_columns(["text"])) == order
    assert ids(dataset.add_column("one", lambda batch: np.ones(len(batch)))) == order


@pytest.mark.parametrize("filter", [None, "label < 3"])
def test_c70_what_a_dataset_says_of_itself_reads_nothing_and_plans_nothing(recorded, plans, filter):
    """C70: ``schema()``, ``repr``, ``columns()``, ``num_blocks``, ``size_bytes`` and an unfiltered ``count()``."""
    dataset = lrs.read_stream(recorded, num_splits=NUM_SPLITS, filter=filter)
    assert dataset.schema().base_schema.equals(make_rows(0, 0).schema)
    assert dataset.columns() == ["id", "label", "text", "vector"]
    assert ("(240, 4)" if filter is None else "vector") in repr(dataset)
    assert "label" in str(dataset.select_columns(["label"]))
    if filter is None:
        assert dataset.count() == 240
        assert dataset.size_bytes() > 0
    assert plans == []
    assert recorded.rows_read() == 0


def test_count_is_the_number_of_rows_delivered(tmp_path):
    """With and without a filter, the surplus of ``N % num_splits`` rows left out."""
    make_table(tmp_path, 1001)
    table = RecordedTable(str(tmp_path), "rows")
    assert lrs.read_stream(table, num_splits=NUM_SPLITS).count() == 1000
    filtered = lrs.read_stream(table, num_splits=NUM_SPLITS, filter="label = 3")
    assert filtered.count() == 1001 // 7 // NUM_SPLITS * NUM_SPLITS == len(ids(filtered))
    assert lrs.read_stream(table, num_splits=NUM_SPLITS, filter="id < 100").map_batches(lambda b: b).count() == 96


def test_limit_and_take_are_the_first_rows(table):
    dataset = lrs.read_stream(table, num_splits=NUM_SPLITS)
    order = planned_ids(table, dataset)
    assert [row["id"] for row in dataset.take(5)] == order[:5]
    assert ids(dataset.limit(67)) == order[:67], "two splits and a part of the third"
    assert dataset.limit(67).count() == 67
    assert ids(dataset.limit(10_000)) == order
    assert dataset.take_batch(50)["id"].tolist() == order[:50]


def test_without_num_splits_a_plain_dataset_is_one_split(table):
    dataset = lrs.read_stream(table)
    assert len(read_tasks(dataset)) == 1
    assert ids(dataset) == oracle(table, 1)


def test_the_usual_operations_of_a_plain_dataset_work(table):
    """Outside of training a stream is a dataset like any other."""
    dataset = lrs.read_stream(table, num_splits=NUM_SPLITS)
    order = planned_ids(table, dataset)
    kept = dataset.materialize()
    assert ids(kept) == order
    assert [i for part in kept.split(2) for i in ids(part)] == order
    assert dataset.to_pandas()["id"].tolist() == order
    assert ids(dataset.filter(lambda row: row["label"] == 1)) == [i for i in order if i % 7 == 1]
    assert ids(dataset.flat_map(lambda row: [row, row])) == [i for i in order for _ in range(2)]
    assert sorted(ids(dataset.repartition(3))) == list(range(240))
    assert sorted(ids(dataset.union(dataset))) == sorted(order * 2)
    parts = dataset.streaming_split(1)
    assert [i for batch in parts[0].iter_batches(batch_size=100) for i in batch["id"].tolist()] == order
    assert "ReadLanceStream" in kept.stats()


def test_two_executions_of_one_dataset_are_the_same(table):
    dataset = lrs.read_stream(table, num_splits=NUM_SPLITS, shuffle_seed=None)
    assert ids(dataset) == ids(dataset)


def test_c42_a_table_that_was_read_in_the_driver_first(tmp_path):
    """C42: right rows within the limit, and the user's handle is left as it was."""
    table = make_table(tmp_path, 240)
    assert table.to_arrow().num_rows == 240
    assert len(table.search().limit(10).to_list()) == 10
    assert sorted(ids(lrs.read_stream(table, num_splits=NUM_SPLITS))) == list(range(240))
    table.add(make_rows(240, 250))
    assert table.count_rows() == 250


def test_c40_c41_the_pinned_version_is_read(tmp_path):
    """C40, C41: deletes, appends and a compaction after ``read_stream`` change nothing."""
    table = make_table(tmp_path, 240)
    dataset = lrs.read_stream(table, num_splits=NUM_SPLITS)
    order = planned_ids(table, dataset)
    old = table.version
    table.delete("id % 10 = 0")
    table.add(make_rows(240, 340))
    table.optimize()
    assert ids(dataset) == order
    named = lrs.TableRef(str(tmp_path), "rows", version=old)
    assert ids(lrs.read_stream(named, num_splits=NUM_SPLITS)) == order
    newest = ids(lrs.read_stream(lrs.TableRef(str(tmp_path), "rows"), num_splits=4))
    assert sorted(newest) == [i for i in range(340) if i >= 240 or i % 10]


def test_c44_read_tasks_are_small(tmp_path, caplog):
    """C44: T(1000000), S=256: no task carries row ids, and Ray does not call the read function large."""
    ids_column = pa.table({"id": pa.array(np.arange(1_000_000))})
    table = lancedb.connect(tmp_path).create_table("rows", ids_column)
    dataset = lrs.read_stream(table, num_splits=256)
    sizes = [len(ray.cloudpickle.dumps(task)) for task in read_tasks(dataset)]
    assert len(sizes) == 256
    assert sum(sizes) < 256 * 10_000
    with caplog.at_level(logging.WARNING):
        assert len(dataset.take(3)) == 3
    assert not [record for record in caplog.records if "large" in record.getMessage()]


def test_c63_row_ids_are_those_of_the_plan(table):
    """C63: unique, equal to the plan, usable to fetch the row again."""
    dataset = lrs.read_stream(table, num_splits=NUM_SPLITS, columns=["_rowid", "id"])
    rows = all_rows(dataset)
    row_ids = rows["_rowid"].to_numpy()
    assert rows["_rowid"].type == pa.uint64()
    assert np.array_equal(row_ids, lrs.plan_epoch(dataset).ids.ravel())
    assert len(np.unique(row_ids)) == 240
    assert ids_of(table, row_ids) == rows["id"].to_pylist()
    assert dataset.select_columns(["_rowid"]).take_batch(240)["_rowid"].tolist() == row_ids.tolist()


def test_columns_come_in_the_order_asked_for(table):
    dataset = lrs.read_stream(table, num_splits=NUM_SPLITS, columns=["vector", "id"])
    assert dataset.schema().names == ["vector", "id"]
    row = dataset.take(1)[0]
    assert list(row) == ["vector", "id"]
    assert row["vector"][0] == row["id"]


def test_a_relative_path_and_a_path_object_are_read_by_workers(tmp_path, monkeypatch):
    make_table(tmp_path, 24)
    monkeypatch.chdir(tmp_path.parent)
    relative = lrs.read_stream(lrs.TableRef(tmp_path.name, "rows"), num_splits=2)
    absolute = lrs.read_stream(lrs.TableRef(Path(tmp_path), "rows"), num_splits=2)  # type: ignore[arg-type]
    assert ids(relative) == ids(absolute)
    assert len(ids(relative)) == 24
