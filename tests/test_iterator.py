"""``StreamIterator``: the order of every rank, its position, and the end of an epoch."""

from __future__ import annotations

import itertools
import json
import pickle
from datetime import timedelta

import lancedb
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from ray.data.collate_fn import ArrowBatchCollateFn

import lance_ray_stream as lrs
from lance_ray_stream import datasource, feed, planner
from lance_ray_stream.errors import (
    InvalidArgumentError,
    LayoutError,
    MissingRowsError,
    NotEnoughRowsError,
    StreamUsageError,
    VersionNotFoundError,
)
from lance_ray_stream.spec import StreamSpec
from tests.probes import (
    RecordedTable,
    SlowTable,
    batches,
    configured,
    count_plans,
    global_sets,
    in_steps,
    iterator,
    iterators,
    oracle,
    rows,
    take,
)
from tests.tables import make_rows, make_table

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return make_table(tmp_path_factory.mktemp("db"), 240)


@pytest.fixture
def stream(table):
    """One rank of one, T(240), S=8: an epoch of 30 cycles."""
    return iterator(lrs.read_stream(table, num_splits=8))


@pytest.fixture(scope="module")
def order(table) -> list[int]:
    """What ``stream`` delivers in epoch 0."""
    return oracle(table, 8)


@pytest.fixture
def small_windows(monkeypatch) -> None:
    """Many windows where there would be one: the first of 8 rows, then up to 32."""
    monkeypatch.setattr(feed, "FIRST_WINDOW_ROWS", 8)
    monkeypatch.setattr(datasource, "MAX_WINDOW_ROWS", 32)


class IdsAlone(ArrowBatchCollateFn):
    """A user's collate function: leaves out the columns that no tensor holds."""

    def __call__(self, batch: pa.Table) -> torch.Tensor:  # type: ignore[override]
        return torch.tensor(batch["id"].to_pylist())


# --- order -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_c01_order_is_that_of_lancedb(table, order, small_windows, world_size):
    """C01: global set k is the same for all W and the oracle's; inside a rank the order is the oracle's."""
    dataset = lrs.read_stream(table, num_splits=8)
    per_rank = [batches(stream, global_batch_size=16) for stream in iterators(dataset, world_size)]
    for rank, received in enumerate(per_rank):
        assert [len(batch) for batch in received] == [16 // world_size] * 15
        assert list(itertools.chain(*received)) == oracle(table, 8, rank=rank, world_size=world_size)
    assert global_sets(per_rank) == [sorted(step) for step in in_steps(order, 16)]


def test_c01_configure_gives_every_rank_its_splits(table):
    """C01, C06: one ``DataConfig`` gives each world size its own groups; ranks are disjoint."""
    config = lrs.StreamDataConfig()
    dataset = lrs.read_stream(table, num_splits=8)
    for world_size in (2, 4, 2):
        streams = configured(dataset, world_size, config)
        assert [stream.rank for stream in streams] == list(range(world_size))
        assert [i for stream in streams for i in stream.splits] == list(range(8))
    assert [rows(stream) for stream in streams] == [oracle(table, 8, rank=r, world_size=2) for r in range(2)]


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_c07_reader_workers_do_not_change_batches(tmp_path, small_windows, num_workers):
    """C07: T(960), S=48, W=2: the global sets do not depend on the number of reader workers."""
    table = make_table(tmp_path, 960)
    streams = iterators(lrs.read_stream(table, num_splits=48), 2, num_workers=num_workers)
    per_rank = [batches(stream, global_batch_size=96) for stream in streams]
    assert [list(itertools.chain(*b)) for b in per_rank] == [
        oracle(table, 48, rank=rank, world_size=2) for rank in range(2)
    ]


@pytest.mark.parametrize("prefetch_batches", [1, 8])
def test_c02_slow_readers_do_not_change_the_order(tmp_path, small_windows, prefetch_batches):
    """C02: readers delayed at random, the first slowest; no Ray option set."""
    table = make_table(tmp_path, 240)
    stream = iterator(lrs.read_stream(SlowTable(str(tmp_path), "rows"), num_splits=8))
    assert rows(stream, batch_size=7, prefetch_batches=prefetch_batches) == oracle(table, 8)


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": False},
        {"shuffle_seed": 11, "shuffle_clump_size": 7},
        {"filter": "label < 3"},
        {"filter": "label < 3", "shuffle_clump_size": 16, "epoch": 2},
    ],
    ids=str,
)
def test_the_options_of_the_plan_reach_the_feed(table, options):
    """G3: other orders than the default one are LanceDB's too."""
    dataset = lrs.read_stream(table, num_splits=8, **options)
    for rank, stream in enumerate(iterators(dataset, 2)):
        assert rows(stream, global_batch_size=8) == oracle(table, 8, rank=rank, world_size=2, **options)


def test_c04_epochs_differ_and_repeat(table, stream):
    """C04, C19: one object looped three times: three orders of the same rows; epoch 2 can be started at."""
    epochs = [rows(stream, global_batch_size=16) for _ in range(3)]
    assert stream.epoch == 3
    assert epochs == [oracle(table, 8, epoch=epoch) for epoch in range(3)]
    assert len(set(map(tuple, epochs))) == 3
    assert [sorted(epoch) for epoch in epochs] == [list(range(240))] * 3
    assert rows(iterator(lrs.read_stream(table, num_splits=8, epoch=2))) == epochs[2]
    stream.set_epoch(1)
    assert rows(stream) == epochs[1]


def test_c06_outside_of_a_train_worker_there_is_no_rank():
    """C06: an error, not "rank 0 of 1", and it says what to do."""
    with pytest.raises(StreamUsageError, match=r"inside the training function.*configure"):
        lrs.get_stream()


def test_c40_the_pinned_version_survives_changes(tmp_path):
    """C40, C41: deletes, appends and a compaction after planning, and again in mid-epoch, change nothing."""
    table = make_table(tmp_path, 240)
    dataset = lrs.read_stream(table, num_splits=8)
    first = iterator(dataset)
    expected = oracle(table, 8)
    assert list(itertools.chain(*take(first, 4, batch_size=16))) == expected[:64]
    table.delete("id % 10 = 0")
    table.add(make_rows(240, 340))
    table.optimize()
    state = json.loads(json.dumps(first.state_dict()))
    assert rows(first) == expected[64:]
    later = iterator(lrs.read_stream(lrs.TableRef(str(tmp_path), "rows"), num_splits=8))
    later.load_state_dict(state)
    assert rows(later) == expected[64:]


def test_data_that_is_gone_is_an_error_that_says_so(tmp_path):
    """G5: never a short epoch; the error is the package's own, as raised in the read task."""
    table = make_table(tmp_path, 240)
    stream = iterator(lrs.read_stream(table, num_splits=8))
    take(stream, 1, batch_size=8)
    for path in (tmp_path / "rows.lance" / "data").iterdir():
        path.unlink()
    with pytest.raises(MissingRowsError, match=r"'rows'.*version 5"):
        rows(stream)


# --- position and iterations -----------------------------------------------------------------------


def test_a_break_asks_readers_to_stop_and_kills_none(stream, monkeypatch):
    """Killed reader processes cost the iteration after a break seconds: Ray's default would kill them."""
    from ray.data._internal.execution.streaming_executor import StreamingExecutor

    forced, shutdown = [], StreamingExecutor.shutdown

    def recorded(executor, force, exception=None):
        forced.append(force)
        shutdown(executor, force, exception)

    monkeypatch.setattr(StreamingExecutor, "shutdown", recorded)
    for _ in stream.iter_batches(batch_size=8):
        break
    assert forced
    assert not any(forced)


def test_a_break_leaves_the_position_and_the_next_loop_goes_on(stream, order):
    """C11: a new iteration on the same object continues where the trainer stopped."""
    received = [i for size in (7, 16, 1, 100) for i in take(stream, 1, batch_size=size)[0]]
    assert received == order[:124]
    assert rows(stream, batch_size=50) == order[124:]
    assert stream.epoch == 1


def test_c11_a_live_iteration_refuses_what_would_move_it(stream, order):
    """C11: load and set_epoch to another epoch are refused while a loop runs; state_dict() is not."""
    fresh = stream.state_dict()
    live = iter(stream.iter_batches(batch_size=8))
    assert next(live)["id"].tolist() == order[:8]
    with pytest.raises(StreamUsageError, match="live"):
        stream.load_state_dict(fresh)
    with pytest.raises(StreamUsageError, match="live"):
        stream.set_epoch(3)
    stream.set_epoch(0)
    assert stream.state_dict()["samples_consumed_per_split"] == [1] * 8
    assert next(live)["id"].tolist() == order[8:16], "refusing did not disturb the loop"
    live.close()
    stream.load_state_dict(fresh)
    assert rows(stream) == order


def test_c11_a_new_iteration_ends_the_one_before(stream, order):
    """C11: two loops never share a position."""
    first = iter(stream.iter_batches(batch_size=8))
    assert next(first)["id"].tolist() == order[:8]
    second = iter(stream.iter_batches(batch_size=8))
    assert next(second)["id"].tolist() == order[8:16]
    with pytest.raises(StreamUsageError, match="ended by another one"):
        next(first)
    assert [i for batch in second for i in batch["id"].tolist()] == order[16:]


def test_c11_an_iterator_that_was_never_started_is_ended_too(stream, order):
    """C11: ``iter()`` alone claims nothing, and its owner cannot interleave with a later loop."""
    first = iter(stream.iter_batches(batch_size=8))
    second = iter(stream.iter_batches(batch_size=8))
    assert next(second)["id"].tolist() == order[:8]
    with pytest.raises(StreamUsageError, match="ended by another one"):
        next(first)
    assert next(second)["id"].tolist() == order[8:16]
    assert stream.state_dict()["samples_consumed_per_split"] == [2] * 8


def test_the_same_batches_object_can_be_looped_again(stream, order):
    """As Ray's own iterables: each loop is what is left, or the next epoch."""
    eights = stream.iter_batches(batch_size=8)
    for _ in eights:
        break
    assert [i for batch in eights for i in batch["id"].tolist()] == order[8:]
    assert len(list(eights)) == 30
    assert stream.epoch == 2


def test_set_epoch_keeps_the_position_in_the_same_epoch(stream, order, table):
    take(stream, 3, batch_size=8)
    stream.set_epoch(0)
    assert take(stream, 1, batch_size=8) == [order[24:32]]
    stream.set_epoch(5)
    assert stream.state_dict()["samples_consumed_per_split"] == [0] * 8
    stream.set_epoch(0)
    assert rows(stream) == order, "another epoch in between: from its first row"


def test_iter_rows_moves_the_position_with_every_row(stream, order):
    received = []
    for row in stream.iter_rows():
        received.append(row["id"])
        assert sum(stream.state_dict()["samples_consumed_per_split"]) == len(received)
        if len(received) == 13:
            break
    assert stream.state_dict()["samples_consumed_per_split"] == [2] * 5 + [1] * 3
    assert received + rows(stream) == order
    row = next(iter(stream.iter_rows()))
    assert list(row) == ["id", "label", "text", "vector"]
    assert row["text"].startswith(f"row {row['id']} ")


@pytest.mark.parametrize("prefetch_batches", [0, 1, 8])
def test_the_state_counts_what_was_received_not_what_was_prefetched(stream, order, prefetch_batches):
    """G4, C18: also with prefetch 0."""
    received = []
    for batch in stream.iter_batches(batch_size=8, prefetch_batches=prefetch_batches):
        received += batch["id"].tolist()
        assert stream.state_dict()["samples_consumed_per_split"] == [len(received) // 8] * 8
    assert received == order


@pytest.mark.parametrize(
    ("batch_format", "kind"),
    [
        ("default", np.ndarray),
        ("numpy", np.ndarray),
        ("pandas", pd.Series),
        ("pyarrow", pa.ChunkedArray),
        (None, pa.ChunkedArray),
    ],
)
def test_batch_formats(stream, order, batch_format, kind):
    received = []
    for batch in stream.iter_batches(global_batch_size=64, batch_format=batch_format):
        assert isinstance(batch["id"], kind)
        received += batch["id"].to_pylist() if kind is pa.ChunkedArray else batch["id"].tolist()
    assert received == order


def test_torch_batches(stream, order):
    received = []
    for batch in stream.iter_torch_batches(global_batch_size=64, collate_fn=IdsAlone()):
        assert batch.dtype == torch.int64
        received += batch.tolist()
    assert received == order


def test_a_copy_of_an_iterator_stands_where_the_original_stood(stream, order):
    """As when Ray hands it to a worker."""
    take(stream, 2, batch_size=8)
    copy = pickle.loads(pickle.dumps(stream))
    assert rows(copy) == rows(stream) == order[16:]


def test_materialize_takes_what_is_left_and_moves_nothing(stream, order):
    take(stream, 2, batch_size=8)
    assert [row["id"] for row in stream.materialize().iter_rows()] == order[16:]
    assert rows(stream) == order[16:]


def test_an_error_in_the_loop_leaves_the_position_after_the_batch(stream, order):
    """What a trainer sees that catches an error and goes on."""

    def fail() -> None:
        for _ in stream.iter_batches(batch_size=8):
            raise RuntimeError("my own")

    with pytest.raises(RuntimeError, match="my own"):
        fail()
    assert stream.state_dict()["samples_consumed_per_split"] == [1] * 8
    assert rows(stream) == order[8:]


def test_insight(table, stream):
    """C70: schema and lengths are told without a plan; stats after an epoch are Ray's."""
    assert stream.schema().names == ["id", "label", "text", "vector"]
    assert "nothing has been read yet" in stream.stats()
    rows(stream)
    assert "ReadLanceStream" in stream.stats()
    assert "240" in stream.stats()
    assert "rank=0/1" in repr(stream)
    assert "epoch=1" in repr(stream)


# --- ends ------------------------------------------------------------------------------------------


def test_c30_all_ranks_get_equally_many_equal_batches(tmp_path):
    """C30: T(1001), S=8, W=4, B=7: the surplus row is dropped, every last batch has 5 rows."""
    dataset = lrs.read_stream(make_table(tmp_path, 1001), num_splits=8)
    streams = iterators(dataset, 4)
    assert {(s.rows_per_split, s.rows_per_epoch, s.dropped_rows) for s in streams} == {(125, 250, 1)}
    announced = {len(stream.iter_batches(batch_size=7)) for stream in streams}
    per_rank = [batches(stream, batch_size=7) for stream in streams]
    assert {tuple(map(len, received)) for received in per_rank} == {(7,) * 35 + (5,)}
    assert announced == {36}
    delivered = [i for received in per_rank for batch in received for i in batch]
    assert len(delivered) == len(set(delivered)) == 1000


@pytest.mark.parametrize("appends", [1, 4])
@pytest.mark.parametrize("num_rows", [8, 9])
def test_c31_as_many_rows_as_splits_are_enough(tmp_path, num_rows, appends):
    """C31: S and S + 1 rows, also in one fragment."""
    table = make_table(tmp_path, num_rows, appends=appends)
    per_rank = [rows(stream) for stream in iterators(lrs.read_stream(table, num_splits=8), 8)]
    assert [len(received) for received in per_rank] == [1] * 8
    assert len({received[0] for received in per_rank}) == 8


@pytest.mark.parametrize("num_rows", [0, 7])
def test_c31_fewer_rows_than_splits_are_refused(tmp_path, num_rows):
    """C31: with both numbers in the text, before there is a dataset."""
    table = make_table(tmp_path, num_rows)
    with pytest.raises(NotEnoughRowsError, match=f"has {num_rows} rows.*num_splits=8"):
        lrs.read_stream(table, num_splits=8)


def test_c31_a_filter_that_leaves_too_few_rows_is_refused_when_planning(table):
    """C31: both numbers in the text, whichever way the plan is asked for; no empty epoch."""
    dataset = lrs.read_stream(table, num_splits=8, filter="id < 3")
    asked = [
        lambda: lrs.plan_epoch(dataset),
        lambda: rows(iterator(dataset)),
        lambda: len(iterator(dataset).iter_batches(batch_size=1)),
        lambda: iterator(dataset).rows_per_epoch,
        lambda: rows(configured(dataset, 2)[1]),
    ]
    for ask in asked:
        with pytest.raises(NotEnoughRowsError, match=r"3 rows.*num_splits=8"):
            ask()


@pytest.mark.filterwarnings("ignore:Dataset 'train' has num_splits=None")
def test_c31_splits_from_the_world_size_need_rows_too(tmp_path):
    """C31: ``num_splits=None`` with more ranks than rows is refused, and is no epoch of zero steps."""
    dataset = lrs.read_stream(make_table(tmp_path, 3))
    with pytest.raises(NotEnoughRowsError, match=r"3 rows.*num_splits=8"):
        rows(iterators(dataset, 8)[0])


def test_without_num_splits_the_world_size_is_taken_with_a_warning(table):
    dataset = lrs.read_stream(table)
    with pytest.warns(UserWarning, match=r"num_splits=4.*for_world_sizes"):
        streams = iterators(dataset, 4)
    assert [rows(stream) for stream in streams] == [oracle(table, 4, rank=r, world_size=4) for r in range(4)]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 7, 50, 10**6])
def test_c32_the_announced_number_of_batches_is_the_number_seen(table, batch_size, drop_last):
    """C32, also after a stop in the middle; an epoch of zero steps is an error."""
    stream = iterators(lrs.read_stream(table, num_splits=8), 2)[1]
    if drop_last and batch_size > 120:
        with pytest.raises(LayoutError, match=r"zero steps.*120 rows"):
            stream.iter_batches(batch_size=batch_size, drop_last=drop_last)
        return
    eager = stream.iter_batches(batch_size=batch_size, drop_last=drop_last)
    announced = len(eager)
    sizes = [len(batch["id"]) for batch in eager]
    assert announced == len(sizes) > 0
    assert sum(sizes) == (120 - 120 % batch_size if drop_last else 120)
    assert stream.epoch == 1
    take(stream, 1, batch_size=13)
    rest = stream.iter_batches(batch_size=batch_size, drop_last=drop_last)
    announced = len(rest)
    assert announced == len(list(rest)) == (107 // batch_size if drop_last else -(-107 // batch_size))
    assert stream.epoch == 2


@pytest.mark.parametrize("filter", [None, "label < 3"])
def test_c33_the_stream_tells_its_rows(tmp_path, filter):
    """C33: rows after the filter, per split, dropped; the sums match what was delivered."""
    table = make_table(tmp_path, 1001)
    dataset = lrs.read_stream(table, num_splits=8, filter=filter)
    streams = iterators(dataset, 2)
    passing = table.count_rows(filter)
    delivered = sum(len(rows(stream)) for stream in streams)
    assert {stream.rows_per_split for stream in streams} == {passing // 8}
    assert sum(stream.rows_per_epoch for stream in streams) == delivered
    assert {delivered + stream.dropped_rows for stream in streams} == {passing}
    plan = lrs.plan_epoch(dataset)
    assert (plan.rows, plan.rows_per_split, plan.dropped_rows) == (passing, passing // 8, passing % 8)


def test_c54_batch_sizes_follow_from_the_world_size(tmp_path):
    """C54: S=12, G=24: B = 24/W by itself; W=5 and G=30 are refused with what works."""
    dataset = lrs.read_stream(make_table(tmp_path, 240), num_splits=12)
    for world_size in (1, 2, 3, 4, 6, 12):
        stream = iterators(dataset, world_size)[-1]
        assert stream.local_batch_size(24) == 24 // world_size
        assert len(take(stream, 1, global_batch_size=24)[0]) == 24 // world_size
    with pytest.raises(LayoutError, match=r"world_size=5.*1, 2, 3, 4, 6, 12"):
        lrs.StreamDataConfig().configure({"train": dataset}, 5)
    with pytest.raises(LayoutError, match=r"num_workers=4 .*1, 2, 3, 6"):
        lrs.StreamDataConfig(num_workers=4).configure({"train": dataset}, 2)
    with pytest.raises(LayoutError, match=r"global_batch_size=30 .*24, 36"):
        stream.iter_batches(global_batch_size=30)


# --- cost ------------------------------------------------------------------------------------------


def test_c20_state_dict_asks_nobody(table, monkeypatch):
    """C20, C53: 10,000 calls plan nothing, call nobody, and give a JSON whose size has nothing to do with rows."""
    calls = []

    class Counted(planner.LocalPlanner):
        def plan(self, spec: StreamSpec, epoch: int, splits: range) -> planner.PublishedPlan:
            calls.append(epoch)
            return super().plan(spec, epoch, splits)

    config = lrs.StreamDataConfig(prepare_next_epoch=False)
    stream = config.iterators("train", lrs.read_stream(table, num_splits=8), 1, planner=Counted())[0]
    take(stream, 1, batch_size=8)
    assert calls == [0]

    def forbidden(*args, **kwargs):
        raise AssertionError("state_dict() talks to Ray")

    for name in ("get", "put", "wait"):
        monkeypatch.setattr(f"ray.{name}", forbidden)
    states = [stream.state_dict() for _ in range(10_000)]
    monkeypatch.undo()
    assert calls == [0]
    assert states[0] == states[-1]
    assert len(json.dumps(states[0])) < 2_000


@pytest.mark.parametrize("num_rows", [1_000, 100_000])
def test_c20_the_state_does_not_grow_with_the_table(tmp_path, num_rows):
    """C20."""
    stream = iterator(lrs.read_stream(make_table(tmp_path, num_rows, columns=["id"]), num_splits=48))
    take(stream, 1, batch_size=48)
    assert len(json.dumps(stream.state_dict())) < 2_000


def test_c16_a_late_resume_reads_the_rest_alone(tmp_path, monkeypatch):
    """C16: at 95 % of T(200000): the rows that are fetched are the rest of the epoch."""
    monkeypatch.setattr(datasource, "MAX_WINDOW_ROWS", 4_096)
    make_table(tmp_path, 200_000, columns=["id"])
    recorded = RecordedTable(str(tmp_path), "rows")
    dataset = lrs.read_stream(recorded, num_splits=8)
    state = iterators(dataset, 2)[0].state_dict()
    state["samples_consumed_per_split"] = state["positions_consumed_per_split"] = [23_750] * 8
    streams = iterators(dataset, 4)
    for stream in streams:
        stream.load_state_dict(state)
    recorded.forget()
    received = [rows(stream, batch_size=500) for stream in streams]
    assert sum(map(len, received)) == 10_000
    assert recorded.rows_read() == 10_000
    recorded.forget()
    streams[0].load_state_dict(state)
    take(streams[0], 1, batch_size=100, prefetch_batches=0)
    assert recorded.rows_read() <= 2_500, "at most the rest of this rank"


def test_c70_one_scan_plans_for_all_ranks(table, monkeypatch):
    """C70: W=8: one plan per epoch, and none for lengths or the schema."""
    planned = count_plans(monkeypatch)
    streams = iterators(lrs.read_stream(table, num_splits=8), 8)
    for stream in streams:
        assert stream.rows_per_epoch == 30
        assert stream.schema().names[0] == "id"
        assert len(stream.iter_batches(batch_size=7)) == 5
    assert planned == []
    assert len({i for stream in streams for i in rows(stream)}) == 240
    assert planned == [0]


def test_a_version_that_was_cleaned_up_is_named(tmp_path):
    """G5: in the new process of a restart; the error says which version and how to keep it."""
    table = make_table(tmp_path, 240)
    ref = lrs.TableRef(str(tmp_path), "rows", version=3)
    assert len(rows(iterator(lrs.read_stream(ref, num_splits=8)))) == 120
    with pytest.warns(UserWarning, match="removes every version"):
        table.optimize(cleanup_older_than=timedelta(0), delete_unverified=True)
    # The handles of this process outlive the clean-up, and must not hide it.
    with pytest.raises(VersionNotFoundError, match=r"'rows'.*version 3"):
        lrs.read_stream(ref, num_splits=8)


@pytest.mark.parametrize("options", [{}, {"filter": "label < 5"}, {"shuffle_algorithm": "indexed"}], ids=str)
def test_a_version_that_is_cleaned_up_during_a_run_is_named_at_the_next_read(tmp_path, options):
    """G5: planning processes and readers have it open; no row is left out, no epoch is short."""
    table = make_table(tmp_path, 240)
    stream = iterator(lrs.read_stream(table, num_splits=8, **options))
    num_rows = len(rows(stream))
    written_anew = lancedb.connect(tmp_path).create_table("rows", make_rows(0, 300), mode="overwrite")
    with pytest.warns(UserWarning, match="removes every version"):
        written_anew.optimize(cleanup_older_than=timedelta(0), delete_unverified=True)
    with pytest.raises((VersionNotFoundError, MissingRowsError), match=r"'rows'.*version 5.*clean"):
        rows(stream)
    assert stream.epoch == 1
    assert stream.rows_per_epoch == num_rows


# --- one position, one loop ------------------------------------------------------------------------


def test_a_loop_that_another_one_ended_says_so(stream, order):
    """Not a silent end, which would look like the end of the epoch (G7)."""
    outer = iter(stream.iter_batches(batch_size=16))
    first = list(next(outer)["id"])
    peek = list(next(iter(stream.iter_batches(batch_size=16)))["id"])
    assert first + peek == order[:32]
    with pytest.raises(StreamUsageError, match=r"'train' was ended by another one.*only one loop"):
        next(outer)
    assert rows(stream) == order[32:]


def test_an_iteration_that_came_to_its_end_stays_ended(stream):
    done = iter(stream.iter_batches(batch_size=240))
    assert len(list(done)) == 1
    assert len(list(stream.iter_batches(batch_size=240))) == 1
    assert next(done, None) is None


def test_an_epoch_that_the_seed_does_not_reach_is_refused_at_once(table, stream):
    for late in (10**18, 2**64):
        with pytest.raises(InvalidArgumentError, match=r"epoch must be at least 0 and at most \d+"):
            stream.set_epoch(late)
        with pytest.raises(InvalidArgumentError, match=r"epoch must be at least 0 and at most \d+"):
            lrs.read_stream(table, num_splits=4, epoch=late)
