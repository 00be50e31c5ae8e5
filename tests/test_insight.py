"""What a stream says of itself: ``stats()``, row counts, Ray's metrics, the progress line, and Ray Data kept quiet."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.data import DataContext
from ray.util.metrics import Counter, Gauge

import lance_ray_stream as lrs
from lance_ray_stream import datasource, feed, insight
from lance_ray_stream.errors import InvalidArgumentError
from lance_ray_stream.insight import Insight, Meter
from lance_ray_stream.iterator import StreamIterator
from lance_ray_stream.planner import LocalPlanner
from tests.probes import batches, count_plans, iterator, iterators, rows, take
from tests.tables import make_table
from tests.user_functions import SLOW_S, double, slow

MONITORING = Path(__file__).parents[1] / "docs" / "monitoring.md"


def needs_ray(test: Any) -> Any:
    """The first half of this file runs without a Ray."""
    return pytest.mark.ray(pytest.mark.usefixtures("ray_cluster")(pytest.mark.timeout(240)(test)))


class Clock:
    """In place of the module ``time``: moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(insight, "time", fake)
    return fake


class Source:
    """Batches that take ``seconds`` each, and as long to see that there are no more; notes when it is closed."""

    def __init__(self, clock: Clock, num_batches: int, seconds: float, *, error: Exception | None = None) -> None:
        self.clock, self.num_batches, self.seconds, self.error = clock, num_batches, seconds, error
        self.num_closed = 0

    def __iter__(self) -> Iterator[int]:
        try:
            for batch in range(self.num_batches):
                self.clock.now += self.seconds
                yield batch
            self.clock.now += self.seconds
            if self.error is not None:
                raise self.error
        finally:
            self.num_closed += 1


class Recorded:
    """The totals of all counters, and the latest value of the gauge, by name and tags: what Prometheus would show."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.values: dict[tuple[str, str], float] = defaultdict(float)
        inc, set_value = Counter.inc, Gauge.set

        # Ray's own run too: they refuse values and tags that are none.
        def counted(counter: Counter, value: float = 1.0, tags: Any = None) -> None:
            inc(counter, value, tags)
            self.values[self.key(counter, tags)] += value

        def noted(gauge: Gauge, value: float, tags: Any = None) -> None:
            set_value(gauge, value, tags)
            self.values[self.key(gauge, tags)] = value

        monkeypatch.setattr(Counter, "inc", counted)
        monkeypatch.setattr(Gauge, "set", noted)

    @staticmethod
    def key(metric: Any, tags: dict[str, str] | None) -> tuple[str, str]:
        name = metric.info["name"].removeprefix("lance_ray_stream_")
        return name, "" if tags is None else f"{tags.get('dataset')}/{tags.get('rank')}"


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(monkeypatch)


# --- arithmetic ------------------------------------------------------------------------------------


def test_meter_tells_waiting_from_training(clock):
    """C72: 3 batches that take 2 s each, the end 2 s too; 3 s of training after each."""
    meter = Meter()
    for batch in meter.timed(Source(clock, 3, 2.0)):
        assert meter.batches == batch + 1
        meter.rows += 10
        clock.now += 3.0
    assert (meter.wait_s, meter.train_s, meter.total_s) == (8.0, 9.0, 17.0)
    assert meter.rows_per_s == 30 / 17
    assert meter.wait_share == 8 / 17


def test_meter_of_nothing(clock):
    meter = Meter()
    assert (meter.rows_per_s, meter.wait_share) == (0.0, 0.0)
    assert list(meter.timed(Source(clock, 0, 2.0))) == []
    assert (meter.batches, meter.wait_s, meter.train_s) == (0, 2.0, 0.0)
    assert (meter.rows_per_s, meter.wait_share) == (0.0, 1.0)


def test_leaving_a_loop_closes_the_source_at_once(clock):
    """The time since the last batch is not counted: nobody knows when the trainer turned away."""
    source, watched = Source(clock, 5, 2.0), Insight("train", 0, progress=True)
    batches = watched.observe(source, epoch=0, first_step=1, num_steps=5)
    for batch in batches:
        if batch == 1:
            break
        clock.now += 3.0
    assert source.num_closed == 0, "the iterator is still held"
    clock.now += 100.0
    batches.close()
    assert source.num_closed == 1
    assert (watched.meter.batches, watched.meter.wait_s, watched.meter.train_s) == (2, 4.0, 3.0)

    source = Source(clock, 5, 2.0)
    for _ in Meter().timed(source):
        break
    assert source.num_closed == 1, "a loop that alone holds the iterator closes it with its break"


def test_errors_of_the_source_and_of_the_loop_pass_through(clock, capsys):
    source, watched = Source(clock, 2, 2.0, error=OSError("disk")), Insight("train", 0, progress=True)
    with pytest.raises(OSError, match="disk"):
        list(watched.observe(source, epoch=0, first_step=1, num_steps=3))
    assert (source.num_closed, watched.meter.batches) == (1, 2)
    source = Source(clock, 2, 2.0)
    batches = watched.observe(source, epoch=0, first_step=1, num_steps=3)
    next(batches)
    with pytest.raises(KeyError):
        batches.throw(KeyError("loop"))
    assert source.num_closed == 1
    assert capsys.readouterr().err == "", "no line says that the epoch is done"


# --- the progress line -----------------------------------------------------------------------------


def test_a_line_every_ten_seconds_and_the_last(clock, capsys):
    """35 batches of 4 rows, 0.25 s of waiting and 0.75 s of training for each."""
    watched = Insight("train", 0, progress=True)
    for _ in watched.observe(Source(clock, 35, 0.25), epoch=2, first_step=1, num_steps=35):
        watched.meter.rows += 4
        clock.now += 0.75
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert [re.findall(r"step (\d+) of 35", line) for line in lines] == [["11"], ["21"], ["31"], ["35"]]
    assert lines[-1] == "train: epoch 2, step 35 of 35, 4 rows/s per rank, waiting for data 26% of the time"


def test_short_iterations_share_a_line(clock, capsys):
    """Epochs of 4 s: at most one line in ten seconds, however many end."""
    watched = Insight("train", 0, progress=True)
    for epoch in range(6):
        list(watched.observe(Source(clock, 3, 1.0), epoch=epoch, first_step=1, num_steps=3))
    assert re.findall(r"epoch (\d+), step (\d+)", capsys.readouterr().err) == [("2", "2"), ("4", "3")]


def test_an_iteration_that_goes_on_counts_steps_of_the_epoch(clock, capsys):
    watched = Insight("train", 0, progress=True)
    for _ in watched.observe(Source(clock, 15, 1.0), epoch=0, first_step=6, num_steps=20):
        pass
    assert re.findall(r"step (\d+) of (\d+)", capsys.readouterr().err) == [("15", "20"), ("20", "20")]


@pytest.mark.parametrize(("rank", "progress"), [(1, True), (0, False)])
def test_no_line_from_other_ranks_or_if_it_is_off(clock, capsys, rank, progress):
    list(Insight("train", rank, progress=progress).observe(Source(clock, 35, 1.0), epoch=0, first_step=1, num_steps=35))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["progress", "ray_data_progress"])
@pytest.mark.parametrize("value", [0, 1, None, "no", "quiet"])
def test_switches_take_true_or_false(name, value):
    with pytest.raises(InvalidArgumentError, match=rf"^{name} must be True or False, got {value!r}"):
        lrs.StreamDataConfig(**{name: value})


# --- metrics ---------------------------------------------------------------------------------------


def test_metrics_grow_every_second_and_at_the_end(clock, recorded):
    """Counters hold the totals of all iterations; each begins with an own meter."""
    watched = Insight("train", 3, progress=False)
    for epoch in range(2):
        seen: list[float] = []
        for _ in watched.observe(Source(clock, 4, 0.25), epoch=epoch, first_step=1, num_steps=4):
            watched.meter.rows += 10
            watched.meter.bytes += 80
            clock.now += 0.5
            seen.append(recorded.values["rows_total", "train/3"] - 40 * epoch)
        assert seen == [0, 10, 10, 30], "at 0.25, 1, 1.75 and 2.5 s: before the rows of the batch that is given then"
    of_rank = {name: value for (name, tags), value in recorded.values.items() if tags == "train/3"}
    assert of_rank == {
        "rows_total": 80,
        "batches_total": 8,
        "bytes_total": 640,
        "wait_seconds_total": 2.5,
        "train_seconds_total": 4.0,
        "epoch": 1,
    }


def test_metrics_are_documented():
    described = set(re.findall(r"`ray_lance_ray_stream_(\w+)`", MONITORING.read_text(encoding="utf-8")))
    known = {metric.info["name"].removeprefix("lance_ray_stream_") for metric in insight._metrics().values()}
    assert described == known
    assert all(metric.info["tag_keys"] == ("dataset", "rank") for metric in insight._metrics().values())


# --- streams ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return make_table(tmp_path_factory.mktemp("db"), 1001, columns=["id"])


@pytest.fixture
def small_windows(monkeypatch) -> None:
    """Many windows where there would be one: the first of 16 rows, then up to 128."""
    monkeypatch.setattr(feed, "FIRST_WINDOW_ROWS", 16)
    monkeypatch.setattr(datasource, "MAX_WINDOW_ROWS", 128)


def numbers(stream: StreamIterator) -> dict[str, Any]:
    """The numbers of ``stats()``, by name."""
    text = stream.stats().partition("\n\n")[0].replace(",", "")
    found = re.search(
        r"rows: (?P<table>\d+) in the table (?P<rows>\d+) after the filter (?P<per_split>\d+) in each of "
        r"(?P<splits>\d+) splits (?P<dropped>\d+) dropped from the epoch\n"
        r" *delivered to this rank: (?P<delivered>\d+) rows in "
        r"(?P<batches>\d+) batches of blocks of (?P<bytes>\d+) bytes\n *waiting for data: (?P<wait>[\d.]+) s "
        r"\((?P<share>\d+)%\); in the training loop: (?P<train>[\d.]+) s\n *read and transform tasks: (?P<tasks>.*)\n "
        r"*delivery in the background: (?P<delivery>.*)$",
        text,
    )
    assert found, text
    values: dict[str, Any] = found.groupdict()
    whole = {name: int(value) for name, value in values.items() if value.isdecimal()}
    times = {name: re.findall(r"(\S+|\w+ \w+) ([\d.]+) s(?: |$)", values[name]) for name in ("tasks", "delivery")}
    return values | whole | {"wait": float(values["wait"]), "train": float(values["train"])} | times


@needs_ray
def test_c72_stats_after_an_epoch(table, small_windows):
    """C72: rows, batches and bytes are those that were delivered; every operator has a time of its own."""
    dataset = lrs.read_stream(table, num_splits=8).map_batches(slow).map_batches(double, num_cpus=0.5)
    stream = iterators(dataset, 2)[1]
    assert "nothing has been read yet" in stream.stats()
    received = batches(stream, batch_size=64)
    found = numbers(stream)
    assert found["delivered"] == sum(map(len, received)) == stream.rows_per_epoch == 500
    assert found["batches"] == len(received) == 8
    assert found["bytes"] == 500 * 16, "two columns of int64"
    tasks = [(name, float(seconds)) for name, seconds in found["tasks"]]
    assert [name for name, _ in tasks] == ["ReadLanceStream", "MapBatches(slow)", "MapBatches(double)"]
    # 500 rows in windows of at most 128, the first of 16: five or more, and each is slept through.
    assert dict(tasks)["MapBatches(slow)"] >= 5 * SLOW_S
    assert found["wait"] >= SLOW_S
    assert [name for name, _ in found["delivery"]] == ["fetch blocks", "cut batches", "format", "collate", "to device"]
    assert "Operator 2 MapBatches(double)" in stream.stats(), "Ray Data's own account stands below"


@needs_ray
def test_c72_stats_while_a_loop_runs_and_after_a_break(table, small_windows):
    """What was prefetched does not count; the next iteration is counted anew; rows one by one are counted so."""
    stream = iterator(lrs.read_stream(table, num_splits=8).map_batches(double))
    seen = []
    for batch in stream.iter_batches(batch_size=100):
        seen.append((numbers(stream)["delivered"], numbers(stream)["batches"]))
        if len(seen) == 3:
            break
        assert len(batch["id"]) == 100
    assert seen == [(100, 1), (200, 2), (300, 3)]
    found = numbers(stream)
    assert (found["delivered"], found["batches"]) == (300, 3)
    assert 300 * 16 <= found["bytes"] <= 1000 * 16, "of the blocks that have arrived"
    assert sum(map(len, batches(stream, batch_size=100))) == numbers(stream)["delivered"] == 700
    for count, _ in enumerate(stream.iter_rows(), start=1):
        if count == 5:
            break
    assert numbers(stream)["delivered"] == 5
    assert sum(1 for _ in stream.iter_rows()) == numbers(stream)["delivered"] == 995


@needs_ray
@pytest.mark.parametrize("num_rows", [None, 903])
def test_c33_rows_add_up(table, monkeypatch, num_rows):
    """C33: rows in the table, after the filter, per split, dropped; the ranks together receive the rest."""
    planned = count_plans(monkeypatch)
    passing = num_rows or 1001
    condition = None if num_rows is None else f"id < {num_rows}"
    streams = iterators(lrs.read_stream(table, num_splits=8, filter=condition), 4)
    received = [rows(stream) for stream in streams]
    assert len({i for of_rank in received for i in of_rank}) == sum(map(len, received)) == passing // 8 * 8
    for stream, of_rank in zip(streams, received, strict=True):
        assert (stream.table_rows, stream.rows, stream.dropped_rows) == (1001, passing, passing % 8)
        assert stream.rows_per_split * 8 + stream.dropped_rows == stream.rows
        assert stream.rows_per_epoch == len(of_rank)
        found = numbers(stream)
        assert [found[name] for name in ("table", "rows", "per_split", "splits", "dropped", "delivered")] == [
            1001,
            passing,
            passing // 8,
            8,
            passing % 8,
            len(of_rank),
        ]
    assert set(planned) == {0}, "no number needs the plan of the next epoch"


@needs_ray
def test_c72_metrics_are_what_was_delivered(table, recorded):
    """Whole epochs, a break and rows one by one, of two ranks; also what came within the last second."""
    streams = iterators(lrs.read_stream(table, num_splits=8), 2)
    for rank, stream in enumerate(streams):
        count = len(rows(stream)) + sum(map(len, take(stream, 2, batch_size=50)))
        count += sum(1 for _ in zip(range(7), stream.iter_rows(), strict=False))
        assert count == 500 + 100 + 7
        key = f"train/{rank}"
        assert recorded.values["rows_total", key] == count
        assert recorded.values["batches_total", key] == 1 + 2 + 1
        assert recorded.values["epoch", key] == 1
        assert recorded.values["wait_seconds_total", key] > 0
        assert recorded.values["bytes_total", key] >= count * 8


@needs_ray
def test_one_rank_shows_the_line(table, monkeypatch, capfd):
    """The ranks of one ``StreamDataConfig``: rank 0, to stderr; nobody with ``progress=False``."""
    monkeypatch.setattr(insight, "_PROGRESS_EVERY_S", 0)
    dataset = lrs.read_stream(table, num_splits=8)
    for progress in (True, False):
        config = lrs.StreamDataConfig(progress=progress)
        for stream in config.iterators("train", dataset, 2, planner=LocalPlanner()):
            take(stream, 2, batch_size=50)
            rows(stream, batch_size=50)
            out, err = capfd.readouterr()
            assert "rows/s" not in out
            steps = re.findall(r"^train: epoch 0, step (\d+) of 10, [\d,]+ rows/s per rank, ", err, re.MULTILINE)
            assert steps == ([str(step) for step in range(1, 11)] if progress and stream.rank == 0 else [])


# --- Ray Data's own lines --------------------------------------------------------------------------


class Lines(logging.Handler):
    """What Ray Data says to a user: messages of INFO and above."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def take(self) -> str:
        text = "\n".join(self.texts)
        self.texts.clear()
        return text


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    monkeypatch.setattr(DataContext.get_current(), "enable_progress_bars", True)  # the tests' Ray has them off
    lines, logger = Lines(), logging.getLogger("ray.data")
    logger.addHandler(lines)
    yield lines
    logger.removeHandler(lines)


@needs_ray
def test_ray_data_is_quiet_for_streams_alone(table, lines):
    """By default; with ``ray_data_progress`` it speaks, and of other datasets always; warnings stay."""
    dataset = lrs.read_stream(table, num_splits=8).map_batches(double)
    (quiet,) = lrs.StreamDataConfig(progress=False).iterators("train", dataset, 1, planner=LocalPlanner())
    assert len(rows(quiet)) == 1000
    assert lines.take() == ""
    assert quiet.get_context().enable_progress_bars is False

    assert ray.data.range(10).materialize().count() == 10
    text = lines.take()
    assert "Starting execution" in text
    assert "execution finished" in text

    config = lrs.StreamDataConfig(progress=False, ray_data_progress=True)
    (loud,) = config.iterators("train", dataset, 1, planner=LocalPlanner())
    assert len(rows(loud)) == 1000
    text = lines.take()
    assert "Starting execution" in text
    assert "ReadLanceStream" in text
    assert "execution finished" in text
    assert loud.get_context().enable_progress_bars is True

    take(quiet, 1, batch_size=10)
    assert lines.take() == "", "also if the loop is left"
    running = quiet._running
    assert running is not None
    executor = logging.getLogger("ray.data._internal.execution.streaming_executor")
    executor.warning("Dataset %s is slow", running.get_dataset_id())
    executor.info("Dataset %s is fine", running.get_dataset_id())
    assert lines.take() == f"Dataset {running.get_dataset_id()} is slow"
