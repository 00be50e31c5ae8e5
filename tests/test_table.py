"""References to tables: pinned, reopened anywhere, without secrets."""

from __future__ import annotations

import asyncio
import functools
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import pytest
from lancedb.table import LanceTable

from lance_ray_stream.errors import InvalidArgumentError, TableNotFoundError, VersionNotFoundError
from lance_ray_stream.plan import build_plan
from lance_ray_stream.reader import read_rows
from lance_ray_stream.spec import make_spec
from lance_ray_stream.table import TableRef
from lance_ray_stream.uris import scrub
from tests.tables import make_rows, make_table

SECRET = "SECRET123"


@pytest.fixture
def table(tmp_path) -> LanceTable:
    return make_table(tmp_path, 100)


def open_at(path: str, name: str) -> Any:
    """A connection factory, once the path is bound."""
    assert os.environ["TABLE_KEY"]
    return lancedb.connect(path).open_table(name)


def test_pinning_makes_the_version_a_number(table, tmp_path):
    table.tags.create("good", 3)
    ref = TableRef(tmp_path, "rows")
    assert ref.version is None
    assert not ref.is_pinned
    assert ref.pin() == TableRef(tmp_path, "rows", version=5)
    assert TableRef(tmp_path, "rows", version="good").pin().version == 3
    pinned = TableRef(tmp_path, "rows", version=np.int64(2))
    assert pinned.is_pinned
    assert pinned.pin() is pinned
    assert type(pinned.version) is int
    assert pinned.with_version(4).version == 4


def test_an_opened_reference_stays_at_its_version(table, tmp_path):
    """C41: what is appended after the pin does not appear, and version=v reads v."""
    ref = TableRef(tmp_path, "rows").pin()
    table.add(make_rows(100, 150))
    assert ref.open().count_rows() == 100
    assert TableRef(tmp_path, "rows").open().count_rows() == 150
    assert ref.with_version(2).open().count_rows() == 25
    assert ref.open().count_rows() == 100


def test_the_handle_of_the_user_is_respected_and_left_alone(table):
    table.checkout(3)
    ref = TableRef.from_table(table)
    assert ref.version == 3
    assert ref.open() is not table
    assert ref.with_version(5).open().count_rows() == 100
    assert table.version == 3
    table.checkout_latest()
    ref.open()
    table.add(make_rows(100, 101))
    assert table.count_rows() == 101
    assert ref.open().count_rows() == 50


def test_a_table_is_opened_once_per_process(table, tmp_path):
    ref = TableRef(tmp_path, "rows", version=5)
    opened: list[LanceTable] = []
    threads = [threading.Thread(target=lambda: opened.append(ref.open())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    opened.append(pickle.loads(pickle.dumps(ref)).open())
    assert len(opened) == 9
    assert len({id(handle) for handle in opened}) == 1
    assert ref.with_version(4).open() is not opened[0]


def test_an_empty_table_is_opened_once_too(tmp_path):
    """A table without rows is false in Python."""
    make_table(tmp_path, 0)
    ref = TableRef(tmp_path, "rows", version=1)
    assert ref.open() is ref.open()


def test_many_versions_do_not_pile_up_open(table, tmp_path):
    first = TableRef(tmp_path, "rows", version=1)
    handle = first.open()
    for label in range(20):
        table.update(where="id = 0", values={"label": label})
    for version in range(2, 25):
        assert first.with_version(version).open().version == version
    assert first.open() is not handle


def read_in_child(ref: TableRef, connection: Any) -> None:
    connection.send((id(ref.open()), ref.open().count_rows(), os.getpid()))


@pytest.mark.filterwarnings("ignore:lancedb fork support:RuntimeWarning", "ignore:.*fork:DeprecationWarning")
@pytest.mark.timeout(150)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_another_process_opens_its_own_handle(table, tmp_path, method):
    """C42: the driver has read the table before its workers start."""
    ref = TableRef(tmp_path, "rows", version=5)
    here = ref.open()
    assert here.count_rows() == 100
    context = multiprocessing.get_context(method)
    receiver, sender = context.Pipe()
    process = context.Process(target=read_in_child, args=(ref, sender))
    process.start()
    assert receiver.poll(100)
    handle, rows, pid = receiver.recv()
    process.join()
    assert rows == 100
    assert pid != os.getpid()
    if method == "fork":
        assert handle != id(here)


def test_relative_paths_hold_in_another_directory(table, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path.parent)
    ref = TableRef(tmp_path.name, "rows")
    monkeypatch.chdir("/")
    assert ref.pin().open().count_rows() == 100
    assert ref == TableRef(f"file://{tmp_path}", "rows") == TableRef(str(tmp_path) + "/", "rows")
    assert TableRef.from_table(table).identity() == ref.identity()
    assert TableRef("~/db", "rows").uri == str(Path.home() / "db")
    assert TableRef("s3://bucket/db/", "rows").uri == "s3://bucket/db"


def test_namespaces(tmp_path):
    connection = lancedb.connect_namespace("dir", {"root": str(tmp_path)})
    connection.create_namespace(["team"])
    table = connection.create_table("rows", make_rows(0, 10), namespace_path=["team"])
    with pytest.raises(InvalidArgumentError, match="connection_factory"):
        TableRef.from_table(table)
    ref = TableRef(tmp_path, "rows", namespace_path=["team"])  # type: ignore[arg-type]
    assert ref.pin().open().count_rows() == 10
    assert ref.identity()["namespace_path"] == ["team"]
    factory = functools.partial(open_in_namespace, str(tmp_path))
    made = TableRef.from_table(table, connection_factory=factory)
    assert made.open().count_rows() == 10
    assert made.namespace_path == ("team",)


def open_in_namespace(root: str, name: str) -> Any:
    return lancedb.connect_namespace("dir", {"root": root}).open_table(name, namespace_path=["team"])


def test_missing_tables_and_versions_are_named(table, tmp_path):
    table.tags.create("good", 3)
    with pytest.raises(TableNotFoundError, match=r"'nothing'.*was not found"):
        TableRef(tmp_path, "nothing").pin()
    with pytest.raises(TableNotFoundError, match="no directory"):
        TableRef(tmp_path / "nowhere", "rows").pin()
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(VersionNotFoundError, match=r"no version 99 .*exist: 1, 2, 3, 4, 5;"):
        TableRef(tmp_path, "rows", version=99).open()
    with pytest.raises(VersionNotFoundError, match=r"no version 'bad' .*Tags: good"):
        TableRef(tmp_path, "rows", version="bad").pin()


def test_a_version_that_was_cleaned_up_is_an_error(table, tmp_path):
    """G5: the pinned version is gone, and the message tells which are left."""
    ref = TableRef(tmp_path, "rows", version=3)
    table.add(make_rows(100, 110))
    with pytest.warns(UserWarning, match="removes every version"):
        table.optimize(cleanup_older_than=timedelta(0), delete_unverified=True)
    with pytest.raises(VersionNotFoundError, match=rf"no version 3 .*exist: {table.version};.*tagged"):
        ref.open()


BAD_REFERENCES: list[tuple[dict[str, Any], str]] = [
    ({"uri": ""}, "uri"),
    ({"uri": None}, "uri"),
    ({"uri": 3}, "uri"),
    ({"uri": "s3://[bucket"}, "uri"),
    ({"uri": "memory://"}, "memory://.*write the table"),
    ({"uri": "memory:///x"}, "memory://"),
    ({"uri": "db://base"}, "remote tables.*lancedb.connect"),
    ({"uri": "namespace://dir"}, "connection_factory"),
    ({"name": ""}, "name"),
    ({"name": None}, "name"),
    ({"version": True}, "version"),
    ({"version": 0}, "version"),
    ({"version": -1}, "version"),
    ({"version": 2**63}, "version"),
    ({"version": 1.0}, "version"),
    ({"version": ""}, "version"),
    ({"namespace_path": "abc"}, "namespace_path"),
    ({"namespace_path": ["a", 3]}, "namespace_path"),
    ({"storage_options": [("a", "b")]}, "storage_options"),
    ({"storage_options": {"timeout": 3}}, "timeout"),
    ({"connection_factory": "open"}, "connection_factory"),
    ({"connection_factory": open_at, "storage_options": {"a": "b"}}, "not both"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_REFERENCES, ids=str)
def test_impossible_references_are_refused(arguments, message):
    with pytest.raises(InvalidArgumentError, match=message):
        TableRef(**({"uri": "somewhere", "name": "rows"} | arguments))


@pytest.mark.parametrize("thing", [None, "rows", 3, {"id": [1]}, pa.table({"id": [1]})], ids=type)
def test_what_is_not_a_table_is_refused(thing):
    with pytest.raises(InvalidArgumentError, match=rf"TableRef.*{type(thing).__name__}"):
        TableRef.from_table(thing)


def test_tables_that_cannot_be_pinned_are_refused(table, tmp_path):
    """C43: memory tables; also asynchronous and remote ones, and branches. Each with the way out."""
    memory = lancedb.connect("memory://").create_table("rows", make_rows(0, 3))
    with pytest.raises(InvalidArgumentError, match=r"memory://.*write the table"):
        TableRef.from_table(memory)

    async def open_async() -> Any:
        return await (await lancedb.connect_async(tmp_path)).open_table("rows")

    with pytest.raises(InvalidArgumentError, match=r"AsyncTable.*lancedb\.connect\("):
        TableRef.from_table(asyncio.run(open_async()))
    with pytest.raises(InvalidArgumentError, match="branch 'side'"):
        TableRef.from_table(table.branches.create("side"))


def test_a_factory_opens_the_table_everywhere(table, tmp_path, monkeypatch):
    monkeypatch.setenv("TABLE_KEY", SECRET)
    ref = TableRef.from_table(table, connection_factory=functools.partial(open_at, str(tmp_path)))
    copy = pickle.loads(pickle.dumps(ref))
    assert copy.open() is ref.open()
    assert copy.open().count_rows() == 100
    assert copy.with_version(2).open().count_rows() == 25
    # Another factory may lead elsewhere: nothing is shared with it.
    other = TableRef.from_table(table, connection_factory=functools.partial(open_at, str(tmp_path)))
    assert other.open() is not ref.open()


def test_a_factory_must_open_a_new_table_each_time(table, tmp_path):
    shared = lancedb.connect(tmp_path).open_table("rows")
    ref = TableRef(tmp_path, "rows", version=5, connection_factory=lambda name: shared)
    assert ref.open().count_rows() == 100
    with pytest.raises(InvalidArgumentError, match="same opened table twice"):
        ref.with_version(2).open()
    assert ref.open().count_rows() == 100


def failing_factory(name: str) -> Any:
    raise PermissionError(f"bad key {SECRET} for {name}")


def everything_shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def test_a_failing_factory_tells_where_but_not_what(tmp_path):
    """C43: only the factory knows what is secret in its error."""
    ref = TableRef(tmp_path, "rows", connection_factory=failing_factory)
    with pytest.raises(TableNotFoundError, match=r"PermissionError at test_table\.py:\d+") as caught:
        ref.pin()
    assert SECRET not in everything_shown(caught.value)


@pytest.mark.parametrize("wrong", [None, "rows", lancedb.connect])
def test_a_factory_that_returns_something_else(tmp_path, wrong):
    with pytest.raises(
        InvalidArgumentError, match="connection_factory must return an opened LanceDB table for 'rows', got"
    ):
        TableRef(tmp_path, "rows", connection_factory=lambda name: wrong).pin()


def test_a_factory_that_returns_a_memory_table(tmp_path):
    def factory(name: str) -> Any:
        return lancedb.connect("memory://").create_table(name, make_rows(0, 3))

    with pytest.raises(InvalidArgumentError, match="memory://"):
        TableRef(tmp_path, "rows", connection_factory=factory).pin()


def test_no_secret_is_shown_or_pickled(table, tmp_path, monkeypatch):
    """C43, G8: neither in repr, identity, spec, plan nor error; with a factory not in a pickle either."""
    monkeypatch.setenv("TABLE_KEY", SECRET)
    options = {"aws_secret_access_key": SECRET, "aws_session_token": "tok-9"}
    connection = lancedb.connect(tmp_path, storage_options=options)
    opened = connection.open_table("rows", storage_options={"other_key": SECRET + "B"})

    ref = TableRef.from_table(opened)
    assert ref.storage_options == options | {"other_key": SECRET + "B"}
    spec = make_spec(opened, num_splits=4)
    plan = build_plan(spec, 0)
    shown = f"{ref!r} {ref} {ref.identity()} {spec!r} {plan!r} {json.dumps(ref.identity())}"
    with pytest.raises(VersionNotFoundError) as caught:
        ref.with_version(99).open()
    shown += everything_shown(caught.value)
    with pytest.raises(RuntimeError) as missing:
        read_rows(spec.table.open(), np.array([10**12], dtype=np.uint64), columns=None)
    shown += everything_shown(missing.value)
    assert SECRET not in shown
    assert "tok-9" not in shown

    made = TableRef.from_table(opened, connection_factory=functools.partial(open_at, str(tmp_path)))
    made.open()
    assert made.storage_options is None
    for kept in (made, make_spec(made, num_splits=4)):
        assert SECRET.encode() not in pickle.dumps(kept)
        assert SECRET not in repr(kept)


@pytest.mark.parametrize(
    ("uri", "public"),
    [
        (f"s3://user:{SECRET}@host/db?token={SECRET}#x", "s3://host/db"),
        (f"az://box/db?t=a&sig={SECRET}", "az://box/db"),
        ("abfss://box@account.dfs.core.windows.net/db", "abfss://box@account.dfs.core.windows.net/db"),
        (f"abfss://box:{SECRET}@account/db", "abfss://box@account/db"),
        ("s3+ddb://bucket/db?ddbTableName=t", "s3+ddb://bucket/db"),
        ("/data/a?b@c#d", "/data/a?b@c#d"),
    ],
)
def test_credentials_in_a_uri(uri, public):
    ref = TableRef(uri, "rows")
    assert ref.identity()["uri"] == public
    assert SECRET not in repr(ref)
    message = scrub(f"cannot reach {uri}: {SECRET} refused", uri=uri, storage_options=None)
    if SECRET in uri:
        assert SECRET not in message
    assert public in message
    made = TableRef(uri, "rows", connection_factory=failing_factory)
    assert SECRET.encode() not in pickle.dumps(made)


def test_texts_lose_secrets_and_keep_the_rest(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "abc/def+1")
    text = scrub(
        f"GET http://host/x?k=abc%2Fdef%2B1 with {SECRET} and abc/def+1 in us-east-1, /root/.cargo/a-1/src/b.rs:1:2",
        uri="s3://bucket/db",
        storage_options={"aws_secret_access_key": SECRET, "allow_http": "true"},
    )
    assert text == "GET http://host/x?k=*** with *** and *** in us-east-1"


def test_an_unreachable_object_store(tmp_path):
    """What lancedb says about a failed connection arrives as an error of this package, without the key."""
    options = {
        "endpoint": "http://127.0.0.1:1",
        "aws_access_key_id": "AKIA55",
        "aws_secret_access_key": SECRET,
        "region": "us-east-1",
        "allow_http": "true",
        "client_max_retries": "0",
    }
    ref = TableRef("s3://bucket/db", "rows", storage_options=options)
    with pytest.raises(TableNotFoundError, match=r"'rows' in 's3://bucket/db'") as caught:
        ref.pin()
    assert SECRET not in everything_shown(caught.value)
    assert "AKIA55" not in everything_shown(caught.value)


def test_the_lance_layer_does_not_import_ray():
    code = (
        "import importlib.util, sys, types\n"
        "package = types.ModuleType('lance_ray_stream')\n"
        "package.__path__ = importlib.util.find_spec('lance_ray_stream').submodule_search_locations\n"
        "sys.modules['lance_ray_stream'] = package  # without running __init__\n"
        "from lance_ray_stream import plan, reader, spec, table\n"
        "assert not {'ray', 'torch'} & set(sys.modules), 'ray or torch was imported'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])


def test_a_table_that_is_dropped_and_written_again_is_read_anew(tmp_path) -> None:
    """In one process, as in a notebook: the same name and version number, other data files."""
    connection = lancedb.connect(tmp_path)
    for first in (0, 1000):
        if first:
            connection.drop_table("again")
        connection.create_table("again", pa.table({"id": np.arange(first, first + 20)}))
        for ref in (TableRef(tmp_path, "again"), TableRef.from_table(connection.open_table("again"))):
            table = ref.pin().open()
            assert table.to_arrow()["id"][0].as_py() == first
