"""``shuffle_algorithm="indexed"``: the promised order over the rows of the pinned version, and nothing built for it."""

from __future__ import annotations

import itertools
import json
import pickle
import shutil
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pytest
import ray
from lancedb import blob
from lancedb.table import LanceTable

import lance_ray_stream as lrs
from lance_ray_stream.datasource import WindowDatasource, max_window_rows
from lance_ray_stream.errors import (
    InvalidArgumentError,
    MissingRowsError,
    NotEnoughRowsError,
    PlanError,
    StateMismatchError,
)
from lance_ray_stream.permutation import IndexedOrder
from lance_ray_stream.plan import build_plan
from lance_ray_stream.planner import LocalPlanner
from lance_ray_stream.position import Window, windows
from lance_ray_stream.reader import read_rows, resolve_offsets
from lance_ray_stream.spec import MAX_SHUFFLE_SEED, StreamSpec, make_spec
from lance_ray_stream.table import TableRef
from lance_ray_stream.testing import PlanBackend, RankRun, Topology, assert_exact_resume, assert_same_batches
from lance_ray_stream.window_reader import read_window
from tests.probes import iterators, rows, take
from tests.tables import ids_of, make_rows, make_table

BILLION = 10**9


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> LanceTable:
    return make_table(tmp_path_factory.mktemp("db"), 1001)


def indexed(table: Any, *, num_splits: int | None = 8, **arguments: Any) -> StreamSpec:
    return make_spec(table, num_splits=num_splits, shuffle_algorithm="indexed", **arguments)


def offsets(spec: StreamSpec, epoch: int, num_rows: int) -> list[list[int]]:
    """The order as the formula alone says it, split by split."""
    assert spec.num_splits is not None
    order = IndexedOrder(
        num_rows=num_rows,
        num_splits=spec.num_splits,
        seed=spec.shuffle_seed,
        epoch=epoch,
        clump_size=spec.shuffle_clump_size,
        shuffle=spec.shuffle,
    )
    return [order.offsets(split, 0, order.rows_per_split).tolist() for split in range(spec.num_splits)]


def delivered(spec: StreamSpec, epoch: int, *columns: str, num_workers: int = 1) -> dict[str, list[Any]]:
    """What one rank that has all splits receives in an epoch, in windows that divide nothing."""
    plan, table = build_plan(spec, epoch), spec.table.open()
    start = np.zeros(plan.num_splits, dtype=np.int64)
    found: dict[str, list[Any]] = {name: [] for name in columns}
    num_rows = plan.num_splits * plan.rows_per_split
    for window in windows(start, num_rows=num_rows, first_rows=50, max_rows=333):
        batch = read_window(table, window, plan.order, start, columns=columns, num_workers=num_workers)
        assert batch.column_names == list(columns)
        for name in columns:
            found[name] += batch[name].to_pylist()
    return found


def flat(splits: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(splits))


def by_cycle(splits: list[list[int]]) -> list[int]:
    """The rows of all splits in the order of delivery (G1)."""
    return [row for cycle in zip(*splits, strict=True) for row in cycle]


# --- the order ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [0, 5])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"shuffle_seed": 42, "num_splits": 3},
        {"num_splits": 1001, "shuffle_seed": MAX_SHUFFLE_SEED},
        {"num_splits": 1},
        {"shuffle_clump_size": 16},
        {"shuffle_clump_size": 7, "num_splits": 12},
        {"shuffle_clump_size": 5000},
        {"shuffle": False},
        {"shuffle": False, "shuffle_clump_size": 10},
    ],
    ids=str,
)
def test_the_order_is_the_formula_over_the_rows_in_storage_order(table, arguments, epoch):
    """A table that was only added to stores row i at offset i."""
    spec = indexed(table, **arguments)
    expected = offsets(spec, epoch, 1001)
    plan = build_plan(spec, epoch)
    length = plan.rows_per_split
    assert (plan.epoch, plan.num_splits, plan.rows, plan.dropped_rows) == (
        epoch,
        spec.num_splits,
        1001,
        1001 - length * plan.num_splits,
    )
    assert ids_of(table, plan.ids.reshape(-1)) == flat(expected)
    assert delivered(spec, epoch, "id")["id"] == by_cycle(expected)


@pytest.mark.parametrize("condition", ["label = 3", "label != 3 AND id < 700"])
@pytest.mark.parametrize("arguments", [{}, {"shuffle_clump_size": 10}, {"shuffle": False}], ids=str)
def test_with_a_filter_it_is_the_formula_over_the_rows_that_pass(table, arguments, condition):
    passing = [i for i in range(1001) if (i % 7 == 3 if condition == "label = 3" else i % 7 != 3 and i < 700)]
    spec = indexed(table, filter=condition, **arguments)
    expected = [[passing[place] for place in split] for split in offsets(spec, 2, len(passing))]
    plan = build_plan(spec, 2)
    assert plan.rows == len(passing)
    assert [ids_of(table, plan.row_ids(split)) for split in range(8)] == expected
    assert delivered(spec, 2, "id")["id"] == by_cycle(expected)


def test_epochs_and_seeds_differ_and_can_be_made_again(table):
    """C04: five orders over the same rows; (seed, epoch) alone says which."""
    numbers = [(0, 0), (0, 1), (1, 0), (0, 2), (MAX_SHUFFLE_SEED, 2**64 - 1)]
    plans = [build_plan(indexed(table, shuffle_seed=seed), epoch) for seed, epoch in numbers]
    again = [build_plan(indexed(table, shuffle_seed=seed), epoch) for seed, epoch in numbers]
    assert [plan.fingerprint for plan in plans] == [plan.fingerprint for plan in again]
    assert len({plan.fingerprint for plan in plans}) == 5
    assert len({plan.ids.tobytes() for plan in plans}) == 5
    assert len({frozenset(plan.ids.reshape(-1).tolist()) for plan in plans}) == 5, "the surplus never changes"
    assert [plan.ids.tobytes() for plan in plans] == [plan.ids.tobytes() for plan in again]


@pytest.mark.parametrize(
    ("num_rows", "num_splits", "clump"), [(1, 1, None), (1, 1, 9), (2, 2, None), (7, 7, 2), (9, 8, 4)]
)
@pytest.mark.parametrize("epoch", [0, 2**64 - 1])
def test_the_smallest_tables(tmp_path, num_rows, num_splits, clump, epoch):
    """C31: as many splits as rows, also a single one."""
    small = make_table(tmp_path, num_rows, appends=1)
    spec = indexed(small, num_splits=num_splits, shuffle_clump_size=clump, shuffle_seed=MAX_SHUFFLE_SEED)
    found = delivered(spec, epoch, "id")["id"]
    assert len(found) == len(set(found)) == num_splits
    assert set(found) <= set(range(num_rows))


# --- every row of the pinned version -------------------------------------------------------------------------


def appended(path: Path) -> LanceTable:
    return make_table(path, 500)


def deleted(path: Path) -> LanceTable:
    table = make_table(path, 500)
    table.delete("id % 10 = 0 OR (id > 130 AND id < 260)")
    return table


def compacted(path: Path) -> LanceTable:
    table = deleted(path)
    table.optimize()
    table.add(make_rows(500, 540))
    return table


def updated(path: Path) -> LanceTable:
    table = make_table(path, 500)
    table.update(where="id % 9 = 0", values={"label": 3})
    return table


def stable(path: Path) -> LanceTable:
    connection = lancedb.connect(path, storage_options={"new_table_enable_stable_row_ids": "true"})
    table = connection.create_table("rows", make_rows(0, 250))
    assert isinstance(table, LanceTable)
    table.add(make_rows(250, 500))
    table.update(where="id % 9 = 0", values={"label": 3})
    table.delete("id % 10 = 0")
    return table


@pytest.fixture(scope="module", params=[appended, deleted, compacted, updated, stable], ids=lambda make: make.__name__)
def storied(request, tmp_path_factory) -> LanceTable:
    table = request.param(tmp_path_factory.mktemp("db"))
    assert isinstance(table, LanceTable)
    return table


@pytest.mark.parametrize("clump", [None, 7])
@pytest.mark.parametrize("condition", [None, "label = 3"])
def test_every_row_once_but_the_counted_surplus(storied, condition, clump):
    """C05, C33, C71: whatever happened to the table before it was pinned."""
    query = storied.search().select(["id"]).limit(10_000)
    there = (query if condition is None else query.where(condition)).to_arrow()["id"].to_pylist()
    spec = indexed(storied, filter=condition, shuffle_clump_size=clump)
    for epoch in (0, 3):
        plan = build_plan(spec, epoch)
        found = delivered(spec, epoch, "id", num_workers=2)["id"]
        assert (plan.rows, plan.dropped_rows) == (len(there), len(there) % 8)
        assert len(set(found)) == len(found) == len(there) - plan.dropped_rows
        assert set(found) <= set(there)


@pytest.mark.parametrize("condition", [None, "label = 3"])
def test_row_ids_of_the_plan_fetch_the_delivered_rows(storied, condition):
    """C63: though rows are read by offset; in memory, by step, and as a column."""
    spec = indexed(storied, filter=condition, num_splits=4)
    plan = build_plan(spec, 1)
    found = delivered(spec, 1, "id", "_rowid")
    assert found["_rowid"] == by_cycle(plan.ids.tolist())
    assert len(set(found["_rowid"])) == len(found["_rowid"])
    assert ids_of(storied, np.array(found["_rowid"])) == found["id"]
    assert plan.row_ids_of_step(1, 20).tolist() == found["_rowid"][20:40]
    assert [plan.row_ids(split).tolist() for split in range(4)] == plan.ids.tolist()
    fetched = read_rows(spec.table.open(), np.array(found["_rowid"], dtype=np.uint64), columns=("id",))
    assert fetched["id"].to_pylist() == found["id"]


@pytest.mark.parametrize("condition", [None, "label = 3"])
def test_an_old_version_is_read_as_it_was(tmp_path, condition):
    """C40, C41: its offsets count its own rows, whatever was appended, deleted, updated or compacted since."""
    table = make_table(tmp_path, 400)
    spec = indexed(table, filter=condition)
    before, ids = build_plan(spec, 1), delivered(spec, 1, "id")["id"]
    table.delete("id % 5 = 0")
    table.update(where="id % 9 = 0", values={"label": 3})
    table.add(make_rows(400, 500))
    table.optimize()

    old = indexed(TableRef(str(tmp_path), "rows", version=spec.table.version), filter=condition)
    for again in (spec, old):
        assert build_plan(again, 1).fingerprint == before.fingerprint
        assert delivered(again, 1, "id")["id"] == ids
    latest = indexed(TableRef(str(tmp_path), "rows"), filter=condition)
    assert build_plan(latest, 1).fingerprint != before.fingerprint
    assert delivered(latest, 1, "id")["id"] != ids


# --- guarantees ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [{}, {"filter": "label = 3 AND id < 300"}, {"shuffle_clump_size": 5}, {"shuffle": False}],
    ids=str,
)
def test_same_batches_on_every_topology(tmp_path, arguments):
    """C01, C07: rows that are read as in training, by offset."""
    spec = indexed(make_table(tmp_path, 330), num_splits=12, **arguments)
    backend = PlanBackend(spec, read=True, first_rows=30, max_rows=100)
    assert_same_batches(backend, world_sizes=[1, 2, 3, 12], num_workers=[1, 2], global_batch_size=24, epoch=1)
    by_id = PlanBackend(spec, read=True, key="id", first_rows=30, max_rows=100)
    assert_same_batches(by_id, world_sizes=[4], num_workers=[3], global_batch_size=24, epoch=1)


@pytest.mark.parametrize("arguments", [{}, {"filter": "label = 3"}], ids=str)
def test_exact_resume_on_every_topology(tmp_path, arguments):
    """C10 to C14."""
    spec = indexed(make_table(tmp_path, 50 if not arguments else 350), num_splits=4, **arguments)
    backend = PlanBackend(spec, read=True, first_rows=8, max_rows=16)
    assert_exact_resume(backend, world_sizes=[1, 2], num_workers=[1, 2], global_batch_size=12, epoch=2)


def test_many_topologies_and_steps_resume_exactly_on_the_plan(table):
    backend = PlanBackend(indexed(table, num_splits=24, shuffle_clump_size=10), first_rows=50, max_rows=200)
    assert_exact_resume(backend, world_sizes=[1, 2, 3, 8], global_batch_size=240, epoch=7)


def state_of(spec: StreamSpec, *, epoch: int = 0) -> dict[str, Any]:
    """The state after two of its steps, as it comes back from a file."""
    run = PlanBackend(spec).run(Topology(1), batch_size=16, steps=2, epoch=epoch)[0]
    state: dict[str, Any] = json.loads(json.dumps(run.states[-1]))
    return state


def resume(spec: StreamSpec, state: dict[str, Any]) -> RankRun:
    return PlanBackend(spec).run(Topology(1), batch_size=16, steps=1, state=state)[0]


def test_a_state_of_the_other_algorithm_is_refused(table):
    """C17, G7: both ways; the state of the own one loads."""
    here, there = indexed(table), make_spec(table, num_splits=8)
    for spec, other, names in ((here, there, ("indexed", "lancedb")), (there, here, ("lancedb", "indexed"))):
        state = state_of(spec)
        assert state["lance_ray_stream"]["shuffle_algorithm"] == names[0]
        with pytest.raises(StateMismatchError, match=rf"(?s)shuffle_algorithm.*{names[0]}.*{names[1]}"):
            resume(other, state)
        assert resume(spec, state).batches


@pytest.mark.parametrize(
    "other",
    [{"shuffle_seed": 1}, {"shuffle_clump_size": 4}, {"shuffle": False}, {"filter": "id < 900"}, {"num_splits": 4}],
    ids=lambda other: next(iter(other)),
)
def test_a_state_of_other_arguments_is_refused(table, other):
    """C17: by name."""
    with pytest.raises(StateMismatchError, match=next(iter(other))):
        resume(indexed(table, **other), state_of(indexed(table)))


def test_a_table_that_was_written_anew_is_noticed_under_a_filter(tmp_path):
    """G7: same name, version, filter and number of rows that pass, but other rows do."""
    state = None
    for attempt, shift in enumerate((0, 0, 1)):
        shutil.rmtree(tmp_path / "rows.lance", ignore_errors=True)
        connection = lancedb.connect(tmp_path)
        made = connection.create_table("rows", make_rows(shift, 140 + shift))
        # Another option, another handle, as another process has it: this one keeps the files of the first table.
        ref = TableRef(str(tmp_path), "rows", version=made.version, storage_options={"attempt": str(attempt)})
        spec = indexed(ref, filter="label = 3")
        state = state_of(spec) if state is None else state
        plan = build_plan(spec, 0)
        if shift == 0:
            assert plan.fingerprint == state["lance_ray_stream"]["fingerprint"]
            assert resume(spec, state).batches
        else:
            assert plan.rows == 20
            with pytest.raises(StateMismatchError, match="fingerprint"):
                resume(spec, state)


# --- nothing is built --------------------------------------------------------------------------------------------


class ClosedTable(TableRef):
    """A table that must not be looked at."""

    def open(self) -> LanceTable:
        raise AssertionError("the table was opened")


def of_size(spec: StreamSpec, num_rows: int, num_splits: int) -> StreamSpec:
    """``spec`` over a table of so many rows that must not be looked at."""
    closed = ClosedTable(spec.table.uri, spec.table.name, version=spec.table.version)
    return replace(spec, table=closed, total_rows=num_rows, num_splits=num_splits)


def count_scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The queries that are begun in this process from now on."""
    scans: list[str] = []
    search = LanceTable.search

    def counted(self: LanceTable, *arguments: Any, **options: Any) -> Any:
        scans.append(self.name)
        return search(self, *arguments, **options)

    monkeypatch.setattr(LanceTable, "search", counted)
    return scans


def test_planning_without_a_filter_does_not_look_at_the_table(table):
    """C70: nor do lengths and fingerprints, for any number of epochs."""
    spec = of_size(indexed(table), 1001, 8)
    planner = LocalPlanner()
    for epoch in range(5):
        plan = planner.plan(spec, epoch, range(8))
        assert plan.fingerprint == build_plan(indexed(table), epoch).fingerprint
        assert (plan.rows, plan.rows_per_split, plan.row_ids, plan.passing) == (1001, 125, None, None)
        assert planner.plan(spec, epoch, range(8)) == plan


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_filter_is_scanned_once_for_all_epochs_of_a_version(table, monkeypatch):
    """C70: epochs, seeds and clumps share the rows that pass; another filter has its own."""
    spec = indexed(table, filter="label = 3")
    scans, planner = count_scans(monkeypatch), LocalPlanner()
    plans = [planner.plan(spec, epoch, range(8)) for epoch in range(4)]
    plans.append(planner.plan(replace(spec, shuffle_seed=9, shuffle_clump_size=2, num_splits=4), 0, range(4)))
    assert len(scans) == 1
    assert len({plan.passing for plan in plans}) == 1
    assert len({plan.fingerprint for plan in plans}) == 5
    assert all(plan.rows == 143 for plan in plans)
    planner.plan(indexed(table, filter="label = 4"), 0, range(8))
    monkeypatch.undo()
    assert plans[1].fingerprint == build_plan(spec, 1).fingerprint


def test_a_billion_rows_are_planned_in_no_memory(table):
    """A formula; what a rank holds is the list of its windows."""
    spec = of_size(indexed(table, shuffle_clump_size=100), BILLION, 4096)
    planner = LocalPlanner()
    planner.plan(spec, 0, range(8))
    tracemalloc.start()
    try:
        plan = planner.plan(spec, 1, range(8, 16))
        own = plan.rows_to_fetch()
        planned = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert planned < 2**20
    assert (plan.rows, plan.rows_per_split) == (BILLION, 244_140)
    assert len(pickle.dumps(plan)) < 2_000
    assert len(pickle.dumps(own)) < 2_000
    assert pickle.loads(pickle.dumps(plan)) == plan
    # (8 splits) x (4 cycles at the end of the epoch)
    cycle, split = (grid.ravel() for grid in np.mgrid[244_136:244_140, :8])
    expected = IndexedOrder(num_rows=BILLION, num_splits=4096, seed=0, epoch=1, clump_size=100)
    assert own.fetch().at(split, cycle).tolist() == expected.offsets_at(split + 8, cycle).tolist()


@pytest.mark.parametrize("num_rows", [10**6, BILLION])
def test_read_tasks_do_not_grow_with_the_table(table, num_rows):
    """C44: the tasks of one of 512 ranks, as Ray sends them; few of them, and each small."""
    spec = of_size(indexed(table), num_rows, 4096)
    plan, position = LocalPlanner().plan(spec, 3, range(8)), np.zeros(8, dtype=np.int64)
    cuts = list(windows(position, num_rows=8 * plan.rows_per_split, first_rows=1024, max_rows=max_window_rows(40)))
    own = plan.rows_to_fetch()
    source = WindowDatasource(spec, epoch=3, rows=own, position=position, windows=cuts, num_workers=1)
    sizes = [len(ray.cloudpickle.dumps(task)) for task in source.get_read_tasks(1)]
    assert len(sizes) == len(cuts) <= 30
    assert max(sizes) < 20_000


# --- reading by offset -------------------------------------------------------------------------------------------


BLOBS = [b"foo", b"", None, b"x" * 1000, b"bar"]


@pytest.mark.parametrize("columns", [None, ("data",), ("text", "data", "_rowid"), ("_rowid",), ()], ids=str)
@pytest.mark.parametrize("address", ["offset", "row_id"])
def test_columns_row_ids_and_blobs_come_by_offset_as_by_row_id(tmp_path, columns, address):
    """C62, C63: in the order asked for, repeated where they are asked for again, also without a column."""
    schema = make_rows(0, 0).select(["id", "text"]).schema.append(blob("data"))
    table = lancedb.connect(tmp_path).create_table("rows", schema=schema)
    assert isinstance(table, LanceTable)
    table.add([{"id": i, "text": str(i), "data": data} for i, data in enumerate(BLOBS)])
    table.add([{"id": i + 5, "text": str(i + 5), "data": data} for i, data in enumerate(BLOBS)])
    table.delete("id = 1")
    live = [0, 2, 3, 4, 5, 6, 7, 8, 9]
    row_ids = resolve_offsets(table, np.arange(9, dtype=np.uint64))
    assert ids_of(table, row_ids) == live
    for places in ([8, 0, 3, 3, 8, 8], [0, 1, 2], [5], [2, 2], []):
        asked = np.array(places, dtype=np.uint64)
        found = read_rows(
            table, asked if address == "offset" else row_ids[places].astype(np.uint64), columns=columns, address=address
        )
        assert found.num_rows == len(places)
        assert found.column_names == list(("id", "text", "data") if columns is None else columns)
        expected = {
            "text": [str(live[place]) for place in places],
            "data": [BLOBS[live[place] % 5] for place in places],
            "_rowid": row_ids[places].tolist() if places else [],
        }
        for name in set(found.column_names) & set(expected):
            assert found[name].to_pylist() == expected[name]


@pytest.mark.parametrize("columns", [("id",), ("_rowid",), ()], ids=str)
@pytest.mark.parametrize("address", ["offset", "row_id"])
def test_a_row_that_is_asked_for_again_comes_again(table, columns, address):
    """Also where nothing but their number is left of the rows."""
    asked = np.array([3, 3, 1, 3, 1], dtype=np.uint64)  # of the first fragment, where row ids are offsets
    found = read_rows(table, asked, columns=columns, address=address)
    assert found.num_rows == 5
    for name in columns:
        assert found[name].to_pylist() == asked.tolist()


@pytest.mark.parametrize("columns", [None, ("id",), ("_rowid",), ()], ids=str)
@pytest.mark.parametrize("beyond", [1001, 2**40, 2**64 - 1])
def test_an_offset_beyond_the_version_is_an_error(table, columns, beyond):
    """G5: never fewer rows without a word, never a panic."""
    with pytest.raises(MissingRowsError, match=rf"'rows'.*version 5.*2 of the 3.*by offset.*{beyond}"):
        read_rows(table, np.array([3, beyond, 1000], dtype=np.uint64), columns=columns, address="offset")


def test_a_plan_over_more_rows_than_the_version_has_is_an_error_not_a_short_epoch(table):
    """G5, as a read task meets it."""
    spec = replace(indexed(table), total_rows=2000)
    plan, start = build_plan(spec, 0), np.zeros(8, dtype=np.int64)
    for num_workers in (1, 2):
        with pytest.raises(MissingRowsError, match="by offset"):
            read_window(table, Window(0, 10, 80), plan.order, start, columns=("id",), num_workers=num_workers)


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refused", "kind", "message"),
    [
        (lambda t: indexed(t, num_splits=1002), NotEnoughRowsError, "1001 rows, fewer than num_splits=1002"),
        (lambda t: indexed(t, num_splits=0), InvalidArgumentError, "num_splits must be"),
        (lambda t: indexed(t, shuffle_clump_size=0), InvalidArgumentError, "shuffle_clump_size must be"),
        (lambda t: indexed(t, shuffle_seed=2**63), InvalidArgumentError, "shuffle_seed must be"),
        (lambda t: indexed(t, shuffle_seed=-1), InvalidArgumentError, "shuffle_seed must be"),
        (lambda t: make_spec(t, num_splits=1, shuffle_algorithm="Indexed"), InvalidArgumentError, "'indexed'"),
        (lambda t: build_plan(indexed(t, num_splits=None), 0), PlanError, "num_splits is not decided"),
        (lambda t: build_plan(indexed(t), -1), InvalidArgumentError, "epoch must be at least 0"),
        (lambda t: build_plan(indexed(t), 2**64), InvalidArgumentError, "epoch must be at most"),
        (lambda t: build_plan(indexed(t), 1.0), InvalidArgumentError, "epoch must be an integer"),  # type: ignore[arg-type]
        (lambda t: build_plan(indexed(t, filter="id < 7"), 0), NotEnoughRowsError, "7 rows that pass.*at most 7"),
        (lambda t: build_plan(indexed(t, filter="id < 0"), 0), NotEnoughRowsError, "0 rows that pass.*nothing"),
    ],
)
def test_what_is_impossible_is_refused(
    table, refused: Callable[[LanceTable], object], kind: type[Exception], message: str
):
    """C31, G7: with the numbers and the way out."""
    with pytest.raises(kind, match=message):
        refused(table)


def test_numpy_integers_are_as_good_as_others(table):
    """The plan says plain integers: they go into JSON."""
    plan = build_plan(indexed(table, num_splits=np.int64(8), shuffle_seed=np.uint32(3)), np.int64(2))
    assert type(plan.epoch) is type(plan.num_splits) is type(plan.rows) is int
    assert plan.fingerprint == build_plan(indexed(table, shuffle_seed=3), 2).fingerprint


# --- through Ray -------------------------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("condition", [None, "label < 4"])
def test_a_run_on_two_ranks_goes_on_on_one(tmp_path, condition):
    """C13, G1, G4: real iterators over tables with deleted rows; the plain dataset has the same plan."""
    table = make_table(tmp_path, 300)
    table.delete("id % 10 = 0")
    ds = lrs.read_stream(table, num_splits=4, filter=condition, columns=["id"], shuffle_algorithm="indexed", epoch=1)
    plan = lrs.plan_epoch(ds)
    splits = [ids_of(table, plan.row_ids(split)) for split in range(4)]
    expected = by_cycle(splits)
    assert [row["id"] for row in ds.take_all()] == flat(splits)
    assert ds.count() == len(expected)

    ranks = iterators(ds, 2, num_workers=2)
    first = [take(rank, 3, global_batch_size=20) for rank in ranks]
    steps = [sorted(flat(step)) for step in zip(*first, strict=True)]
    assert steps == [sorted(expected[start : start + 20]) for start in (0, 20, 40)]
    state = json.loads(json.dumps(ranks[1].state_dict()))
    assert state["lance_ray_stream"]["fingerprint"] == plan.fingerprint
    (alone,) = iterators(ds, 1)
    alone.load_state_dict(state)
    assert rows(alone) == expected[60:]
    assert alone.epoch == 2
