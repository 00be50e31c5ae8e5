"""The user's transforms: which keep the order, which are refused, and what their mistakes look like."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import ray
from ray.data import ActorPoolStrategy, DataContext, TaskPoolStrategy
from ray.data.expressions import col

import lance_ray_stream as lrs
from lance_ray_stream import datasource, feed
from lance_ray_stream.errors import InvalidArgumentError, RowCountChangedError, UnsupportedOperatorError
from lance_ray_stream.ray_internals import operators
from lance_ray_stream.transforms import rebase, stream_of
from tests.probes import iterator, iterators, oracle, rows
from tests.tables import make_table
from tests.user_functions import (
    AsyncDoubler,
    AsyncDropper,
    AsyncGeneratorDropper,
    AsyncHalvingDoubler,
    CallableObject,
    Doubler,
    Dropper,
    Failing,
    HalvingDoubler,
    OwnError,
    add_a_row,
    arrow_double,
    double,
    drop_a_row,
    drop_a_row_of_halves,
    fail,
    in_halves,
    pandas_double,
    repeat_halves,
    times,
    yield_nothing,
)

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return make_table(tmp_path_factory.mktemp("db"), 240)


@pytest.fixture
def dataset(table, monkeypatch):
    """T(240), S=8, read in many windows."""
    monkeypatch.setattr(feed, "FIRST_WINDOW_ROWS", 8)
    monkeypatch.setattr(datasource, "MAX_WINDOW_ROWS", 32)
    return lrs.read_stream(table, num_splits=8, columns=["id", "label"])


KEEPING = {
    "function": lambda ds: ds.map_batches(double),
    "small batches": lambda ds: ds.map_batches(double, batch_size=5),
    "whole blocks": lambda ds: ds.map_batches(double, batch_size=None),
    "lambda": lambda ds: ds.map_batches(lambda batch: double(batch), batch_size=9),
    "arrow": lambda ds: ds.map_batches(arrow_double, batch_format="pyarrow", zero_copy_batch=True),
    "pandas": lambda ds: ds.map_batches(pandas_double, batch_format="pandas", batch_size=7),
    "generator": lambda ds: ds.map_batches(in_halves, batch_size=10),
    "partial": lambda ds: ds.map_batches(functools.partial(times, factor=2)),
    "fn_args": lambda ds: ds.map_batches(times, fn_args=[2], fn_kwargs={"name": "twice"}),
    "callable object": lambda ds: ds.map_batches(CallableObject()),
    "class": lambda ds: ds.map_batches(Doubler, concurrency=(1, 2), batch_size=10),
    "class with arguments": lambda ds: ds.map_batches(Doubler, concurrency=1, fn_constructor_kwargs={"factor": 2}),
    "generator class": lambda ds: ds.map_batches(HalvingDoubler, concurrency=1, batch_size=10),
    "async class": lambda ds: ds.map_batches(AsyncDoubler, concurrency=1, batch_size=5),
    "async generator class": lambda ds: ds.map_batches(AsyncHalvingDoubler, concurrency=1, batch_size=10),
    "map": lambda ds: ds.map(lambda row: row | {"twice": row["id"] * 2}),
    "add_column": lambda ds: ds.add_column("twice", lambda batch: batch["id"] * 2),
    "with_column": lambda ds: ds.with_column("twice", col("id") * 2),
    "select": lambda ds: ds.map_batches(double).select_columns(["twice", "id"]),
    "drop": lambda ds: ds.drop_columns(["label"]).map_batches(double),
    "rename": lambda ds: ds.rename_columns({"id": "key"}).map(lambda row: {"id": row["key"], "twice": 2 * row["key"]}),
    "two pools": lambda ds: ds.map_batches(double, concurrency=2).map_batches(lambda b: b, num_cpus=0.5),
}


@pytest.mark.parametrize("transform", KEEPING)
def test_transforms_that_keep_the_order(table, dataset, transform):
    """G1, G3: the ids come in LanceDB's order, with what the transform made of the same row beside them."""
    stream = iterators(KEEPING[transform](dataset), 2)[1]
    received = list(stream.iter_batches(global_batch_size=16))
    assert [int(i) for batch in received for i in batch["id"]] == oracle(table, 8, rank=1, world_size=2)
    assert all(np.array_equal(batch["twice"], batch["id"] * 2) for batch in received)
    assert [len(batch["id"]) for batch in received] == [8] * 15


def test_names_of_operators_are_the_users(dataset):
    """In Ray's progress and statistics, transforms are called what their functions are called."""
    mapped = (
        dataset.map_batches(double).map_batches(Doubler, concurrency=1).map_batches(functools.partial(times, factor=3))
    )
    before = [operator.name for operator in operators(mapped)]
    stream = iterator(mapped)
    rows(stream)
    for name in ("MapBatches(double)", "MapBatches(Doubler)"):
        assert any(name in operator for operator in before)
        assert name in stream.stats()


CHANGING = {
    "add_a_row": (add_a_row, {}),
    "drop_a_row": (drop_a_row, {}),
    "drop_a_row_of_halves": (drop_a_row_of_halves, {}),
    "repeat_halves": (repeat_halves, {}),
    "yield_nothing": (yield_nothing, {}),
    "Dropper": (Dropper, {"concurrency": 1}),
    "AsyncDropper": (AsyncDropper, {"concurrency": 1}),
    "AsyncGeneratorDropper": (AsyncGeneratorDropper, {"concurrency": 1}),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_transform_that_changes_the_number_of_rows(dataset, name):
    """G6, G7: the error says which operator, what it was given and what it returned."""
    fn, options = CHANGING[name]
    stream = iterator(dataset.map_batches(fn, batch_size=8, **options))
    with pytest.raises(RowCountChangedError, match=rf"MapBatches\({name}\).*given a batch of 8 rows and returned \d+"):
        rows(stream)


@pytest.mark.parametrize(
    "transform",
    [
        lambda ds: ds.map_batches(fail),
        lambda ds: ds.map_batches(Failing, concurrency=1),
        lambda ds: ds.map(lambda row: fail({"id": [row["id"]]})),
    ],
    ids=["function", "class", "map"],
)
def test_the_users_own_error_surfaces_as_itself(dataset, transform):
    stream = iterator(transform(dataset))
    with pytest.raises(OwnError, match="cannot decode row"):
        rows(stream)
    assert stream.state_dict()["samples_consumed_per_split"] == [0] * 8


def test_a_transform_that_returns_nothing_is_rays_error_or_ours(dataset):
    """A forgotten ``return``: an error that names the transform, not an empty epoch."""
    stream = iterator(dataset.map_batches(lambda batch: None))
    with pytest.raises(Exception, match=r"MapBatches|None"):
        rows(stream)


REFUSED = {
    "Filter": lambda ds: ds.filter(lambda row: row["id"] > 3),
    "FlatMap": lambda ds: ds.flat_map(lambda row: [row, row]),
    "limit=10": lambda ds: ds.limit(10),
    "Sort": lambda ds: ds.sort("id"),
    "RandomShuffle": lambda ds: ds.random_shuffle(),
    "Repartition": lambda ds: ds.repartition(3),
    "RandomizeBlockOrder": lambda ds: ds.randomize_block_order(),
    "Aggregate": lambda ds: ds.groupby("label").count(),
}


@pytest.mark.parametrize("operator", REFUSED)
def test_operators_that_cannot_keep_rows_in_order_are_refused(dataset, operator):
    """G7: when the iterators are made, by name and with the way out; also under other transforms."""
    refused = REFUSED[operator](dataset)
    for stream in (refused, refused.map_batches(double)):
        with pytest.raises(UnsupportedOperatorError, match=rf"'train' uses .*{operator}.*read_stream\(filter="):
            lrs.StreamDataConfig().configure({"train": stream}, 2)


@pytest.mark.parametrize(
    "mix",
    [
        lambda ds: ds.union(ds),
        lambda ds: ds.union(ray.data.range(10)),
        lambda ds: ds.zip(ray.data.range(240)),
    ],
    ids=["union of streams", "union with another", "zip with another"],
)
@pytest.mark.filterwarnings("ignore:This API is deprecated")  # Ray's, of zip
def test_a_stream_that_is_mixed_with_other_sources_is_refused(dataset, mix):
    with pytest.raises((UnsupportedOperatorError, InvalidArgumentError), match=r"Union|Zip"):
        lrs.StreamDataConfig().configure({"train": mix(dataset)}, 2)


def test_a_materialized_stream_is_an_ordinary_dataset(dataset):
    """Its plan is gone: Ray deals it out as it deals out any other; as a stream it is refused."""
    kept = dataset.materialize()
    shards = lrs.StreamDataConfig().configure({"train": kept}, 1)
    assert not isinstance(shards[0]["train"], lrs.StreamIterator)
    with pytest.raises(InvalidArgumentError, match=r"read_stream"):
        lrs.plan_epoch(kept)


@pytest.mark.parametrize(
    ("compute", "world_size", "share"),
    [
        (ActorPoolStrategy(min_size=4, max_size=8), 2, (2, 4, 2)),
        (ActorPoolStrategy(min_size=1, max_size=2), 4, (1, 1, 1)),
        (ActorPoolStrategy(min_size=2, max_size=8, initial_size=6), 2, (1, 4, 3)),
        (ActorPoolStrategy(min_size=3), 2, (1, float("inf"), 1)),
        (ActorPoolStrategy(size=8), 8, (1, 1, 1)),
        (TaskPoolStrategy(size=6), 4, 1),
        (TaskPoolStrategy(size=8), 4, 2),
        (TaskPoolStrategy(), 4, None),
        (ActorPoolStrategy(min_size=4, max_size=8), 1, (4, 8, 4)),
    ],
    ids=str,
)
def test_concurrency_is_shared_among_ranks(dataset, compute, world_size, share):
    """Section 6: pools are for the job; each rank gets its share, at least one. The user's dataset is unchanged."""
    fn = Doubler if isinstance(compute, ActorPoolStrategy) else double
    mapped = dataset.map_batches(fn, compute=compute)
    context = DataContext.get_current()
    rebuilt = rebase(mapped, stream_of(mapped), world_size=world_size, options=context.execution_options)
    assert [_pool(operator) for operator in operators(rebuilt)[1:]] == [share]
    assert _pool(operators(mapped)[-1]) == _pool_of(compute)


def _pool(operator):
    return _pool_of(operator.compute)


def _pool_of(compute):
    if isinstance(compute, TaskPoolStrategy):
        return compute.size
    return compute.min_size, compute.max_size, compute.initial_size


def test_the_concurrency_of_reads_is_shared_too(table):
    dataset = lrs.read_stream(table, num_splits=8, concurrency=6, num_cpus=0.5)
    rebuilt = rebase(dataset, stream_of(dataset), world_size=4, options=DataContext.get_current().execution_options)
    assert _pool(operators(rebuilt)[0]) == 1
    assert rows(iterator(dataset)) == oracle(table, 8)


def test_two_streams_and_a_plain_dataset_side_by_side(table, dataset, tmp_path):
    """Each has its own position; interleaved steps do not disturb each other."""
    other = make_table(tmp_path, 64)
    datasets = {
        "train": dataset.map_batches(double),
        "eval": lrs.read_stream(other, num_splits=4),
        "plain": ray.data.range(20),
    }
    shards = lrs.StreamDataConfig().configure(datasets, 1)[0]
    assert set(shards) == set(datasets)
    stream, other_stream = shards["train"], shards["eval"]
    assert isinstance(stream, lrs.StreamIterator)
    steps = zip(stream.iter_batches(batch_size=16), other_stream.iter_batches(batch_size=16), strict=False)
    pairs = [(batch["id"].tolist(), other_batch["id"].tolist()) for batch, other_batch in itertools.islice(steps, 4)]
    del steps
    assert [i for ids, _ in pairs for i in ids] == oracle(table, 8)[:64]
    assert [i for _, ids in pairs for i in ids] == oracle(other, 4)
    assert sum(len(batch["id"]) for batch in shards["plain"].iter_batches(batch_size=8)) == 20
    assert rows(stream, batch_size=50) == oracle(table, 8)[64:]


def test_a_block_that_fails_is_never_left_out(dataset, monkeypatch):
    """G1, G4: DataContext.max_errored_blocks would drop its rows and move all that follow."""
    monkeypatch.setattr(DataContext.get_current(), "max_errored_blocks", -1)
    broken = dataset.map_batches(fail, batch_size=8)
    monkeypatch.setattr(broken.context, "max_errored_blocks", -1)
    stream = lrs.StreamDataConfig(progress=False).configure({"train": broken}, 1)[0]["train"]
    with pytest.raises(OwnError):
        list(stream.iter_batches(batch_size=16))
