"""A stream is checked in full before anything is read."""

from __future__ import annotations

import pickle
from dataclasses import replace
from decimal import Decimal
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import pytest
from lancedb.table import LanceTable

from lance_ray_stream.errors import InvalidArgumentError, NotEnoughRowsError, VersionNotFoundError
from lance_ray_stream.plan import build_plan
from lance_ray_stream.reader import read_rows
from lance_ray_stream.spec import make_spec, plan_key, repin
from lance_ray_stream.table import TableRef
from tests.tables import make_rows, make_table


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> LanceTable:
    return make_table(tmp_path_factory.mktemp("db"), 1000)


BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"num_splits": 0}, "num_splits must be at least 1, got 0"),
    ({"num_splits": -4}, "num_splits must be at least 1"),
    ({"num_splits": True}, "num_splits must be an integer"),
    ({"num_splits": 4.0}, "num_splits must be an integer"),
    ({"num_splits": "4"}, "num_splits must be an integer"),
    ({"num_splits": Decimal(4)}, "num_splits must be an integer"),
    ({"shuffle": 1}, "shuffle must be True or False"),
    ({"shuffle": None}, "shuffle must be True or False"),
    ({"shuffle_seed": -1}, "shuffle_seed must be at least 0"),
    ({"shuffle_seed": False}, "shuffle_seed must be an integer"),
    ({"shuffle_seed": 0.5}, "shuffle_seed must be an integer"),
    ({"shuffle_seed": "seed"}, "shuffle_seed must be an integer"),
    ({"shuffle_seed": 2**63}, "shuffle_seed must be at least 0 and at most 9223372036854775807"),
    ({"shuffle_clump_size": 0}, "shuffle_clump_size must be at least 1"),
    ({"shuffle_clump_size": -64}, "shuffle_clump_size must be at least 1"),
    ({"shuffle_clump_size": True}, "shuffle_clump_size must be an integer"),
    ({"shuffle_clump_size": 2.5}, "shuffle_clump_size must be an integer"),
    ({"shuffle_clump_size": 2**33}, "shuffle_clump_size .* at most 4294967296"),
    ({"columns": []}, "columns is empty.*None for all"),
    ({"columns": ()}, "columns is empty"),
    ({"columns": "id"}, "columns must be a list of column names"),
    ({"columns": b"id"}, "columns must be a list of column names"),
    ({"columns": 3}, "columns must be a list of column names"),
    ({"columns": ["id", 3]}, "columns must be column names, got 3"),
    ({"columns": ["id", "label", "id"]}, "columns names 'id' more than once"),
    ({"columns": ["id", "nothing"]}, "no column 'nothing'. Columns: id, label, text, vector, _rowid"),
    ({"columns": ["lable"]}, "no column 'lable'; did you mean 'label'"),
    ({"columns": ["ID"]}, "no column 'ID'; did you mean 'id'"),
    ({"columns": [""]}, "no column ''"),
    ({"columns": ["rowid"]}, "did you mean '_rowid'"),
    ({"filter": ""}, "filter is empty"),
    ({"filter": " \n"}, "filter is empty"),
    ({"filter": 3}, "filter must be an SQL condition as a string"),
    ({"filter": b"id = 3"}, "filter must be an SQL condition as a string"),
    ({"filter": "id ==== 3"}, "filter 'id ==== 3' does not work on table 'rows'.*parser error"),
    ({"filter": "nothing = 3"}, "No field named nothing"),
    ({"filter": "id"}, "does not return a boolean"),
    ({"filter": "id + 1"}, "does not return a boolean"),
    ({"filter": "id = 'x'"}, "does not work on table 'rows'"),
    ({"filter": "id IN (SELECT 1)"}, "not supported"),
    ({"filter": "id < 10; DROP TABLE rows"}, "not one whole condition"),
    ({"filter": "id < 10 nad label = 1"}, "not one whole condition, and LanceDB would ignore the rest"),
    ({"filter": "id < 10 LIMIT 5"}, "not one whole condition"),
    ({"filter": "id < 10;"}, "not one whole condition"),
    ({"filter": "id < 10) nad (label = 1"}, "closes a parenthesis"),
    ({"filter": "(id < 10"}, "does not work on table 'rows'"),
    ({"filter": "random() < 0.5"}, "uses random, whose value changes"),
    ({"filter": "text = uuid()"}, "uses uuid, whose value changes"),
    ({"filter": "NOW () > TIMESTAMP '2020-01-01'"}, "uses NOW, whose value changes"),
    ({"filter": "current_date > DATE '2020-01-01'"}, "uses current_date, whose value changes"),
    ({"shuffle_algorithm": "random"}, "shuffle_algorithm must be one of 'lancedb', 'indexed', got 'random'"),
    ({"shuffle_algorithm": None}, "shuffle_algorithm must be one of"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS, ids=str)
def test_impossible_arguments_are_refused(table, arguments, message):
    """G7: before any read, with the value and what works; never a panic of lancedb."""
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        make_spec(table, **({"num_splits": 4} | arguments))
    assert ".rs:" not in str(caught.value)


def test_nested_fields_are_refused_with_the_way_out(tmp_path):
    rows = pa.table({"id": [1], "point": [{"x": 1}]})
    table = lancedb.connect(tmp_path).create_table("rows", rows)
    with pytest.raises(InvalidArgumentError, match=r"'point\.x'.*whole column 'point'"):
        make_spec(table, num_splits=1, columns=["point.x"])


@pytest.mark.parametrize(
    "where",
    ["text = 'now()'", "id < 3 AND text != 'random() it''s'", "label IN (1, 2)", "_rowid < 5", "id < 3 -- three"],
)
def test_filters_that_only_look_volatile(table, where):
    assert make_spec(table, num_splits=1, filter=where).filter == where


def test_integers_of_numpy_are_integers(table):
    spec = make_spec(table, num_splits=np.int32(4), shuffle_seed=np.uint64(7), shuffle_clump_size=np.int8(2))
    assert (spec.num_splits, spec.shuffle_seed, spec.shuffle_clump_size) == (4, 7, 2)
    assert {type(spec.num_splits), type(spec.shuffle_seed), type(spec.shuffle_clump_size)} == {int}


def test_the_extremes_that_are_allowed_can_be_planned(table):
    spec = make_spec(table, num_splits=1000, shuffle_seed=2**63 - 1, shuffle_clump_size=2**32)
    assert build_plan(spec, 10**12).rows_per_split == 1


def test_more_splits_than_rows(table, tmp_path):
    """C31: both numbers in the text, at once and also with a filter: it can only keep fewer."""
    for where in (None, "id < 500"):
        with pytest.raises(NotEnoughRowsError, match=r"has 1000 rows, fewer than num_splits=1001.*at most 1000"):
            make_spec(table, num_splits=1001, filter=where)
    empty = make_table(tmp_path, 0)
    for splits in (None, 1):
        with pytest.raises(NotEnoughRowsError, match="has 0 rows"):
            make_spec(empty, num_splits=splits)


def test_a_seed_is_drawn_once(table):
    drawn = [make_spec(table, num_splits=4, shuffle_seed=None) for _ in range(8)]
    assert all(0 <= spec.shuffle_seed < 2**32 for spec in drawn)
    assert len({spec.shuffle_seed for spec in drawn}) > 1
    assert make_spec(table, num_splits=4).shuffle_seed == 0
    assert [make_spec(table, num_splits=4, shuffle_seed=s).seed_given for s in (None, 0)] == [False, True]


def test_the_version_is_pinned_and_remembered_as_given_or_not(table):
    table.tags.create("good", 3)
    uri = table._conn.uri
    given = {version: make_spec(TableRef(uri, "rows", version=version), num_splits=4) for version in (2, "good")}
    assert [(s.table.version, s.version_given, s.total_rows) for s in given.values()] == [
        (2, True, 250),
        (3, True, 500),
    ]
    for source in (table, TableRef(uri, "rows")):
        spec = make_spec(source, num_splits=4)
        assert (spec.table.version, spec.version_given, spec.total_rows) == (5, False, 1000)


def test_a_spec_is_small_and_travels(table):
    spec = make_spec(table, num_splits=4, columns=iter(["vector", "_rowid", "id"]), filter="id < 900")
    assert spec.columns == ("vector", "_rowid", "id")
    assert spec.schema.names == ["vector", "_rowid", "id"]
    assert spec.schema.field("_rowid").type == pa.uint64()
    pickled = pickle.dumps(spec)
    assert pickle.loads(pickled) == spec
    assert len(pickled) < 5000


def test_the_key_of_the_order(table):
    spec = make_spec(table, num_splits=4)
    assert plan_key(spec) == plan_key(make_spec(TableRef.from_table(table), num_splits=4, columns=["id"]))
    changes: list[dict[str, Any]] = [
        {"num_splits": 5},
        {"num_splits": None},
        {"shuffle": False},
        {"shuffle_seed": 1},
        {"shuffle_clump_size": 4},
        {"filter": "id < 3"},
        {"shuffle_algorithm": "other"},
        {"table": spec.table.with_version(3)},
        {"table": TableRef("elsewhere", "rows", version=5)},
    ]
    keys = [plan_key(replace(spec, **change)) for change in changes]
    assert len({plan_key(spec), *keys}) == len(changes) + 1


def test_repin_looks_everything_up_again(tmp_path):
    table = make_table(tmp_path, 100)
    old = make_spec(table, num_splits=4, shuffle_seed=None, filter="id >= 0")
    table.add_columns({"double": "id * 2"})
    table.add(pa.table({"id": pa.array([100], pa.int64())}))
    new = repin(old, table.version)
    assert (new.total_rows, new.schema.names[-1]) == (101, "double")
    assert new.shuffle_seed == old.shuffle_seed
    assert repin(new, 5) == old
    assert repin(old, 5) is old
    with pytest.raises(InvalidArgumentError, match="no column 'double'"):
        repin(make_spec(table, num_splits=4, columns=["double"]), 5)
    with pytest.raises(NotEnoughRowsError, match=r"has 25 rows.*num_splits=50"):
        repin(make_spec(table, num_splits=50), 2)
    with pytest.raises(VersionNotFoundError, match="99"):
        repin(old, 99)


def test_the_size_of_a_row_is_estimated(tmp_path):
    """For windows in bytes: near the real size for fixed-width columns, of its order for the others."""
    connection = lancedb.connect(tmp_path)
    noise = np.random.default_rng(0).integers(0, 256, (2000, 512), dtype=np.uint8)
    rows = pa.table(
        {
            "flag": pa.array([True] * 2000),
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(noise.ravel()), 512),
            "image": pa.array([row.tobytes() for row in noise], pa.binary()),
            "text": pa.array([row.tobytes().hex() for row in noise]),
        }
    )
    table = connection.create_table("rows", rows)
    assert make_spec(table, num_splits=1, columns=["vector"]).row_bytes == 512
    assert make_spec(table, num_splits=1, columns=["vector", "_rowid"]).row_bytes == 520
    for columns in (None, ["image"], ["text", "flag"]):
        spec = make_spec(table, num_splits=1, columns=columns)
        read = read_rows(spec.table.open(), build_plan(spec, 0).row_ids(0), columns=spec.columns)
        assert 0.4 < spec.row_bytes / (read.nbytes / 2000) < 2.5


@pytest.mark.parametrize("name", ["a b", "Upper", "select", "naïve", "semi;colon", 'quo"te', "-"])
def test_names_that_sql_would_quote(tmp_path, name):
    rows = pa.table({"id": [1, 2], name: [3, 4]})
    table = lancedb.connect(tmp_path).create_table("rows", rows)
    spec = make_spec(table, num_splits=1, columns=[name], shuffle=False)
    read = read_rows(spec.table.open(), build_plan(spec, 0).row_ids(0), columns=spec.columns)
    assert read.equals(rows.select([name]))


def test_every_type_keeps_its_announced_schema(tmp_path):
    """Also where lancedb announces another type than it delivers, as for JSON."""
    columns = {
        "json": pa.array(['{"a":1}', None, "[]"], pa.json_()),
        "half": pa.array([[1, 2], [3, 4], None], pa.list_(pa.float16(), 2)),
        "dictionary": pa.array(["x", None, "x"]).dictionary_encode(),
        "struct": pa.array([{"x": 1, "y": "a"}, None, {"x": None, "y": "b"}]),
        "ragged": pa.array([[1], [], None], pa.list_(pa.int64())),
        "large": pa.array([["a"], [], None], pa.large_list(pa.string())),
        "decimal": pa.array([Decimal("1.25"), None, Decimal("2.50")], pa.decimal128(10, 2)),
        "time": pa.array([1, None, 3], pa.timestamp("us", "UTC")),
        "flag": pa.array([True, None, False]),
        "fixed": pa.array([b"12345", None, b"67890"], pa.binary(5)),
        "map": pa.array([[("a", 1)], [], None], pa.map_(pa.string(), pa.int8())),
        "null": pa.nulls(3),
        "tensor": pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.float32(), (1, 2)), pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.float32(), 2))
        ),
    }
    connection = lancedb.connect(tmp_path)
    for name, values in columns.items():
        table = connection.create_table(name, pa.table({name: values}))
        spec = make_spec(table, num_splits=1, shuffle=False)
        asked = build_plan(spec, 0).row_ids(0)[[2, 0, 1, 2]]
        rows = read_rows(spec.table.open(), asked, columns=None)
        assert rows.schema.equals(spec.schema, check_metadata=True), name
        assert rows[name].to_pylist() == [values.to_pylist()[i] for i in (2, 0, 1, 2)], name


def test_a_string_is_not_a_table():
    with pytest.raises(InvalidArgumentError, match=r"TableRef\(uri, name\), got str"):
        make_spec("rows", num_splits=1)  # type: ignore[arg-type]


def test_specs_do_not_share_the_handle_of_the_user(table):
    spec = make_spec(table, num_splits=4)
    table.checkout(2)
    try:
        assert spec.table.open().count_rows() == 1000
    finally:
        table.checkout_latest()
    assert make_rows(0, 1).schema.equals(spec.schema)
