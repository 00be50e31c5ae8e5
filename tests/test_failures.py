"""What dies, fails or ends early: the rows stay those of a clean run or the caller sees why, and all is free again."""

from __future__ import annotations

import gc
import threading
import time

import lancedb
import pyarrow as pa
import pytest

import lance_ray_stream as lrs
from lance_ray_stream import datasource, feed, planner
from lance_ray_stream.errors import PlanError
from tests.faults import (
    DeadlyToActors,
    InUse,
    MortalDoubler,
    MortalTable,
    SlowReads,
    fail_late,
    first_time,
    kill_actors,
    wait_until_free,
)
from tests.probes import configured, iterator, iterators, oracle, rows
from tests.tables import make_table
from tests.user_functions import OwnError, fail

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(240)]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch) -> None:
    """Many windows where there would be one: the first of 8 rows, then up to 64."""
    monkeypatch.setattr(feed, "FIRST_WINDOW_ROWS", 8)
    monkeypatch.setattr(datasource, "MAX_WINDOW_ROWS", 64)


# --- Processes that die ----------------------------------------------------------------------------


def test_a_reader_and_a_transform_that_are_killed_in_mid_window(tmp_path):
    """Their work is done again; the rows and their order are those of a clean run."""
    table = make_table(tmp_path, 480)
    dataset = lrs.read_stream(MortalTable(str(tmp_path), "rows"), num_splits=8).map_batches(
        MortalDoubler, fn_constructor_args=[str(tmp_path)], concurrency=2, batch_size=16
    )
    assert rows(iterator(dataset)) == oracle(table, 8)
    assert not first_time(tmp_path, "reader_killed")
    assert not first_time(tmp_path, "actor_killed")


def test_a_planner_that_is_killed_plans_again(tmp_path, caplog):
    """In mid-epoch: what it published is lost with it; each rank goes on where it stands, and into the next epoch."""
    table = make_table(tmp_path, 960)
    clean = [[rows(stream), rows(stream)] for stream in iterators(lrs.read_stream(table, num_splits=8), 2)]
    dataset = lrs.read_stream(SlowReads(str(tmp_path), "rows"), num_splits=8, concurrency=2)
    streams = configured(dataset, 2)
    loops = [iter(stream.iter_batches(batch_size=8)) for stream in streams]
    received = [next(loop)["id"].tolist() for loop in loops]
    kill_actors("PlannerProcess")
    for ids, loop in zip(received, loops, strict=True):
        ids += [i for batch in loop for i in batch["id"].tolist()]
    assert received == [epochs[0] for epochs in clean]
    assert any("planner of dataset 'train' died" in record.getMessage() for record in caplog.records)
    assert [rows(stream) for stream in streams] == [epochs[1] for epochs in clean]


def test_a_planner_that_dies_of_every_plan_is_an_error(tmp_path, monkeypatch):
    """After a few attempts; not an endless wait."""
    monkeypatch.setattr(planner, "_PLAN_RETRIES", 1)
    make_table(tmp_path, 40)
    (stream,) = configured(lrs.read_stream(DeadlyToActors(str(tmp_path), "rows"), num_splits=8), 1)
    with pytest.raises(PlanError, match=r"planned epoch 0 of .*rows.*out of memory.*indexed"):
        rows(stream)


# --- Ends before the end ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide_table(tmp_path_factory) -> SlowReads:
    """Rows of 20 kB, 40 MB of them, in reads of a fifth of a second."""
    folder = tmp_path_factory.mktemp("wide")
    rows = pa.table({"id": range(2048), "payload": [b"x" * 20_000] * 2048})
    lancedb.connect(folder).create_table("rows", rows)
    return SlowReads(str(folder), "rows")


def leave_by_break(stream) -> None:
    for _ in stream.iter_batches(batch_size=8):
        time.sleep(1)
        break


def leave_by_error(stream) -> None:
    try:
        for batch in stream.iter_batches(batch_size=8, prefetch_batches=0):
            time.sleep(1)
            fail(batch)
    except OwnError:  # pytest.raises() would keep the traceback, and with it the loop
        return


def leave_by_forgetting(stream) -> None:
    loop = iter(stream.iter_batches(batch_size=8))
    next(loop)
    time.sleep(1)
    del loop


def leave_by_next_loop(stream) -> None:
    loop = iter(stream.iter_batches(batch_size=8))
    next(loop)
    time.sleep(1)
    next(iter(stream.iter_batches(batch_size=8)))


def leave_by_error_of_a_transform(stream) -> None:
    try:
        rows(stream)
    except OwnError:
        return


@pytest.mark.parametrize(
    "leave", [leave_by_break, leave_by_error, leave_by_forgetting, leave_by_next_loop, leave_by_error_of_a_transform]
)
def test_who_leaves_early_leaves_nothing_running(wide_table, leave):
    """No reader goes on, no thread, and what was read ahead is gone; also before Python collects garbage."""
    dataset = lrs.read_stream(wide_table, num_splits=8)
    if leave is leave_by_error_of_a_transform:
        dataset = dataset.map_batches(fail_late)
    stream = iterator(dataset)
    gc.collect()
    wait_until_free(before := InUse.now())
    threads = threading.active_count()
    gc.disable()
    try:
        leave(stream)
        wait_until_free(before)
        reads = wide_table.rows_read()
        time.sleep(0.5)
        assert wide_table.rows_read() == reads
        assert threading.active_count() <= threads
    finally:
        gc.enable()
