"""G8: a key that a ``connection_factory`` takes from the environment is in nothing that leaves the process."""

from __future__ import annotations

import json
import logging
import pickle
import traceback

import lancedb
import pytest
import ray
from ray.data import DataContext

import lance_ray_stream as lrs
from lance_ray_stream.errors import TableNotFoundError
from lance_ray_stream.table import _open_tables
from lance_ray_stream.transforms import stream_of
from tests.probes import iterator
from tests.tables import make_table
from tests.user_functions import open_with_key

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster"), pytest.mark.timeout(240)]
SECRET = "SECRET123"


@pytest.fixture
def ref(tmp_path, monkeypatch) -> lrs.TableRef:
    make_table(tmp_path, 24)
    monkeypatch.setenv("LRS_TEST_API_KEY", SECRET)
    monkeypatch.setenv("LRS_TEST_PLACE", str(tmp_path))
    return lrs.TableRef(f"s3://user:{SECRET}@bucket/data?key={SECRET}", "rows", connection_factory=open_with_key)


def test_c43_a_key_of_a_factory_goes_nowhere(ref, caplog):
    """C43: pickled tasks, iterators and references, states, reprs and logs; the rows arrive all the same."""
    caplog.set_level(logging.DEBUG)
    dataset = lrs.read_stream(ref, num_splits=4)
    tasks = stream_of(dataset).get_read_tasks(1, data_context=DataContext.get_current())
    rows = [i for task in tasks for block in task() for i in block["id"].to_pylist()]
    assert sorted(rows) == list(range(24))

    stream = iterator(dataset)
    windows = stream._feed.rest_of_epoch(stream._progress.spec, stream._progress.begin_reading(), stream._cursor)
    stream.load_state_dict(stream.state_dict())
    source = stream_of(windows)
    window_tasks = source.get_read_tasks(1, data_context=DataContext.get_current())
    assert sum(block.num_rows for task in window_tasks for block in task()) == 24

    pickles = [*map(ray.cloudpickle.dumps, [*tasks, *window_tasks, source.spec, stream]), pickle.dumps(ref)]
    texts = [repr(ref), repr(dataset), repr(stream), repr(source.spec), json.dumps(stream.state_dict()), caplog.text]
    texts += [
        repr(lrs.plan_epoch(dataset)),
        stream.stats(),
        str(stream.schema()),
        repr(stream.iter_batches(batch_size=1)),
    ]
    assert not [pickled for pickled in pickles if SECRET.encode() in pickled]
    assert not [text for text in texts if SECRET in text]
    again = pickle.loads(pickle.dumps(ref))
    assert (again.pin().version, again.identity()) == (ref.pin().version, ref.identity())


def test_c43_what_a_factory_says_is_withheld(ref, monkeypatch):
    """C43: its error may quote the key: in the process that asks, and in a read task of a worker."""
    dataset = lrs.read_stream(ref, num_splits=4)
    lrs.plan_epoch(dataset)
    monkeypatch.setenv("LRS_TEST_REFUSED", "yes")
    _open_tables._reset()
    failing = [lambda: lrs.read_stream(ref, num_splits=4), lambda: lrs.plan_epoch(dataset)]
    for fail in failing:
        with pytest.raises(TableNotFoundError, match=r"connection_factory raised PermissionError") as caught:
            fail()
        assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_c43_a_worker_without_the_key_does_not_tell_it(ref):
    """C43: workers have no such variable here; what their read tasks raise names the table and not the key."""
    stream = iterator(lrs.read_stream(ref, num_splits=4))
    with pytest.raises(TableNotFoundError, match=r"'rows'.*PermissionError") as caught:
        next(iter(stream.iter_batches(batch_size=4)))
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_c43_a_memory_table_is_refused():
    """C43: it exists in one process alone; the error says what to do."""
    table = lancedb.connect("memory://").create_table("rows", [{"id": 1}, {"id": 2}])
    with pytest.raises(ValueError, match=r"memory:// .*write the table to a directory"):
        lrs.read_stream(table, num_splits=1)
