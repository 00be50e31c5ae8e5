"""Rows by id: in the order asked for, complete, with the announced schema, patiently."""

from __future__ import annotations

from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import pytest
from lancedb.schema import blob
from lancedb.table import LanceTable

from lance_ray_stream import reader
from lance_ray_stream.errors import MissingRowsError, ReadError, UnsupportedColumnError
from lance_ray_stream.plan import build_plan
from lance_ray_stream.reader import read_rows
from lance_ray_stream.spec import make_spec
from tests.tables import ids_of, make_rows, make_table

NO_IDS = np.empty(0, dtype=np.uint64)


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> LanceTable:
    return make_table(tmp_path_factory.mktemp("db"), 1000)


def all_row_ids(table: LanceTable) -> np.ndarray:
    rows: np.ndarray = build_plan(make_spec(table, num_splits=1, shuffle=False), 0).row_ids(0)
    return rows


@pytest.mark.parametrize(
    "order",
    [
        np.arange(1000),
        np.arange(1000)[::-1],
        np.random.default_rng(0).permutation(1000),
        np.random.default_rng(1).integers(0, 1000, 3000),
        np.array([999]),
        np.array([5, 5, 5]),
        np.arange(0, 1000, 7),
    ],
    ids=["storage", "reversed", "shuffled", "repeats", "one", "only repeats", "gaps"],
)
def test_rows_come_in_the_order_asked_for(table, order):
    rows = read_rows(table, all_row_ids(table)[order], columns=None)
    assert rows.equals(make_rows(0, 1000).take(order))


@pytest.mark.parametrize("columns", [None, ("id",), ("vector", "id"), ("text", "_rowid", "id"), ("_rowid",)])
@pytest.mark.parametrize("count", [0, 1, 300])
def test_the_schema_is_always_the_announced_one(table, columns, count):
    spec = make_spec(table, num_splits=1, columns=columns)
    asked = all_row_ids(table)[::-1][:count]
    rows = read_rows(table, asked, columns=columns)
    assert rows.schema.equals(spec.schema, check_metadata=True)
    assert rows.num_rows == count
    assert rows.column_names == list(columns or make_rows(0, 1).column_names)
    if "_rowid" in rows.column_names:
        assert rows["_rowid"].to_pylist() == asked.tolist()
        assert rows.schema.field("_rowid").type == pa.uint64()


@pytest.mark.parametrize("count", [0, 3])
def test_no_columns_leave_the_number_of_rows(table, count):
    rows = read_rows(table, all_row_ids(table)[:count], columns=())
    assert (rows.num_columns, rows.num_rows) == (0, count)


def test_row_ids_of_a_stream_fetch_the_rows_again(table):
    """C63: the delivered row ids are unique, the plan's own, and name the same rows in another read."""
    plan = build_plan(make_spec(table, num_splits=8, columns=["_rowid", "id"]), 0)
    rows = read_rows(table, plan.row_ids_of_step(0, 1000), columns=("_rowid", "id"))
    delivered = rows["_rowid"].to_numpy()
    assert len(set(delivered.tolist())) == 1000
    assert delivered.tolist() == plan.row_ids_of_step(0, 1000).tolist()
    assert rows["id"].to_pylist() == ids_of(table, delivered)
    assert read_rows(table, delivered[7:9], columns=("id",)).equals(rows.select(["id"]).slice(7, 2))


def test_the_rows_of_the_pinned_version_survive_what_comes_later(tmp_path):
    """C40, C41: rows deleted, appended and compacted after the pin do not matter."""
    table = make_table(tmp_path, 400)
    spec = make_spec(table, num_splits=8)
    asked = build_plan(spec, 0).row_ids_of_step(0, 400)
    table.delete("id % 10 = 0")
    table.add(make_rows(400, 500))
    table.optimize()
    rows = read_rows(spec.table.open(), asked, columns=None)
    assert sorted(rows["id"].to_pylist()) == list(range(400))


def test_stable_row_ids_do_not_follow_storage_order(tmp_path):
    """With stable row ids an updated row keeps its id and moves to the end of the table."""
    connection = lancedb.connect(tmp_path, storage_options={"new_table_enable_stable_row_ids": "true"})
    table = connection.create_table("rows", make_rows(0, 100))
    assert isinstance(table, LanceTable)
    table.update(where="id = 3", values={"label": 77})
    stored = table.search().select(["id"]).with_row_id(True).limit(100).to_arrow()
    row_ids = stored["_rowid"].to_numpy()
    assert (np.diff(row_ids.astype(np.int64)) < 0).any(), "this table does not show what the test is about"
    for asked in (np.sort(row_ids), np.sort(row_ids)[::-1]):
        rows = read_rows(table, asked, columns=("id", "_rowid"))
        assert rows["_rowid"].to_pylist() == asked.tolist()
        assert rows["id"].to_pylist() == ids_of(table, asked)


@pytest.mark.parametrize("columns", [None, ("id",), ()])
def test_a_missing_row_is_an_error_with_table_version_and_ids(tmp_path, columns):
    """G5: lancedb leaves such rows out without a word."""
    table = make_table(tmp_path, 100)
    asked = all_row_ids(table)
    table.delete("id = 17")
    with pytest.raises(MissingRowsError, match=rf"'rows'.*version 6.*99 of the 100.*{asked[17]}"):
        read_rows(table, asked[::-1], columns=columns)
    with pytest.raises(MissingRowsError, match=r"0 of the 2 rows.*123456789012, 123456789013"):
        read_rows(table, np.array([123456789013, 123456789012], dtype=np.uint64), columns=columns)


def test_float16_vectors(tmp_path):
    """C61: values and type of fixed_size_list<float16> come through, in order."""
    values = np.arange(400, dtype=np.float16).reshape(100, 4)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel(), pa.float16()), 4)
    table = lancedb.connect(tmp_path).create_table("rows", pa.table({"v": vectors}))
    assert isinstance(table, LanceTable)
    order = np.random.default_rng(0).permutation(100)
    rows = read_rows(table, all_row_ids(table)[order], columns=("v",))
    assert rows.schema.field("v").type == pa.list_(pa.float16(), 4)
    assert (rows["v"].combine_chunks().flatten().to_numpy().reshape(-1, 4) == values[order]).all()


BLOBS = [b"foo", b"", None, b"x" * 100_000, b"bar"]


@pytest.fixture(scope="module")
def blob_table(tmp_path_factory) -> LanceTable:
    schema = pa.schema([pa.field("id", pa.int64()), blob("data"), pa.field("text", pa.string())])
    table = lancedb.connect(tmp_path_factory.mktemp("db")).create_table("rows", schema=schema)
    assert isinstance(table, LanceTable)
    table.add([{"id": i, "data": data, "text": str(i)} for i, data in enumerate(BLOBS)])
    return table


@pytest.mark.parametrize("columns", [None, ("data",), ("text", "data", "_rowid")])
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 2, 0, 1], [2, 3, 2, 0, 0], []], ids=str)
def test_blobs_are_delivered_as_bytes(blob_table, columns, order):
    """C62: bytes are bytes, empty stays empty, null stays null."""
    spec = make_spec(blob_table, num_splits=1, columns=columns)
    assert spec.schema.field("data").type == pa.large_binary()
    asked = all_row_ids(blob_table)[np.array(order, dtype=int)]
    rows = read_rows(spec.table.open(), asked, columns=spec.columns)
    assert rows.schema.equals(spec.schema, check_metadata=True)
    assert rows["data"].to_pylist() == [BLOBS[i] for i in order]
    if "text" in rows.column_names:
        assert rows["text"].to_pylist() == [str(i) for i in order]


def legacy_blobs(path) -> Any:
    field = pa.field("data", pa.large_binary(), metadata={b"lance-encoding:blob": b"true"})
    rows = pa.table({"id": [0], "data": [b"foo"]}, schema=pa.schema([pa.field("id", pa.int64()), field]))
    options = {"new_table_data_storage_version": "2.1"}
    return lancedb.connect(path, storage_options=options).create_table("rows", rows)


def nested_blobs(path) -> Any:
    schema = pa.schema([pa.field("id", pa.int64()), pa.field("data", pa.struct([blob("inner")]))])
    table = lancedb.connect(path).create_table("rows", schema=schema)
    table.add([{"id": 0, "data": {"inner": b"foo"}}])
    return table


@pytest.mark.parametrize(
    ("make", "name"), [(legacy_blobs, "data"), (nested_blobs, "data.inner")], ids=["legacy", "nested"]
)
def test_blobs_that_cannot_be_fetched_are_refused_by_name(tmp_path, make, name):
    """C62: refused before anything is read; the other columns work."""
    table = make(tmp_path)
    for columns in (None, ["data"]):
        with pytest.raises(UnsupportedColumnError, match=rf"'{name}'.*columns="):
            make_spec(table, num_splits=1, columns=columns)
    assert make_spec(table, num_splits=1, columns=["id"]).schema.names == ["id"]


def test_results_too_large_for_one_take_are_read_in_parts(table, monkeypatch):
    monkeypatch.setattr(reader, "_MAX_RESULT_BYTES", 1000)
    order = np.random.default_rng(0).permutation(1000)
    rows = read_rows(table, all_row_ids(table)[order], columns=None)
    assert rows.equals(make_rows(0, 1000).take(order))
    repeated = read_rows(table, all_row_ids(table)[np.full(500, 3)], columns=("text", "_rowid"))
    assert repeated["text"].to_pylist() == ["row 3 xxx"] * 500


@pytest.mark.parametrize("columns", [None, ("text", "_rowid"), (), ("_rowid",)])
def test_a_large_take_is_made_in_parts(table, monkeypatch, columns):
    taken = []
    real = reader._take

    def counted(table: LanceTable, unique: np.ndarray, *rest: Any) -> pa.Table:
        taken.append(len(unique))
        return real(table, unique, *rest)

    order = np.random.default_rng(0).integers(0, 1000, 3000)
    row_ids = all_row_ids(table)
    whole = read_rows(table, row_ids[order], columns=columns)
    monkeypatch.setattr(reader, "_TAKE_BYTES", 2000)
    monkeypatch.setattr(reader, "_FIRST_TAKE_ROWS", 10)
    monkeypatch.setattr(reader, "_take", counted)
    assert read_rows(table, row_ids[order], columns=columns).equals(whole)
    assert taken[0] == 10
    assert len(taken) > 3
    assert sum(taken) == len(np.unique(order))
    with pytest.raises(MissingRowsError, match="only 1000 of the 1001 rows"):
        read_rows(table, np.append(row_ids, np.uint64(10**12)), columns=columns)
    if columns is None:
        assert whole.equals(make_rows(0, 1000).take(order))


class FailingTable:
    """A table whose storage fails ``failures`` times before it answers, as lancedb reports that."""

    def __init__(self, table: LanceTable, error: Exception, failures: int):
        self.table, self.error, self.failures, self.reads = table, error, failures, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.table, name)

    def take_row_ids(self, row_ids: list[int]) -> Any:
        self.reads += 1
        if self.reads <= self.failures:
            raise self.error
        return self.table.take_row_ids(row_ids)


PASSING = RuntimeError("lance error: LanceError(IO): Generic S3 error: operation timed out, /a/b.rs:12:3")


@pytest.mark.parametrize("error", [PASSING, OSError("connection reset"), ValueError("IO { connect }")], ids=str)
def test_passing_failures_of_the_storage_are_tried_again(table, monkeypatch, error):
    monkeypatch.setattr(reader, "_FIRST_WAIT_S", 0.001)
    failing: Any = FailingTable(table, error, failures=3)
    assert read_rows(failing, all_row_ids(table)[:5], columns=("id",))["id"].to_pylist() == [0, 1, 2, 3, 4]
    assert failing.reads == 4


@pytest.mark.parametrize(
    ("error", "reads", "kind"),
    [
        (PASSING, 4, ReadError),
        (ValueError("Invalid input, Schema error: No field named x"), 1, ReadError),
        (RuntimeError("LanceError(IO): Generic S3 error: 403 Forbidden"), 1, ReadError),
        (TypeError("argument"), 1, ReadError),
        (RuntimeError("LanceError(IO): Wrapped error: Not found: x.lance"), 1, MissingRowsError),
    ],
    ids=str,
)
def test_lasting_failures_are_errors_with_table_and_version(table, monkeypatch, error, reads, kind):
    monkeypatch.setattr(reader, "_FIRST_WAIT_S", 0.001)
    failing: Any = FailingTable(table, error, failures=9)
    with pytest.raises(kind, match=r"table 'rows'.*version 5") as caught:
        read_rows(failing, all_row_ids(table)[:5], columns=None)
    assert failing.reads == reads
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert ".rs:" not in str(caught.value)


def test_data_that_was_cleaned_up_is_named_as_such(tmp_path):
    """G5: the files of an old version are gone while its stream is read."""
    table = make_table(tmp_path, 100)
    spec = make_spec(table, num_splits=1)
    asked = build_plan(spec, 0).row_ids(0)
    for path in tmp_path.glob("rows.lance/data/*"):
        path.unlink()
    with pytest.raises(MissingRowsError, match=r"version 5 no longer exists.*cleaned up.*Tag"):
        read_rows(spec.table.open(), asked, columns=None)
