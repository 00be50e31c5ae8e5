"""Bad input gets a clear error before anything is read: every argument of every public function."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import ray

import lance_ray_stream as lrs
from lance_ray_stream.errors import (
    InvalidArgumentError,
    LayoutError,
    NotEnoughRowsError,
    StateError,
    StreamUsageError,
    TableNotFoundError,
    UnsupportedColumnError,
    VersionNotFoundError,
)
from tests.probes import RecordedTable, count_plans, iterator
from tests.tables import make_table

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(240)]
NOT_POSITIVE: list[Any] = [0, -1, 2.0, "8", True, [8], float("nan"), np.float32(4)]
NOT_NATURAL: list[Any] = [-1, 0.5, "0", False, [0], float("inf")]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("db")
    make_table(path, 240)
    return path


@pytest.fixture
def table(path):
    """A table whose rows nobody has read when the test ends."""
    recorded = RecordedTable(str(path), "rows")
    recorded.forget()
    yield recorded
    assert list(recorded.reads()) == [], "something was read"


@pytest.fixture
def stream(table):
    return iterator(lrs.read_stream(table, num_splits=8))


def cases(**arguments: list[Any]) -> list[Any]:
    """One parameter set per bad value: (name, value)."""
    return [pytest.param(name, value, id=f"{name}={value!r}") for name, values in arguments.items() for value in values]


# --- read_stream -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    cases(
        num_splits=NOT_POSITIVE,
        shuffle=[None, 1, "yes", 0],
        shuffle_seed=[*NOT_NATURAL, 2**63],
        shuffle_clump_size=[*NOT_POSITIVE, 2**40],
        epoch=[None, *NOT_NATURAL],
        columns=["id", [], [1], ["id", "id"], ["nope"], ["vector.item"], 7, ["ID"], [None]],
        filter=["", "  ", 7, ["label = 1"], "label =", "nope > 3", "label = 1; DROP TABLE rows", "random() < 0.5"],
        shuffle_algorithm=[None, "", "random", 3],
    ),
)
def test_read_stream(table, name, value):
    """The error names the argument, and the table is not read."""
    with pytest.raises(InvalidArgumentError, match=name.rstrip("s")):
        lrs.read_stream(table, **{"num_splits": 8, name: value})


@pytest.mark.parametrize(
    ("name", "value"), cases(num_cpus=[-1, "two", True, float("nan")], concurrency=[0, 1.5, "many"])
)
def test_read_stream_resources(table, name, value):
    with pytest.raises(InvalidArgumentError, match=f"{name} must be"):
        lrs.read_stream(table, **{"num_splits": 8, name: value})


def test_read_stream_more_splits_than_rows(table):
    for num_splits in (241, 10**9):
        with pytest.raises(NotEnoughRowsError, match=rf"240 rows.*num_splits={num_splits}; use .*240"):
            lrs.read_stream(table, num_splits=num_splits)


@pytest.mark.parametrize("value", [None, 7, "rows", {"uri": "x"}, np.zeros(3), ray.data.Dataset, lrs])
def test_read_stream_something_that_is_no_table(value):
    with pytest.raises(InvalidArgumentError, match=r"TableRef\(uri, name\)"):
        lrs.read_stream(value, num_splits=8)


def test_read_stream_a_close_name_is_suggested(table):
    with pytest.raises(InvalidArgumentError, match=r"no column 'lable'; did you mean 'label'"):
        lrs.read_stream(table, num_splits=8, columns=["id", "lable"])


def test_read_stream_a_table_that_is_not_there(path, tmp_path):
    """Nothing is created by asking."""
    with pytest.raises(TableNotFoundError, match="'nope'"):
        lrs.read_stream(lrs.TableRef(str(path), "nope"), num_splits=8)
    missing = tmp_path / "missing"
    with pytest.raises(TableNotFoundError, match="no directory"):
        lrs.read_stream(lrs.TableRef(str(missing), "rows"), num_splits=8)
    assert not missing.exists()


@pytest.mark.parametrize("version", [99, 2**62, "untagged"])
def test_read_stream_a_version_that_is_not_there(path, version):
    with pytest.raises(VersionNotFoundError, match=rf"no version {version!r}.*(exist|Tags)"):
        lrs.read_stream(lrs.TableRef(str(path), "rows", version=version), num_splits=8)


@pytest.mark.parametrize(
    ("name", "value"),
    cases(
        uri=["", None, 7, "memory://", "db://mine"],
        name=["", None, 7],
        version=[0, -1, 1.5, True, "", [1]],
        storage_options=["key", {"key": 1}, {1: "key"}, ["key"]],
        namespace_path=["a", [1], [""], 7],
        connection_factory=["open", 7],
    ),
)
def test_table_ref(name, value):
    arguments = {"uri": "somewhere", "name": "rows", name: value}
    with pytest.raises(InvalidArgumentError, match="memory|remote|" + name):
        lrs.TableRef(arguments.pop("uri"), arguments.pop("name"), **arguments)


# --- StreamDataConfig ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", NOT_POSITIVE)
def test_data_config_num_workers(value):
    with pytest.raises(InvalidArgumentError, match="num_workers must be"):
        lrs.StreamDataConfig(num_workers=value)


@pytest.mark.parametrize("value", [*NOT_POSITIVE, None])
def test_configure_world_size(table, value):
    dataset = lrs.read_stream(table, num_splits=8)
    with pytest.raises(InvalidArgumentError, match="world_size must be"):
        lrs.StreamDataConfig().configure({"train": dataset}, value)


@pytest.mark.parametrize(("num_workers", "world_size"), [(1, 3), (1, 16), (3, 1), (2, 8), (16, 1), (1, 10**9)])
def test_configure_illegal_numbers(table, num_workers, world_size):
    dataset = lrs.read_stream(table, num_splits=8)
    with pytest.raises(LayoutError, match=r"num_splits=8.*that work"):
        lrs.StreamDataConfig(num_workers=num_workers).configure({"train": dataset}, world_size)


# --- StreamIterator --------------------------------------------------------------------------------

# With what each needs besides the arguments under test: the table has a column that no tensor holds.
ITERATIONS: dict[str, Any] = {"iter_batches": {}, "iter_torch_batches": {"collate_fn": dict}}


@pytest.mark.parametrize("method", ITERATIONS)
@pytest.mark.parametrize(
    "options", [{}, {"batch_size": 8, "global_batch_size": 8}, {"batch_size": None, "global_batch_size": None}]
)
def test_one_batch_size_is_needed(stream, method, options):
    with pytest.raises(InvalidArgumentError, match=r"Give one of global_batch_size .* and batch_size"):
        getattr(stream, method)(**options, **ITERATIONS[method])


@pytest.mark.parametrize("method", ITERATIONS)
@pytest.mark.parametrize(
    ("name", "value"),
    cases(
        batch_size=NOT_POSITIVE,
        global_batch_size=NOT_POSITIVE,
        prefetch_batches=[None, *NOT_NATURAL],
        drop_last=[None, 1, "yes"],
        local_shuffle_buffer_size=[0, 10],
        local_shuffle_seed=[0, 3],
    ),
)
def test_iterations(stream, method, name, value):
    options = {name: value} if "batch_size" in name else {"batch_size": 8, name: value}
    with pytest.raises(InvalidArgumentError, match=name):
        getattr(stream, method)(**options, **ITERATIONS[method])


@pytest.mark.parametrize("method", ITERATIONS)
def test_an_unknown_option_of_an_iteration(stream, method):
    with pytest.raises(TypeError, match="shuffle_rows"):
        getattr(stream, method)(batch_size=8, shuffle_rows=True, **ITERATIONS[method])


def test_an_unknown_batch_format(stream):
    with pytest.raises(ValueError, match=r"batch_format|batch format"):
        list(stream.iter_batches(batch_size=8, batch_format="feather"))


@pytest.mark.parametrize("size", [4, 12, 30, 100])
def test_global_batch_sizes_that_are_no_whole_cycles(stream, size):
    with pytest.raises(LayoutError, match=rf"global_batch_size={size} .*num_splits=8.*sizes that work: "):
        stream.local_batch_size(size)
    with pytest.raises(LayoutError, match=rf"global_batch_size={size} "):
        stream.iter_batches(global_batch_size=size)


@pytest.mark.parametrize("value", NOT_POSITIVE)
def test_local_batch_size(stream, value):
    with pytest.raises(InvalidArgumentError, match="global_batch_size"):
        stream.local_batch_size(value)


def test_columns_that_are_no_tensors_are_refused_before_the_first_step(stream):
    """C60."""
    with pytest.raises(UnsupportedColumnError, match=r"'text' \(string\)"):
        stream.iter_torch_batches(batch_size=8)
    with pytest.raises(InvalidArgumentError, match=r"dtypes"):
        stream.iter_torch_batches(batch_size=8, dtypes="float32")


@pytest.mark.parametrize("value", [None, *NOT_NATURAL])
def test_set_epoch(stream, value):
    with pytest.raises(InvalidArgumentError, match="epoch must be"):
        stream.set_epoch(value)
    assert stream.epoch == 0


def test_an_epoch_beyond_the_seeds_of_lancedb(stream, monkeypatch):
    """The seed of an epoch has 64 bits."""
    planned = count_plans(monkeypatch)
    with pytest.raises(InvalidArgumentError, match="epoch must be at least 0 and at most"):
        stream.set_epoch(2**60)
    assert planned == []


@pytest.mark.parametrize("state", [None, [], "state", 7, {}, {"epoch": 0}, b"{}", {"num_splits": 8}])
def test_load_state_dict(stream, state):
    with pytest.raises(StateError, match=r"state"):
        stream.load_state_dict(state)


# --- the rest --------------------------------------------------------------------------------------


@pytest.mark.parametrize("states", [None, [], {}, "states", [None], [{}], 7, [{"num_splits": 8}]])
def test_merge_state_dicts(states):
    with pytest.raises(StateError, match="state"):
        lrs.merge_state_dicts(states)


@pytest.mark.parametrize("name", ["train", "", None, 7])
def test_get_stream_outside_of_training(name):
    with pytest.raises(StreamUsageError, match="training function"):
        lrs.get_stream(name)


@pytest.mark.parametrize("value", NOT_NATURAL)
def test_plan_epoch(table, value):
    with pytest.raises(InvalidArgumentError, match="epoch must be"):
        lrs.plan_epoch(lrs.read_stream(table, num_splits=8), epoch=value)


@pytest.mark.parametrize("value", [None, 7, "rows"])
def test_plan_epoch_of_something_else(value):
    with pytest.raises(InvalidArgumentError, match=r"read_stream"):
        lrs.plan_epoch(value)


def test_plan_epoch_of_another_dataset():
    with pytest.raises(InvalidArgumentError, match=r"read_stream"):
        lrs.plan_epoch(ray.data.range(8))


LAYOUT_CALLS: dict[str, Any] = {
    "num_splits": lambda value: lrs.SplitLayout(value),
    "world_size": lambda value: lrs.SplitLayout(8).check(value),
    "num_workers": lambda value: lrs.SplitLayout(8).check(1, value),
    "global_batch_size": lambda value: lrs.SplitLayout(8).check(1, 1, value),
    "world_sizes": lambda value: lrs.SplitLayout.for_world_sizes([value]),
    "up_to": lambda value: lrs.SplitLayout(8).world_sizes(up_to=value),
}


@pytest.mark.parametrize("name", LAYOUT_CALLS)
@pytest.mark.parametrize("value", NOT_POSITIVE)
def test_split_layout(name, value):
    with pytest.raises(InvalidArgumentError, match=f"{name} must be"):
        LAYOUT_CALLS[name](value)


@pytest.mark.parametrize(
    "call",
    [
        lambda layout: layout.splits_of(2, 2),
        lambda layout: layout.splits_of(-1, 2),
        lambda layout: layout.splits_of("0", 2),
        lambda layout: layout.splits_of(0, 2, worker=2, num_workers=2),
        lambda layout: layout.rows_of_step(-1, 8),
        lambda layout: layout.rows_of_step(0, 8, rank=3, world_size=2),
        lambda layout: lrs.SplitLayout.for_world_sizes([]),
        lambda layout: lrs.SplitLayout.for_world_sizes(8),  # type: ignore[arg-type]
    ],
)
def test_split_layout_places(call):
    with pytest.raises(InvalidArgumentError, match=r"rank|worker|step|world_sizes"):
        call(lrs.SplitLayout(8))


@pytest.mark.parametrize("value", NOT_NATURAL)
def test_epoch_plan(table, value):
    plan = lrs.plan_epoch(lrs.read_stream(table, num_splits=8))
    with pytest.raises(InvalidArgumentError, match="split"):
        plan.row_ids(value)
    with pytest.raises(InvalidArgumentError, match="step"):
        plan.row_ids_of_step(value, 8)
    with pytest.raises((InvalidArgumentError, LayoutError), match="no split 8"):
        plan.row_ids(8)
    with pytest.raises(InvalidArgumentError, match="no step 30"):
        plan.row_ids_of_step(30, 8)
