"""The next epoch begins before the present one has ended: same rows, no gap, and nothing left when it never comes."""

from __future__ import annotations

import gc
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

import lance_ray_stream as lrs
from lance_ray_stream import datasource, next_epoch, planner, reading
from lance_ray_stream.epoch_plan import EpochPlan
from lance_ray_stream.next_epoch import NextEpoch
from lance_ray_stream.plan import build_plan
from lance_ray_stream.ray_internals import Execution
from lance_ray_stream.spec import StreamSpec, make_spec
from tests import train_loops
from tests.probes import batches, iterator, oracle, rows
from tests.tables import make_table

SOON_S = 20.0


def soon(condition: Callable[[], object]) -> bool:
    """Whether ``condition`` becomes true."""
    end = time.monotonic() + SOON_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())


class Job:
    """Something to begin, which can be held up."""

    def __init__(self, *, hold: bool = False) -> None:
        self.may_begin = threading.Event()
        self.stopped = threading.Event()
        if not hold:
            self.may_begin.set()

    def begin(self) -> Job:
        self.may_begin.wait(SOON_S)
        return self

    def stop(self) -> None:
        assert not self.stopped.is_set(), "once"
        self.stopped.set()


# --- What is prepared is taken or stopped ----------------------------------------------------------


def test_what_was_begun_is_taken_once() -> None:
    job, ahead = Job(hold=True), NextEpoch[Job]()
    ahead.prepare(3, job.begin)
    threading.Timer(0.05, job.may_begin.set).start()
    assert ahead.take(3) is job, "waits until it is begun"
    assert ahead.take(3) is None
    assert not job.stopped.is_set()


def test_only_one_epoch_is_prepared() -> None:
    first, second, ahead = Job(), Job(), NextEpoch[Job]()
    ahead.prepare(3, first.begin)
    ahead.prepare(3, second.begin)
    assert ahead.take(3) is first


def test_another_epoch_is_stopped() -> None:
    job, ahead = Job(), NextEpoch[Job]()
    ahead.prepare(3, job.begin)
    assert ahead.take(4) is None
    assert job.stopped.wait(SOON_S)


def test_what_is_dropped_while_it_begins_is_stopped_when_it_has() -> None:
    job, ahead = Job(hold=True), NextEpoch[Job]()
    ahead.prepare(3, job.begin)
    ahead.drop()
    assert not job.stopped.is_set()
    job.may_begin.set()
    assert job.stopped.wait(SOON_S)
    assert ahead.take(3) is None


def test_an_error_is_raised_to_the_one_who_takes() -> None:
    def fail() -> Job:
        raise RuntimeError("no such table")

    ahead = NextEpoch[Job]()
    ahead.prepare(3, fail)
    with pytest.raises(RuntimeError, match="no such table"):
        ahead.take(3)
    assert ahead.take(3) is None


def test_an_epoch_that_never_comes_is_stopped_after_a_while(monkeypatch) -> None:
    monkeypatch.setattr(next_epoch, "KEPT_S", 0.05)
    job, ahead = Job(), NextEpoch[Job]()
    ahead.prepare(3, job.begin)
    ahead.keep_for_a_while()
    assert job.stopped.wait(SOON_S)
    assert ahead.take(3) is None


def test_what_is_taken_in_time_is_not_stopped(monkeypatch) -> None:
    monkeypatch.setattr(next_epoch, "KEPT_S", 0.2)
    job, ahead = Job(), NextEpoch[Job]()
    ahead.prepare(3, job.begin)
    ahead.keep_for_a_while()
    assert ahead.take(3) is job
    assert not job.stopped.wait(0.4)


def test_it_ends_with_its_owner_and_stays_in_its_process() -> None:
    job, ahead = Job(), NextEpoch[Job]()
    ahead.prepare(3, job.begin)
    copy = pickle.loads(pickle.dumps(ahead))
    assert copy.take(3) is None
    del ahead
    gc.collect()
    assert job.stopped.wait(SOON_S)


# --- Plans -----------------------------------------------------------------------------------------


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_plan_that_is_there_does_not_wait_for_one_that_is_being_built(tmp_path, monkeypatch) -> None:
    spec = make_spec(make_table(tmp_path, 48), num_splits=4)
    plans = planner.LocalPlanner()
    ready = plans.plan(spec, 0, range(4))
    building, may_end = threading.Event(), threading.Event()

    def slow(spec: StreamSpec, epoch: int) -> EpochPlan:
        building.set()
        may_end.wait(SOON_S)
        return build_plan(spec, epoch)

    monkeypatch.setattr(planner, "build_plan", slow)
    both = [threading.Thread(target=plans.plan, args=(spec, 1, range(4))) for _ in range(2)]
    for thread in both:
        thread.start()
    assert building.wait(SOON_S)
    assert plans.plan(spec, 0, range(4)) == ready
    building.clear()
    may_end.set()
    for thread in both:
        thread.join()
    assert not building.is_set(), "the second one found the plan of the first"


# --- Reading ---------------------------------------------------------------------------------------


class Begun:
    """The executions that this process begins, and in which thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.all: list[Execution] = []
        self.ahead: list[Execution] = []
        begun = self

        class Recorded(Execution):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                begun.all.append(self)
                if threading.current_thread().name == "lance_ray_stream next epoch":
                    begun.ahead.append(self)

        monkeypatch.setattr(reading, "Execution", Recorded)

    def alive(self) -> list[Execution]:
        return [execution for execution in self.all if execution.executor.is_alive()]


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Begun:
    """As in a trainer; windows of a few rows."""
    monkeypatch.setattr(reading, "in_trainer", lambda: True)
    monkeypatch.setattr("lance_ray_stream.feed.FIRST_WINDOW_ROWS", 8)
    monkeypatch.setattr(datasource, "MAX_WINDOW_ROWS", 32)
    return Begun(monkeypatch)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_table(tmp_path_factory.mktemp("db"), 240, columns=["id"])


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
class TestReading:
    def test_g1_every_epoch_is_begun_ahead_and_has_its_rows(self, table, begun) -> None:
        stream = iterator(lrs.read_stream(table, num_splits=4))
        for epoch in range(4):
            assert stream.epoch == epoch
            assert rows(stream, batch_size=16) == oracle(table, 4, epoch=epoch)
        assert soon(lambda: len(begun.ahead) == 4)
        assert len(begun.all) == 5, "the first one where it is needed, all others ahead, and none twice"
        assert stream.state_dict()["epoch"] == 4
        del stream
        gc.collect()
        assert soon(lambda: not begun.alive()), "the fifth epoch never came"

    def test_a_break_leaves_nothing_prepared(self, table, begun) -> None:
        stream = iterator(lrs.read_stream(table, num_splits=4))
        order = oracle(table, 4)
        loop = iter(stream.iter_batches(batch_size=16))
        got = [next(loop)["id"].tolist() for _ in range(14)]
        assert soon(lambda: begun.ahead), "the last windows have come"
        loop.close()  # type: ignore[attr-defined]
        assert soon(lambda: not begun.alive())
        assert [i for ids in got for i in ids] == order[: 14 * 16]
        assert rows(stream, batch_size=16) == order[14 * 16 :]
        assert rows(stream, batch_size=16) == oracle(table, 4, epoch=1)

    def test_a_state_that_is_loaded_between_epochs_counts(self, table, begun) -> None:
        stream = iterator(lrs.read_stream(table, num_splits=4))
        other = iterator(lrs.read_stream(table, num_splits=4))
        rows(other, batch_size=16)
        loop = iter(other.iter_batches(batch_size=16))
        next(loop)
        state = other.state_dict()
        loop.close()  # type: ignore[attr-defined]
        rows(stream, batch_size=16)
        stream.load_state_dict(state)
        assert rows(stream, batch_size=16) == oracle(table, 4, epoch=1)[16:]
        stream.set_epoch(7)
        assert rows(stream, batch_size=16) == oracle(table, 4, epoch=7)
        del stream, other, loop
        gc.collect()
        assert soon(lambda: not begun.alive())

    def test_other_batches_of_the_next_epoch(self, table, begun) -> None:
        stream = iterator(lrs.read_stream(table, num_splits=4))
        rows(stream, batch_size=16)
        assert [len(batch) for batch in batches(stream, batch_size=100, drop_last=True)] == [100, 100]
        assert [row["id"] for row in stream.iter_rows()] == oracle(table, 4, epoch=2)
        assert soon(lambda: len(begun.ahead) == 3)
        assert len(begun.all) == 4

    def test_nothing_is_prepared_where_it_must_not_be(self, table, begun, monkeypatch) -> None:
        class OnActors:
            def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
                return batch

        dataset = lrs.read_stream(table, num_splits=4)
        with_actors = dataset.map_batches(OnActors, concurrency=1)
        (off,) = lrs.StreamDataConfig(prepare_next_epoch=False).iterators(
            "train", dataset, 1, planner=planner.LocalPlanner()
        )
        for stream in (off, iterator(with_actors)):
            assert len(rows(stream, batch_size=16)) == 240
        monkeypatch.setattr(reading, "in_trainer", lambda: False)
        assert len(rows(iterator(dataset), batch_size=16)) == 240
        assert len(begun.all) == 3
        assert not begun.ahead

    def test_it_reads_ahead_no_further_than_told(self, tmp_path, begun) -> None:
        """60 windows of 64 KiB; held at 4 of them until it may go on."""
        table = make_table(tmp_path, 60 * 32, columns=["id"])
        seen = tmp_path / "seen"
        seen.mkdir()

        def widen(batch: dict[str, Any]) -> dict[str, Any]:
            (seen / str(batch["id"][0])).touch()
            batch["wide"] = [b"x" * 2048] * len(batch["id"])
            return batch

        stream = iterator(lrs.read_stream(table, num_splits=4).map_batches(widen))
        progress = stream._progress
        dataset = stream._feed.rest_of_epoch(progress.spec, progress.begin_reading(), stream._cursor)
        execution = Execution(dataset, hold_bytes=4 * 64 * 1024)
        time.sleep(3.0)  # as long as it takes to be sure that it holds
        held = len(list(seen.iterdir()))
        assert 1 <= held < 30
        execution.go_on()
        num_rows = sum(bundle.num_rows() for bundle in execution.bundles)
        assert num_rows == 60 * 32
        execution.stop()

    def test_the_first_batch_does_not_wait_for_the_second_window(self, table, begun, tmp_path) -> None:
        may_go_on = tmp_path / "go_on"

        def wait(batch: dict[str, Any]) -> dict[str, Any]:
            for _ in range(2_000):
                if len(batch["id"]) <= 8 or may_go_on.exists():
                    return batch
                time.sleep(0.01)
            raise TimeoutError("the first batch has not come")

        stream = iterator(lrs.read_stream(table, num_splits=4).map_batches(wait, batch_size=None))
        loop = iter(stream.iter_batches(batch_size=4))
        order = oracle(table, 4)
        assert [next(loop)["id"].tolist() for _ in range(2)] == [order[:4], order[4:8]]
        may_go_on.touch()
        assert [i for batch in loop for i in batch["id"].tolist()] == order[8:]


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("ray_cluster", "quick_controller")
def test_epochs_of_real_trainers(tmp_path: Path) -> None:
    """Two workers, five epochs, each of which but the first was begun ahead, in windows as they are."""
    table = make_table(tmp_path, 4_801, columns=["id"])
    train_loops.fit(
        train_loops.read_five_epochs,
        tmp_path,
        {"train": lrs.read_stream(table, num_splits=8)},
        num_workers=2,
        run="five",
    )
    lines = train_loops.written(tmp_path, "five")
    for rank, epochs in lines.items():
        assert [line["epoch"] for line in epochs] == list(range(5))
        for line in epochs:
            assert line["ids"] == oracle(table, 8, rank=rank, world_size=2, epoch=line["epoch"])
            assert line["prepared"] == (line["epoch"] > 0)
    assert sorted(lines) == [0, 1]
    assert ray.is_initialized()
