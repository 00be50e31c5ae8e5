"""Plans are LanceDB's own, row for row, on the pinned version, in every process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import pytest
from lancedb.streaming import StreamingDataset
from lancedb.table import LanceTable

from lance_ray_stream.errors import InvalidArgumentError, LayoutError, MissingRowsError, NotEnoughRowsError, PlanError
from lance_ray_stream.plan import build_plan
from lance_ray_stream.spec import make_spec
from lance_ray_stream.table import TableRef
from tests.tables import ids_of, make_rows, make_table

MEMORY_LIMIT = "LANCEDB_PERM_BUILDER_MEMORY_LIMIT"


@pytest.fixture(scope="module")
def table(tmp_path_factory) -> LanceTable:
    return make_table(tmp_path_factory.mktemp("db"), 1001)


def oracle(table, num_splits, **arguments) -> list[list[int]]:
    """The ids of each split, in the order in which lancedb's own loader delivers them."""
    rows = [row["id"] for row in StreamingDataset(table, num_splits=num_splits, columns=["id"], **arguments)]
    return [rows[split::num_splits] for split in range(num_splits)]


@pytest.mark.parametrize("epoch", [0, 1, 7])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"shuffle_seed": 42},
        {"shuffle_seed": 2**63 - 1 - 7 * 100003},
        {"shuffle_clump_size": 16},
        {"shuffle_clump_size": 7, "shuffle_seed": 3},
        {"shuffle_clump_size": 5000},
        {"filter": "label = 3"},
        {"filter": "label != 3 AND id < 700", "shuffle_clump_size": 10},
        {"shuffle": False},
        {"shuffle": False, "filter": "label > 2"},
    ],
    ids=str,
)
def test_every_split_is_the_one_of_streaming_dataset(table, arguments, epoch):
    """G3, C71: same seed, epoch, clump size, filter and shuffle: the same rows in the same order."""
    plan = build_plan(make_spec(table, num_splits=8, **arguments), epoch)
    assert [ids_of(table, plan.row_ids(s)) for s in range(8)] == oracle(table, 8, epoch=epoch, **arguments)


@pytest.mark.parametrize("num_splits", [1, 2, 3, 143, 1000, 1001])
def test_any_number_of_splits(table, num_splits):
    """C05, C31: every split equally long, no row twice, none missing but the counted surplus."""
    plan = build_plan(make_spec(table, num_splits=num_splits), 0)
    rows = np.concatenate([plan.row_ids(split) for split in range(num_splits)])
    assert plan.rows_per_split == 1001 // num_splits
    assert plan.dropped_rows == 1001 % num_splits
    assert len(np.unique(rows)) == len(rows) == 1001 - plan.dropped_rows
    if num_splits < 1000:  # the oracle needs seconds for so many splits
        assert [ids_of(table, plan.row_ids(s)) for s in range(num_splits)] == oracle(table, num_splits)


def test_the_plan_is_of_the_pinned_version(tmp_path):
    """C40, C41: deletes, appends and a compaction after the pin change nothing; a later pin sees them."""
    table = make_table(tmp_path, 400)
    spec = make_spec(table, num_splits=8)
    before = build_plan(spec, 1)
    order = [ids_of(table, before.row_ids(split)) for split in range(8)]
    table.delete("id % 10 = 0")
    table.add(make_rows(400, 500))
    table.optimize()

    after = build_plan(spec, 1)
    assert after.fingerprint == before.fingerprint
    assert (after.row_ids(5) == before.row_ids(5)).all()
    old = lancedb.connect(tmp_path).open_table("rows")
    assert isinstance(old, LanceTable)
    assert spec.table.version == 5
    old.checkout(5)
    assert [ids_of(old, after.row_ids(split)) for split in range(8)] == order == oracle(old, 8, epoch=1)

    new = make_spec(table, num_splits=8)
    assert new.total_rows == 460
    plan = build_plan(new, 1)
    assert [ids_of(table, plan.row_ids(split)) for split in range(8)] == oracle(table, 8, epoch=1)
    assert plan.fingerprint != before.fingerprint


@pytest.mark.parametrize("where", [None, "label < 2"])
def test_row_counts_add_up(table, where):
    """C33: rows in the table, after the filter, per split and dropped."""
    spec = make_spec(table, num_splits=8, filter=where)
    plan = build_plan(spec, 0)
    assert spec.total_rows == 1001
    assert plan.rows == table.count_rows(where)
    assert plan.rows == plan.num_splits * plan.rows_per_split + plan.dropped_rows
    assert plan.dropped_rows == plan.rows % 8 > 0


@pytest.mark.parametrize("rows", [7, 8, 9])
def test_as_many_rows_as_splits_or_hardly_more(tmp_path, rows):
    """C31: S - 1 rows are refused with both numbers; S and S + 1 rows work."""
    table = make_table(tmp_path, rows, appends=1)
    if rows < 8:
        with pytest.raises(NotEnoughRowsError, match=r"has 7 rows.*num_splits=8"):
            make_spec(table, num_splits=8)
    else:
        plan = build_plan(make_spec(table, num_splits=8), 0)
        assert (plan.rows_per_split, plan.dropped_rows) == (1, rows - 8)


@pytest.mark.parametrize("kept", [0, 3, 7])
def test_a_filter_that_keeps_too_few_rows(table, kept):
    """C31: refused when planning, with both numbers and the filter."""
    spec = make_spec(table, num_splits=8, filter=f"id < {kept}")
    with pytest.raises(NotEnoughRowsError, match=rf"has {kept} rows that pass the filter .id < {kept}.*=8"):
        build_plan(spec, 0)


def test_rows_of_a_step_go_cycle_by_cycle(table):
    plan = build_plan(make_spec(table, num_splits=8), 0)
    # 125 cycles, 2 in each step: 62 whole steps and a last one of one cycle
    for step in (0, 1, 61):
        expected = [plan.row_ids(split)[cycle] for cycle in (2 * step, 2 * step + 1) for split in range(8)]
        assert plan.row_ids_of_step(step, 16).tolist() == expected
    assert plan.row_ids_of_step(62, 16).tolist() == [plan.row_ids(split)[124] for split in range(8)]
    assert plan.row_ids_of_step(0, 8000).shape == (1000,)
    bad_steps: list[Any] = [63, -1, True, 0.0]
    for step in bad_steps:
        with pytest.raises(InvalidArgumentError, match="step"):
            plan.row_ids_of_step(step, 16)
    for size, near in ((12, "8, 16"), (3, "8")):
        with pytest.raises(LayoutError, match=f"num_splits=8.*{near}"):
            plan.row_ids_of_step(0, size)
    with pytest.raises(LayoutError, match=r"0\.\.7"):
        plan.row_ids(8)


def test_a_plan_cannot_be_changed(table):
    plan = build_plan(make_spec(table, num_splits=8), 0)
    for rows in (plan.row_ids(0), plan.row_ids_of_step(0, 8)):
        with pytest.raises(ValueError, match="read-only"):
            rows[0] = 1
    with pytest.raises(AttributeError):
        plan.epoch = 3  # type: ignore[misc]
    assert repr(plan) == (
        "EpochPlan(epoch=0, num_splits=8, rows=1001, rows_per_split=125, dropped_rows=1, "
        f"fingerprint={plan.fingerprint!r})"
    )


def test_the_fingerprint_tells_plans_apart(table):
    streams: list[tuple[int, dict[str, Any], int]] = [
        (8, {}, 0),
        (8, {}, 1),
        (4, {}, 0),
        (8, {"shuffle_seed": 1}, 0),
        (8, {"shuffle_clump_size": 4}, 0),
        (8, {"shuffle": False}, 0),
        (8, {"filter": "id < 1000"}, 0),
    ]
    prints = [
        build_plan(make_spec(table, num_splits=splits, **arguments), epoch).fingerprint
        for splits, arguments, epoch in streams
    ]
    assert len(set(prints)) == len(prints)
    # The same rows in a row, cut into other splits.
    flat = [build_plan(make_spec(table, num_splits=n, shuffle=False, filter="id < 1000"), 0) for n in (4, 8)]
    assert (flat[0].ids.ravel() == flat[1].ids.ravel()).all()
    assert flat[0].fingerprint != flat[1].fingerprint


PLAN_IN_A_PROCESS = """
import json, sys
from lance_ray_stream.plan import build_plan
from lance_ray_stream.spec import make_spec
from lance_ray_stream.table import TableRef

spec = make_spec(TableRef(sys.argv[1], "rows"), num_splits=16, shuffle_seed=5)
print(json.dumps([build_plan(spec, epoch).fingerprint for epoch in range(2)]))
"""


def test_one_fingerprint_in_every_process(tmp_path):
    """C05: three processes with different thread settings and memory limits plan the same order."""
    make_table(tmp_path, 200_000, columns=["id"])
    answers = []
    for threads, limit in (("1", "50000000"), ("2", "100000000"), ("7", "4000000000")):
        environment = os.environ | {
            "TOKIO_WORKER_THREADS": threads,
            "LANCE_CPU_THREADS": threads,
            "LANCE_IO_THREADS": threads,
            "RAYON_NUM_THREADS": threads,
            MEMORY_LIMIT: limit,
        }
        done = subprocess.run(
            [sys.executable, "-c", PLAN_IN_A_PROCESS, str(tmp_path)],
            env=environment,
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            check=True,
        )
        answers.append(json.loads(done.stdout))
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][0] != answers[0][1]


@pytest.fixture(scope="module")
def million_rows(tmp_path_factory) -> LanceTable:
    table = lancedb.connect(tmp_path_factory.mktemp("db")).create_table(
        "rows", pa.table({"id": np.arange(3_000_000, dtype=np.int32)})
    )
    assert isinstance(table, LanceTable)
    return table


@pytest.mark.parametrize("before", [None, "1000", "not a number", "999999999999"])
def test_millions_of_rows_fit_and_the_memory_limit_is_put_back(million_rows, monkeypatch, before):
    """lancedb's default limit ends at about 2 million rows; the user's variable is as it was afterwards."""
    if before is None:
        monkeypatch.delenv(MEMORY_LIMIT, raising=False)
    else:
        monkeypatch.setenv(MEMORY_LIMIT, before)
    plan = build_plan(make_spec(million_rows, num_splits=4), 0)
    assert plan.rows == 3_000_000
    assert len(np.unique(plan.ids)) == 3_000_000
    assert os.environ.get(MEMORY_LIMIT) == before


def test_the_memory_limit_is_put_back_after_an_error(million_rows, monkeypatch):
    monkeypatch.delenv(MEMORY_LIMIT, raising=False)
    spec = make_spec(million_rows, num_splits=4, filter="id < 3")
    with pytest.raises(NotEnoughRowsError):
        build_plan(spec, 0)
    assert MEMORY_LIMIT not in os.environ


def test_plans_from_several_threads(million_rows, monkeypatch):
    monkeypatch.delenv(MEMORY_LIMIT, raising=False)
    spec = make_spec(million_rows, num_splits=4)
    plans = {}
    threads = [threading.Thread(target=lambda e=e: plans.update({e: build_plan(spec, e)})) for e in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({plan.fingerprint for plan in plans.values()}) == 3
    assert plans[2].fingerprint == build_plan(spec, 2).fingerprint
    assert MEMORY_LIMIT not in os.environ


def test_a_clump_size_that_lancedb_cannot_do(tmp_path):
    """Above 10 * 2**20 rows a clump must divide 1,024."""
    rows = 10 * 2**20 + 1
    table = lancedb.connect(tmp_path).create_table("rows", pa.table({"id": np.zeros(rows, np.int8)}))
    with pytest.raises(PlanError, match=r"clumps of 48.*power of two up to 1024"):
        build_plan(make_spec(table, num_splits=2, shuffle_clump_size=48), 0)


@pytest.mark.parametrize("algorithm", ["lancedb", "indexed"])
def test_files_that_are_gone_are_named_as_such(tmp_path, algorithm):
    """G5: what lancedb raises while planning arrives as an error of this package, with the table's name."""
    table = make_table(tmp_path, 100)
    spec = make_spec(table, num_splits=4, filter="label = 1", shuffle_algorithm=algorithm)
    for path in tmp_path.glob("rows.lance/data/*"):
        path.unlink()
    with pytest.raises(MissingRowsError, match=r"table 'rows'.*version 5 no longer exists.*cleaned up") as caught:
        build_plan(spec, 0)
    assert caught.value.__cause__ is None
    assert ".rs:" not in str(caught.value)


def test_impossible_epochs_and_an_open_number_of_splits(table):
    spec = make_spec(table, num_splits=4)
    bad_epochs: list[Any] = [-1, True, 1.5, "0", None, 2**63]
    for epoch in bad_epochs:
        with pytest.raises(InvalidArgumentError, match="epoch"):
            build_plan(spec, epoch)
    assert build_plan(spec, np.int64(3)).epoch == 3
    with pytest.raises(PlanError, match="num_splits"):
        build_plan(make_spec(table, num_splits=None), 0)


def test_a_plan_from_a_reference_by_name(table):
    ref = TableRef(table._conn.uri, "rows")
    assert build_plan(make_spec(ref, num_splits=4), 0).fingerprint == (
        build_plan(make_spec(table, num_splits=4), 0).fingerprint
    )
